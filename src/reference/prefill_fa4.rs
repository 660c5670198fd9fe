//! PREFILL_FA4: attention of one head of one token, by a kernel with f16 operands and f32 sums.

use super::dec_attn::Attended;
use super::h16::{TINY16, U16};
use super::{Bounded, U};

/// The power of two by which queries are multiplied before they become f16: the next one above `scale`, or `scale` itself.
pub fn folded(scale: f64) -> f64 {
    // Not by log2, which rounds.
    let exponent = (scale.to_bits() >> 52) as i32 - 1023;
    let below = 2f64.powi(exponent);
    if below == scale {
        scale
    } else {
        2.0 * below
    }
}

/// `softmax(scale * q . k + mask) . v`. Rows of `k` have the length of `q`, `mask` has a value for each row.
///
/// On the way f16 rounds three times: the query; each weight, relative to the largest weight that the kernel has met so far; the result.
/// The sum that the weights are divided by is one of unrounded weights, so a weight's rounding moves the result along `v`. What its
/// score's error makes of it is a factor in that sum too, and moves along `v - result`. A tensor core may lose a unit of an f32 for each
/// of the 17 terms that it adds at a time ([`super::quant::Matrix::mat_mul`]). An exponential's argument is a difference of two
/// products with `scale`, each rounded, once for the keys of a tile and once for each new maximum.
pub fn prefill_fa4(q: &Bounded, scale: f64, k: &[f64], v: &[f64], mask: &[f64]) -> Attended {
    let (n, rows) = (q.len(), mask.len());
    assert_eq!(k.len(), n * rows, "one row of K per value of the mask");
    assert_eq!(v.len() % rows, 0, "whole rows of V");
    let n_v = v.len() / rows;
    let narrow = Bounded {
        value: q.value.clone(),
        bound: (0..n)
            .map(|i| {
                let (q, bound) = q.at(i);
                bound + U16 * (q.abs() + bound) + TINY16 / folded(scale)
            })
            .collect(),
    };
    let core = |terms: usize| (terms as f64 / 16.0 * 17.0 * 2.0 + 8.0) * U;
    let score = |k: &[f64], mask: f64| {
        if mask == f64::NEG_INFINITY {
            return (mask, 0.0);
        }
        let (mut value, mut bound) = (0.0, 0.0);
        for (i, k) in k.iter().enumerate() {
            let (q, q_bound) = narrow.at(i);
            value += scale * q * k;
            bound += (scale * k).abs() * (q_bound + core(n) * (q.abs() + q_bound));
        }
        (value + mask, bound + 4.0 * U * (value.abs() + mask.abs()))
    };
    let (scores, errors): (Vec<f64>, Vec<f64>) = k.chunks(n).zip(mask).map(|(k, &mask)| score(k, mask)).unzip();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return Attended {
            weights: vec![0.0; rows],
            values: Bounded::exact(&vec![0f64; n_v]),
        };
    }
    let mut weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    let off = |j: usize| match weights[j] {
        0.0 => 0.0,
        w => w * (errors[j] + (16.0 + 4.0 * (max - scores[j]) + 4.0 * max.abs()) * U).exp_m1(),
    };
    let off: Vec<f64> = (0..rows).map(off).collect();
    // Weights of a row are added up by four threads, in f32.
    let summed = (16.0 + rows as f64 / 4.0) * U + core(rows);
    let values = (0..n_v).map(|d| {
        let column = || v[d..].iter().step_by(n_v).zip(&weights);
        let value: f64 = column().map(|(v, w)| w * v).sum();
        let (mut moved, mut magnitude) = (0.0, 0.0);
        for ((v, w), off) in column().zip(&off) {
            // What is masked has no weight to round.
            let rounded = if *w > 0.0 { U16 * w + TINY16 / total } else { 0.0 };
            moved += off * (v - value).abs() + rounded * v.abs();
            magnitude += w * v.abs();
        }
        let bound = moved + summed * magnitude;
        (value, bound + U16 * (value.abs() + bound) + TINY16)
    });
    Attended {
        values: values.collect(),
        weights,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::reference::dec_attn::{dec_attn, Scoring};
    use crate::reference::sample::Sample;

    #[test]
    fn the_fold_is_the_next_power_of_two() {
        for (scale, power) in [
            (0.125, 0.125),
            (1.0, 1.0),
            (0.088, 0.125),
            (0.0625001, 0.125),
            (3.0, 4.0),
        ] {
            assert_eq!(folded(scale), power, "{scale}");
        }
    }

    #[test]
    fn values_are_those_of_attention_with_a_few_tokens() {
        let mut sample = Sample::new(3);
        let wide =
            |n: usize, sample: &mut Sample| -> Vec<f64> { sample.values(n, 1.0).iter().map(|&v| v.into()).collect() };
        let (q, k, v) = (sample.values(8, 1.0), wide(80, &mut sample), wide(80, &mut sample));
        let mut mask = [0.0; 10];
        (mask[2], mask[9]) = (f64::NEG_INFINITY, -1.5);
        let scoring = Scoring {
            scale: 0.3,
            softcap: 0.0,
        };
        let few = dec_attn(&Bounded::exact(&q), scoring, &k, &v, &mask);
        let many = prefill_fa4(&Bounded::exact(&q), 0.3, &k, &v, &mask);
        assert_eq!(few.weights, many.weights);
        assert_eq!(few.values.value, many.values.value);
        assert!((0..8).all(|i| many.values.bound[i] > few.values.bound[i]));
    }

    #[test]
    fn a_query_that_sees_nothing_gives_exact_zeros() {
        let out = prefill_fa4(
            &Bounded::exact(&[1f32]),
            1.0,
            &[1.0],
            &[f64::MAX, 2.0],
            &[f64::NEG_INFINITY],
        );
        assert_eq!(out.values, Bounded::exact(&[0f64; 2]));
    }
}
