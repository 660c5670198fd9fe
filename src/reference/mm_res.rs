//! MM_RES: `dst = w . x (+ bias) (+ res)`, of many tokens, on tensor cores.

use super::mm_prefill::mm_prefill;
use super::quant::Matrix;
use super::Bounded;

/// `w . x` of each token as in [`super::mm_prefill`], then `bias` and the token's `res` where there are such.
pub fn mm_res(w: &Matrix, tokens: &[Bounded], bias: Option<&Bounded>, res: Option<&[Bounded]>) -> Vec<Bounded> {
    let products = mm_prefill(w, tokens).into_iter().enumerate();
    products
        .map(|(t, product)| {
            let terms = [bias, res.map(|rows| &rows[t])].into_iter().flatten();
            terms.fold(product, |sum, term| sum.add(term))
        })
        .collect()
}
