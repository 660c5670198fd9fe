//! RoPE with YaRN as ggml defines it.
//!
//! Pair `i` of the first `n_dims` values turns by `theta = pos * freq_base^(-2i / n_dims) / freq_factors[i]`, times
//! `freq_scale`. With `ext_factor` YaRN mixes the scaled and the plain angle by a ramp over the pairs and raises the magnitude.

use super::{rounded, Bounded, U};
use crate::kernel::{Rope, RopeMode};

/// Everything but positions and frequency factors.
#[derive(Debug, Clone, Copy)]
pub struct Params {
    /// Rotated values of a head.
    pub n_dims: usize,
    /// Base of the frequencies.
    pub freq_base: f64,
    /// Position interpolation.
    pub freq_scale: f64,
    /// YaRN's mix; 0 turns it off.
    pub ext_factor: f64,
    /// Magnitude.
    pub attn_factor: f64,
    /// Pairs between which the ramp falls: `ggml_rope_yarn_corr_dims`.
    pub corr_dims: (f64, f64),
}

impl From<&Rope> for Params {
    fn from(rope: &Rope) -> Params {
        Params {
            n_dims: rope.n_dims as usize,
            freq_base: rope.freq_base.into(),
            freq_scale: rope.freq_scale.into(),
            ext_factor: rope.ext_factor.into(),
            attn_factor: rope.attn_factor.into(),
            corr_dims: (rope.corr_low.into(), rope.corr_high.into()),
        }
    }
}

/// How a pair turns.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Turn {
    /// In radians.
    pub angle: f64,
    /// Factor of both values.
    pub magnitude: f64,
}

impl Params {
    /// The turn of pair `i` at a position.
    pub fn turn(&self, pos: i32, i: usize, freq_factor: f64) -> Turn {
        let theta = self.plain_angle(pos, i, freq_factor);
        let mut turn = Turn {
            angle: self.freq_scale * theta,
            magnitude: self.attn_factor,
        };
        if self.ext_factor != 0.0 {
            let (low, high) = self.corr_dims;
            let ramp = 1.0 - ((i as f64 - low) / (high - low).max(0.001f32.into())).clamp(0.0, 1.0);
            let mix = ramp * self.ext_factor;
            turn.angle = turn.angle * (1.0 - mix) + theta * mix;
            turn.magnitude *= 1.0 + 0.1 * (1.0 / self.freq_scale).ln();
        }
        turn
    }

    fn plain_angle(&self, pos: i32, i: usize, freq_factor: f64) -> f64 {
        f64::from(pos) * self.freq_base.powf(-2.0 * i as f64 / self.n_dims as f64) / freq_factor
    }

    /// Error of the angle in f32: the base of the power is rounded (`i` units), the power is good to 4 ulp, and each of the
    /// products and the mix adds one or two.
    fn angle_bound(&self, pos: i32, i: usize, freq_factor: f64) -> f64 {
        let theta = self.plain_angle(pos, i, freq_factor).abs();
        let largest = theta * self.freq_scale.abs().max(1.0) * (1.0 + 2.0 * self.ext_factor.abs());
        (i as f64 + 8.0 + 8.0) * U * largest
    }
}

/// Indices of the values of pair `i`.
pub fn pair(mode: RopeMode, n_dims: usize, i: usize) -> (usize, usize) {
    match mode {
        RopeMode::Neox => (i, i + n_dims / 2),
        RopeMode::Normal | RopeMode::None => (2 * i, 2 * i + 1),
    }
}

/// Rotates the first `n_dims` values of a head; the others stay.
pub fn rope(v: &Bounded, mode: RopeMode, params: &Params, pos: i32, freq_factors: Option<&[f64]>) -> Bounded {
    let mut out = v.clone();
    if mode == RopeMode::None {
        return out;
    }
    for i in 0..params.n_dims / 2 {
        let factor = freq_factors.map_or(1.0, |f| f[i]);
        let Turn { angle, magnitude } = params.turn(pos, i, factor);
        // sincosf is good to 2 ulp, the magnitude to a few.
        let turned = params.angle_bound(pos, i, factor) + 12.0 * U;
        let (a, b) = pair(mode, params.n_dims, i);
        let ((x0, e0), (x1, e1)) = (v.at(a), v.at(b));
        let bound = ((e0 + e1) + (x0.abs() + x1.abs()) * turned) * magnitude.abs();
        (out.value[a], out.bound[a]) = rounded((x0 * angle.cos() - x1 * angle.sin()) * magnitude, bound);
        (out.value[b], out.bound[b]) = rounded((x0 * angle.sin() + x1 * angle.cos()) * magnitude, bound);
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Params = Params {
        n_dims: 4,
        freq_base: 10000.0,
        freq_scale: 1.0,
        ext_factor: 0.0,
        attn_factor: 1.0,
        corr_dims: (0.0, 0.0),
    };

    #[test]
    fn a_quarter_turn_swaps_the_pair() {
        // Position 1 of a base that makes pair 0 turn by 1 rad and pair 1 by 1/100 rad.
        let v = Bounded::exact(&[1.0, 0.0, 0.0, 1.0, 7.0, 8.0]);
        let out = rope(&v, RopeMode::Neox, &PLAIN, 1, None);
        let near = |got: f64, want: f64| assert!((got - want).abs() < 1e-12, "{got} is not {want}");
        near(out.value[0], 1f64.cos());
        near(out.value[2], 1f64.sin());
        near(out.value[1], -(0.01f64.sin()));
        near(out.value[3], 0.01f64.cos());
        assert_eq!(out.value[4..], [7.0, 8.0], "beyond n_dims nothing turns");
        let out = rope(&v, RopeMode::Normal, &PLAIN, 1, None);
        near(out.value[0], 1f64.cos());
        near(out.value[1], 1f64.sin());
    }

    #[test]
    fn frequency_factors_divide_and_yarn_mixes() {
        let turn = |params: &Params, i, ff| params.turn(100, i, ff);
        assert_eq!(turn(&PLAIN, 0, 4.0).angle, 25.0);
        let yarn = Params {
            freq_scale: 0.25,
            ext_factor: 1.0,
            corr_dims: (0.0, 1.0),
            ..PLAIN
        };
        // At the ramp's start the plain angle, at its end the interpolated one.
        assert_eq!(turn(&yarn, 0, 1.0).angle, 100.0);
        assert!((turn(&yarn, 1, 1.0).angle - 0.25).abs() < 1e-12);
        assert!((turn(&yarn, 0, 1.0).magnitude - (1.0 + 0.1 * 4f64.ln())).abs() < 1e-12);
    }
}
