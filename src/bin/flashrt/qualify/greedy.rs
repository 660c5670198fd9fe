//! Compares greedy texts token for token.

use ggml_flashrt::report::Check;
use serde_json::{json, Value};

/// Largest change of a log-probability that can be rounding: sums in another order move it by thousandths, 8-bit
/// activations rounded elsewhere by hundredths. Beyond this, equal texts would be luck.
const MAX_NOISE: f64 = 0.1;
/// Candidates to see at each step.
const CANDIDATES: u32 = 5;

/// A generated text.
pub struct Text {
    /// As text.
    pub content: String,
    steps: Vec<Step>,
}

struct Step {
    /// The token that was taken.
    token: u64,
    /// The likeliest tokens with their log-probabilities.
    top: Vec<(u64, f64)>,
}

/// The request that makes llama-server generate `tokens` tokens greedily and show the candidates.
pub fn request(prompt: &str, tokens: u32) -> Value {
    json!({"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "seed": 1, "ignore_eos": true,
        "cache_prompt": false, "n_probs": CANDIDATES})
}

impl Text {
    /// From llama-server's answer.
    pub fn read(answer: &Value) -> Option<Text> {
        let step = |s: &Value| {
            let candidate = |c: &Value| Some((c["id"].as_u64()?, c["logprob"].as_f64()?));
            let top = s["top_logprobs"]
                .as_array()?
                .iter()
                .map(candidate)
                .collect::<Option<_>>()?;
            Some(Step {
                token: s["id"].as_u64()?,
                top,
            })
        };
        let steps = answer["completion_probabilities"]
            .as_array()?
            .iter()
            .map(step)
            .collect::<Option<Vec<_>>>()?;
        let content = answer["content"].as_str()?.to_owned();
        (!steps.is_empty()).then_some(Text { content, steps })
    }
}

impl Step {
    fn logprob(&self, token: u64) -> Option<f64> {
        self.top
            .iter()
            .find(|(id, _)| *id == token)
            .map(|(_, logprob)| *logprob)
    }

    /// Largest change of the log-probabilities of the two likeliest tokens.
    fn noise(&self, other: &Step) -> f64 {
        let change = |(id, logprob): &(u64, f64)| Some((logprob - other.logprob(*id)?).abs());
        self.top.iter().take(2).filter_map(change).fold(0.0, f64::max)
    }
}

/// Steps before the texts part.
fn common(on: &Text, off: &Text) -> usize {
    on.steps
        .iter()
        .zip(&off.steps)
        .take_while(|(a, b)| a.token == b.token)
        .count()
}

/// The verdict: every pair of texts is the same, or parts where the two tokens are so close that the noise seen in all steps
/// before such partings can exchange them.
pub fn compare(prompts: &[&str], on: &[Text], off: &[Text], tokens: u32) -> Check {
    let pairs = || on.iter().zip(off);
    let before = pairs().flat_map(|(a, b)| a.steps.iter().zip(&b.steps).take(common(a, b)));
    let noise = before.map(|(a, b)| a.noise(b)).fold(0.0, f64::max);
    let mut partings = Vec::new();
    let mut ties = 0;
    for (prompt, (a, b)) in prompts.iter().zip(pairs()) {
        let at = common(a, b);
        let (Some(on), Some(off)) = (a.steps.get(at), b.steps.get(at)) else {
            continue;
        };
        // The stock arm's preference for its own token; two log-probabilities that each move by `noise` can exchange.
        let gap = off
            .logprob(off.token)
            .zip(off.logprob(on.token))
            .map(|(own, other)| own - other);
        let tie = gap.is_some_and(|gap| gap <= 2.0 * noise);
        ties += usize::from(tie);
        partings
            .push(json!({"prompt": prompt, "at_token": at, "gap": gap, "tie": tie, "on": a.content, "off": b.content}));
    }
    let complete = pairs().all(|(a, b)| a.steps.len() == b.steps.len());
    let pass = complete && partings.len() == ties && noise <= MAX_NOISE;
    let same = prompts.len() - partings.len();
    let detail = format!(
        "{same} of {} texts of {tokens} tokens are the same, {ties} part at a tie; log-probabilities move by {noise:.1e} at most",
        prompts.len()
    );
    let data = json!({"noise": noise, "partings": partings});
    Check {
        name: "greedy text".to_owned(),
        pass: Some(pass),
        detail,
        data,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A text of steps, each the token taken and the log-probabilities of tokens 1 and 2.
    fn text(steps: &[(u64, f64, f64)]) -> Text {
        let steps: Vec<Value> = steps
            .iter()
            .map(|(id, one, two)| {
                json!({"id": id, "top_logprobs": [{"id": 1, "logprob": one}, {"id": 2, "logprob": two}]})
            })
            .collect();
        Text::read(&json!({"content": "", "completion_probabilities": steps})).unwrap()
    }

    fn verdict(on: &[(u64, f64, f64)], off: &[(u64, f64, f64)]) -> Option<bool> {
        compare(&["p"], &[text(on)], &[text(off)], 2).pass
    }

    #[test]
    fn texts_may_part_at_a_tie_only() {
        let off = [(1, -0.1, -3.0), (1, -0.700, -0.702)];
        assert_eq!(verdict(&off, &off), Some(true));
        let tie = [(1, -0.102, -3.0), (2, -0.702, -0.701)];
        assert_eq!(
            verdict(&tie, &off),
            Some(true),
            "the gap of 0.002 is within twice the noise of 0.002"
        );
        let quiet = [(1, -0.1005, -3.0), (2, -0.702, -0.701)];
        assert_eq!(
            verdict(&quiet, &off),
            Some(false),
            "the noise of 0.0005 cannot close the gap"
        );
        let at_once = [(2, -0.71, -0.70)];
        assert_eq!(
            verdict(&at_once, &[(1, -0.70, -0.71)]),
            Some(false),
            "no step before shows any noise"
        );
    }

    #[test]
    fn equal_tokens_with_other_probabilities_are_no_luck() {
        assert_eq!(verdict(&[(1, -0.1, -3.0)], &[(1, -0.3, -3.0)]), Some(false));
    }

    #[test]
    fn a_shorter_text_is_no_equal_text() {
        assert_eq!(
            verdict(&[(1, -0.1, -3.0)], &[(1, -0.1, -3.0), (1, -0.1, -3.0)]),
            Some(false)
        );
    }

    #[test]
    fn a_token_outside_of_the_candidates_is_no_tie() {
        let off = [(1, -0.1, -0.1), (1, -0.1, -0.1)];
        assert_eq!(verdict(&[(1, -0.15, -0.1), (9, -0.1, -0.1)], &off), Some(false));
    }

    #[test]
    fn answers_without_candidates_are_refused() {
        assert!(Text::read(&json!({"content": "x"})).is_none());
        assert!(Text::read(&json!({"content": "x", "completion_probabilities": []})).is_none());
    }
}
