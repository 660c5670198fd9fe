//! MM_RES: `dst = w . x (+ bias) (+ res)`, of many tokens, on tensor cores.

use super::mm_prefill::mm_prefill;
use super::quant::Matrix;
use super::Bounded;

/// `w . x` of each token as in [`super::mm_prefill`], then `bias` and the token's `res` where there are such, added to one another before.
pub fn mm_res(w: &Matrix, tokens: &[Bounded], bias: Option<&Bounded>, res: Option<&[Bounded]>) -> Vec<Bounded> {
    let products = mm_prefill(w, tokens).into_iter().enumerate();
    products
        .map(|(t, product)| match (bias, res.map(|rows| &rows[t])) {
            (Some(bias), Some(res)) => product.add(&bias.add(res)),
            (Some(term), None) | (None, Some(term)) => product.add(term),
            (None, None) => product,
        })
        .collect()
}
