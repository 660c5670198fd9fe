//! The functions between gate and up: `act(gate) * up`.

use super::{rounded, Bounded, U};
use crate::kernel::Glu;

/// `act(g)` of a kind, from its definition; [`Glu::None`] is the identity.
pub fn activation(kind: Glu, g: f64) -> f64 {
    match kind {
        Glu::None => g,
        Glu::Reglu => g.max(0.0),
        Glu::Geglu => {
            let inner = (2.0 / std::f64::consts::PI).sqrt() * g * (1.0 + 0.044715 * g * g);
            0.5 * g * (1.0 + inner.tanh())
        }
        Glu::Swiglu => g / (1.0 + (-g).exp()),
        Glu::GegluErf => 0.5 * g * (1.0 + erf(g / std::f64::consts::SQRT_2)),
        Glu::GegluQuick => g / (1.0 + (-1.702 * g).exp()),
    }
}

/// `act(gate) * up`. No activation's slope exceeds 1.13. Its own error: `1 + tanh` (or erf) cancels for negative `g`, which
/// leaves a few units of `|g|`; exponentials and quotients a few of the result, and the exponent `g` is rounded itself.
pub fn glu(kind: Glu, gate: &Bounded, up: &Bounded) -> Bounded {
    assert_eq!(gate.len(), up.len(), "operands of one shape");
    (0..gate.len())
        .map(|i| {
            let ((g, g_bound), (u, u_bound)) = (gate.at(i), up.at(i));
            let act = activation(kind, g);
            let act_bound = 1.13 * g_bound + 4.0 * U * g.abs() + (8.0 + 4.0 * g.abs()) * U * act.abs();
            rounded(act * u, act_bound * (u.abs() + u_bound) + act.abs() * u_bound)
        })
        .collect()
}

/// The error function, by its series of positive terms `2/sqrt(pi) exp(-x^2) sum 2^n x^(2n+1) / (2n+1)!!`.
fn erf(x: f64) -> f64 {
    if x.abs() > 6.0 {
        return x.signum();
    }
    let (mut term, mut sum, mut n) = (x, x, 1.0);
    while term.abs() > 1e-17 * sum.abs() {
        term *= 2.0 * x * x / (2.0 * n + 1.0);
        sum += term;
        n += 1.0;
    }
    2.0 / std::f64::consts::PI.sqrt() * (-x * x).exp() * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Values of the definitions, computed elsewhere to 15 digits.
    #[test]
    fn activations_have_known_values() {
        let near = |got: f64, want: f64| assert!((got - want).abs() < 1e-13, "{got} is not {want}");
        near(erf(0.5), 0.5204998778130465);
        near(erf(-2.0), -0.9953222650189527);
        near(erf(5.5), 0.9999999999999926);
        near(activation(Glu::GegluErf, 1.0), 0.8413447460685429);
        near(activation(Glu::Geglu, 1.0), 0.8411919906082768);
        near(activation(Glu::Swiglu, 1.0), 0.7310585786300049);
        near(activation(Glu::GegluQuick, -1.0), -0.1542042340671787);
        near(activation(Glu::Reglu, -3.0), 0.0);
    }
}
