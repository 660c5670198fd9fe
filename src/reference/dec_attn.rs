//! DEC_ATTN: attention of one head of one token over the rows of its KV head.

use super::{Bounded, U};

/// How scores are made of products.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scoring {
    /// Factor of `q . k`.
    pub scale: f64,
    /// Scores become `softcap * tanh(score / softcap)`; 0: they stay.
    pub softcap: f64,
}

/// What a query makes of the keys.
#[derive(Debug, Clone, PartialEq)]
pub struct Attended {
    /// Weight of each row: they add up to 1, or all are 0 where every key is masked.
    pub weights: Vec<f64>,
    /// Weighted sum of the rows of V.
    pub values: Bounded,
}

/// `softmax(cap(scale * q . k) + mask) . v`. Rows of `k` and `v` have the length of `q`; `mask` has a value for each row.
///
/// An f32 kernel's weight is off by the error of its score (the exponential turns it into a factor) and a few roundings of the
/// exponential, whose argument is rounded too. A common factor of all weights cancels, so a weight's error moves the result
/// along `v - result`. The products of a score are added in at least 8 lanes, the rows of V in at least 8 parts.
pub fn dec_attn(q: &Bounded, scoring: Scoring, k: &[f64], v: &[f64], mask: &[f64]) -> Attended {
    let (n, rows) = (q.len(), mask.len());
    assert_eq!(
        (k.len(), v.len()),
        (n * rows, n * rows),
        "one row of K and V per value of the mask"
    );
    let (scores, errors): (Vec<f64>, Vec<f64>) = k
        .chunks(n)
        .zip(mask)
        .map(|(k, &mask)| score(q, scoring, k, mask))
        .unzip();
    let max = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    if max == f64::NEG_INFINITY {
        return Attended {
            weights: vec![0.0; rows],
            values: Bounded::exact(&vec![0f64; n]),
        };
    }
    let mut weights: Vec<f64> = scores.iter().map(|s| (s - max).exp()).collect();
    let total: f64 = weights.iter().sum();
    weights.iter_mut().for_each(|w| *w /= total);
    let off = |j: usize| match weights[j] {
        0.0 => 0.0,
        w => w * (errors[j] + (8.0 + 4.0 * (max - scores[j])) * U).exp_m1(),
    };
    let off: Vec<f64> = (0..rows).map(off).collect();
    let roundings = (16.0 + rows as f64 / 8.0) * U;
    let values = (0..n).map(|d| {
        let column = || v[d..].iter().step_by(n).zip(&weights);
        let value: f64 = column().map(|(v, w)| w * v).sum();
        let magnitude: f64 = column().map(|(v, w)| w * v.abs()).sum();
        let moved: f64 = v[d..]
            .iter()
            .step_by(n)
            .zip(&off)
            .map(|(v, off)| off * (v - value).abs())
            .sum();
        (value, moved + 2.0 * roundings * magnitude)
    });
    Attended {
        values: values.collect(),
        weights,
    }
}

/// A score and how far f32 may be from it.
fn score(q: &Bounded, scoring: Scoring, k: &[f64], mask: f64) -> (f64, f64) {
    if mask == f64::NEG_INFINITY {
        return (mask, 0.0);
    }
    let roundings = (16.0 + k.len() as f64 / 8.0) * U;
    let (mut value, mut bound) = (0.0, 0.0);
    for (i, k) in k.iter().enumerate() {
        let (q, q_bound) = q.at(i);
        value += scoring.scale * q * k;
        bound += (scoring.scale * k).abs() * (q_bound + roundings * (q.abs() + q_bound));
    }
    if scoring.softcap != 0.0 {
        // Its slope is 1 at most.
        value = scoring.softcap * (value / scoring.softcap).tanh();
        bound += 4.0 * U * value.abs();
    }
    (value + mask, bound + U * (value + mask).abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SCORING: Scoring = Scoring {
        scale: 0.5,
        softcap: 0.0,
    };

    #[test]
    fn equal_scores_average_and_a_mask_takes_rows_out() {
        let q = Bounded::exact(&[2f32, 0.0]);
        let (k, v) = ([1.0, 5.0, 1.0, -5.0, 1.0, 0.0], [1.0, 10.0, 3.0, 20.0, 100.0, 100.0]);
        let out = dec_attn(&q, SCORING, &k, &v, &[0.0, 0.0, f64::NEG_INFINITY]);
        assert_eq!(out.values.value, [2.0, 15.0]);
        assert_eq!(out.weights, [0.5, 0.5, 0.0]);
    }

    #[test]
    fn scores_are_scaled_capped_and_then_masked() {
        let q = Bounded::exact(&[4f32]);
        let weight = |scoring, mask| {
            dec_attn(&q, scoring, &[1.0, 0.0], &[1.0, 0.0], &[mask, 0.0])
                .values
                .value[0]
        };
        let logistic = |s: f64| s.exp() / (1.0 + s.exp());
        assert!((weight(SCORING, 0.0) - logistic(2.0)).abs() < 1e-15);
        assert!((weight(SCORING, 1.0) - logistic(3.0)).abs() < 1e-15);
        let capped = Scoring {
            softcap: 1.0,
            ..SCORING
        };
        assert!((weight(capped, 1.0) - logistic(2f64.tanh() + 1.0)).abs() < 1e-15);
    }

    #[test]
    fn a_query_that_sees_nothing_gives_exact_zeros() {
        let q = Bounded::exact(&[1f32]);
        let out = dec_attn(&q, SCORING, &[1.0], &[f64::MAX], &[f64::NEG_INFINITY]);
        assert_eq!(out.values, Bounded::exact(&[0f64]));
    }
}
