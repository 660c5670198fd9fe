//! MOE_PREFILL and MOE_FFN: the products of [`super::mm_prefill`] and [`super::geglu_ffn`] with the experts that tokens are routed
//! to.

use super::geglu_ffn::geglu_ffn;
use super::mm_prefill::mm_prefill;
use super::quant::Matrix;
use super::Bounded;
use crate::kernel::{moe_max_rows, Glu};

/// Which pairs (token, slot) each expert multiplies, as a right kernel writes it, number by number: see `frt_moe_rows` in
/// `csrc/flashrt_kernels.h`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Route {
    /// The pair at each place that is used, -1 between experts.
    pub rows: Vec<i32>,
    /// First place of each expert, then the number of places.
    pub begin: Vec<i32>,
    /// Pairs of each expert.
    pub count: Vec<i32>,
}

impl Route {
    /// Of these ids, one for each pair. Ids that are no expert are left out.
    pub fn new(ids: &[i32], n_experts: usize) -> Route {
        let mut route = Route {
            rows: Vec::new(),
            begin: Vec::new(),
            count: Vec::new(),
        };
        for expert in 0..n_experts {
            route.begin.push(route.rows.len() as i32);
            let mine = (0i32..).zip(ids).filter(|(_, &id)| usize::try_from(id) == Ok(expert));
            route.rows.extend(mine.map(|(pair, _)| pair));
            route.count.push(route.rows.len() as i32 - route.begin[expert]);
            route.rows.resize(route.rows.len().next_multiple_of(8), -1);
        }
        route.begin.push(route.rows.len() as i32);
        assert!(route.rows.len() <= moe_max_rows(ids.len() as i32, n_experts as i32) as usize);
        route
    }
}

/// The product of each expert with its pairs; `None` for a pair whose id is no expert: such rows are left as they are.
fn routed(
    ids: &[i32],
    x: &[Bounded],
    n_experts: usize,
    product: impl Fn(usize, &[Bounded]) -> Vec<Bounded>,
) -> Vec<Option<Bounded>> {
    assert_eq!(ids.len(), x.len(), "an input for each pair");
    let mut out = vec![None; ids.len()];
    for expert in 0..n_experts {
        let mine = |pair: &usize| usize::try_from(ids[*pair]) == Ok(expert);
        let pairs: Vec<usize> = (0..ids.len()).filter(mine).collect();
        let inputs: Vec<Bounded> = pairs.iter().map(|&pair| x[pair].clone()).collect();
        for (pair, result) in pairs.into_iter().zip(product(expert, &inputs)) {
            out[pair] = Some(result);
        }
    }
    out
}

/// `w[id] . x` of each pair.
pub fn moe_prefill(w: &[Matrix], ids: &[i32], x: &[Bounded]) -> Vec<Option<Bounded>> {
    routed(ids, x, w.len(), |e, x| mm_prefill(&w[e], x))
}

/// `act(gate[id] . x) * (up[id] . x)` of each pair.
pub fn moe_ffn(kind: Glu, gate: &[Matrix], up: &[Matrix], ids: &[i32], x: &[Bounded]) -> Vec<Option<Bounded>> {
    routed(ids, x, gate.len(), |e, x| geglu_ffn(kind, &gate[e], &up[e], x))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// B32: ids that are no expert.
    #[test]
    fn pairs_stand_in_the_order_of_their_experts() {
        let route = Route::new(&[2, 0, 3, 2, -1, i32::MAX, 0, 2], 3);
        let none = [-1; 8];
        assert_eq!(route.count, [2, 0, 3]);
        assert_eq!(route.begin, [0, 8, 8, 16]);
        assert_eq!(route.rows, [&[1, 6][..], &none[..6], &[0, 3, 7], &none[..5]].concat());
        let full = Route::new(&[1; 8], 2);
        assert_eq!((full.begin, full.rows), (vec![0, 0, 8], (0..8).collect()));
    }
}
