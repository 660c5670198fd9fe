//! Compares greedy texts token for token, and says of each place where two part whether it is a tie.
//!
//! Up to that place both arms have seen the same tokens, so any difference of their log-probabilities is the arms' own noise:
//! sums in another order, activations rounded elsewhere. What takes one token rather than another is the gap between the
//! log-probabilities of two candidates, so the noise is measured on that gap: at all common steps of all prompts, the gap
//! between the two likeliest tokens in one arm less the same gap in the other, in root mean square. Where texts part, the
//! gap between the two tokens taken must lie within four times that, in either arm. A wrong result in one place stands out by
//! it; one that is wrong everywhere raises the noise, and is left to the KL divergence.

use ggml_flashrt::report::Check;
use serde_json::{json, Value};

/// Gaps up to this many times the noise are ties.
const TIE: f64 = 4.0;
/// Fewer common steps do not tell the noise: at 50 it is known to 10 % (1 / sqrt(2 n)).
const LEAST_STEPS: usize = 50;
/// Candidates to see at each step.
const CANDIDATES: u32 = 10;

/// A generated text.
pub struct Text {
    /// As text.
    pub content: String,
    steps: Vec<Step>,
}

/// One token of a text.
pub struct Step {
    /// The token that was taken.
    token: u64,
    /// The likeliest tokens with their log-probabilities.
    top: Vec<(u64, f64)>,
}

/// Where two texts of one prompt part.
pub struct Parting {
    /// Index of the prompt.
    prompt: usize,
    /// Tokens before it.
    at: usize,
    /// Tokens that were taken: with windows, without.
    taken: [u64; 2],
    /// By how much each arm prefers its own token; `None` when it shows only one of the two.
    gap: [Option<f64>; 2],
}

/// The request that makes llama-server generate `tokens` tokens greedily and show the candidates. A prompt is text, or a list of
/// text and tokens.
pub fn request(prompt: impl Into<Value>, tokens: u32) -> Value {
    json!({"prompt": prompt.into(), "n_predict": tokens, "temperature": 0.0, "seed": 1, "ignore_eos": true,
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

    /// By how much `a` is preferred to `b`.
    fn gap(&self, a: u64, b: u64) -> Option<f64> {
        Some(self.logprob(a)? - self.logprob(b)?)
    }

    /// How far the other arm's gap between this arm's two likeliest tokens is from this arm's.
    fn noise(&self, other: &Step) -> Option<f64> {
        let [(a, _), (b, _)] = *self.top.get(..2)? else {
            return None;
        };
        Some(other.gap(a, b)? - self.gap(a, b)?)
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

/// Where texts with and without windows part.
pub fn partings(on: &[Text], off: &[Text]) -> Vec<Parting> {
    let parting = |(prompt, (on, off)): (usize, (&Text, &Text))| {
        let at = common(on, off);
        let [a, b] = [on.steps.get(at)?, off.steps.get(at)?];
        let taken = [a.token, b.token];
        let gap = [a.gap(a.token, b.token), b.gap(b.token, a.token)];
        Some(Parting { prompt, at, taken, gap })
    };
    on.iter().zip(off).enumerate().filter_map(parting).collect()
}

impl Parting {
    /// The request that asks another model for its candidates there.
    pub fn question(&self, prompts: &[&str], on: &[Text]) -> Value {
        let prompt = prompts[self.prompt];
        let before = &on[self.prompt].steps[..self.at];
        if before.is_empty() {
            // A list of one text would be a list of prompts.
            return request(prompt, 1);
        }
        let tokens = before.iter().map(|s| json!(s.token));
        request(std::iter::once(json!(prompt)).chain(tokens).collect::<Vec<Value>>(), 1)
    }

    /// By how much that model prefers the windows' token, from its answer.
    pub fn preference(&self, answer: &Text) -> Option<f64> {
        answer.steps[0].gap(self.taken[0], self.taken[1])
    }
}

/// The verdict: the texts are as long as each other, and wherever two part it is a tie, or the dequantised model too takes the
/// windows' token. `preferences` are the latter's, one for each parting, or empty.
pub fn judge(
    prompts: &[&str],
    (on, off): (&[Text], &[Text]),
    partings: &[Parting],
    preferences: &[Option<f64>],
    tokens: u32,
) -> Check {
    let pairs = || on.iter().zip(off);
    let noise: Vec<f64> = pairs()
        .flat_map(|(on, off)| off.steps.iter().zip(&on.steps).take(common(on, off)))
        .filter_map(|(off, on)| off.noise(on))
        .collect();
    let rms = (noise.iter().map(|n| n * n).sum::<f64>() / noise.len().max(1) as f64).sqrt();
    let bound = TIE * rms;
    let enough = partings.is_empty() || noise.len() >= LEAST_STEPS;
    let (mut ties, mut sided, mut shown) = (0, 0, Vec::new());
    for (i, p) in partings.iter().enumerate() {
        let preference = preferences.get(i).copied().flatten();
        let tie = p.gap.iter().all(|gap| gap.is_some_and(|gap| gap <= bound));
        ties += usize::from(tie);
        sided += usize::from(!tie && preference.is_some_and(|p| p > 0.0));
        shown.push(json!({"prompt": prompts[p.prompt], "at_token": p.at, "tie": tie,
            "gap_on": p.gap[0], "gap_off": p.gap[1], "dequantised_prefers_on_by": preference,
            "on": on[p.prompt].content, "off": off[p.prompt].content}));
    }
    let complete = pairs().all(|(on, off)| on.steps.len() == off.steps.len());
    let mut detail = format!(
        "{} of {} texts of {tokens} tokens are the same, {ties} part at a tie, {sided} to the dequantised model's token",
        prompts.len() - partings.len(),
        prompts.len()
    );
    detail += &match enough {
        true => format!("; noise of a gap {rms:.1e} over {} common steps", noise.len()),
        false => format!("; {} common steps are too few to know the noise", noise.len()),
    };
    Check {
        name: "greedy text".to_owned(),
        pass: Some(complete && enough && ties + sided == partings.len()),
        detail,
        data: json!({"noise": rms, "largest_noise": noise.iter().fold(0.0, |m: f64, n| m.max(n.abs())),
            "common_steps": noise.len(), "tie_up_to": bound, "partings": shown}),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A step: the token taken, and the log-probabilities of tokens 1 and 2.
    type Taken = (u64, f64, f64);

    fn text(steps: &[Taken]) -> Text {
        let steps: Vec<Value> = steps
            .iter()
            .map(|(id, one, two)| {
                let mut top = [json!({"id": 1, "logprob": one}), json!({"id": 2, "logprob": two})];
                if two > one {
                    top.reverse();
                }
                json!({"id": id, "top_logprobs": top})
            })
            .collect();
        Text::read(&json!({"content": "", "completion_probabilities": steps})).unwrap()
    }

    /// `steps` of common steps in which the gaps differ by 0.02, then `on` and `off`.
    fn check(steps: usize, on: &[Taken], off: &[Taken], preference: Option<f64>) -> Check {
        let common = |last: &[Taken], shift: f64| text(&[vec![(1, -0.1, -3.0 + shift); steps], last.to_vec()].concat());
        let (on, off) = ([common(on, 0.02)], [common(off, 0.0)]);
        let partings = partings(&on, &off);
        let preferences = vec![preference; partings.len()];
        judge(&["p"], (&on, &off), &partings, &preferences, 2)
    }

    fn verdict(on: &[Taken], off: &[Taken], preference: Option<f64>) -> Option<bool> {
        check(100, on, off, preference).pass
    }

    #[test]
    fn texts_may_part_within_four_times_the_noise_in_either_arm() {
        let near = (2, -0.75, -0.68);
        let tie = check(100, &[near], &[(1, -0.68, -0.75)], None);
        assert_eq!(tie.pass, Some(true), "{}", tie.detail);
        assert!(tie.detail.contains("1 part at a tie"), "{}", tie.detail);
        assert!((tie.data["noise"].as_f64().unwrap() - 0.02).abs() < 1e-9);
        assert_eq!(verdict(&[near], &[(1, -0.68, -0.77)], None), Some(false));
        assert_eq!(verdict(&[(2, -0.77, -0.68)], &[(1, -0.68, -0.75)], None), Some(false));
    }

    #[test]
    fn the_dequantised_model_may_side_with_the_windows() {
        let (on, off) = ([(2, -0.9, -0.6)], [(1, -0.5, -0.95)]);
        assert_eq!(verdict(&on, &off, Some(0.1)), Some(true));
        assert_eq!(verdict(&on, &off, Some(-0.1)), Some(false));
        assert_eq!(verdict(&on, &off, None), Some(false));
    }

    #[test]
    fn few_common_steps_are_no_measure() {
        let (on, off) = ([(2, -0.701, -0.70)], [(1, -0.70, -0.701)]);
        assert_eq!(check(LEAST_STEPS, &on, &off, None).pass, Some(true));
        let few = check(LEAST_STEPS - 1, &on, &off, None);
        assert_eq!(few.pass, Some(false));
        assert!(few.detail.contains("49 common steps are too few"), "{}", few.detail);
        assert_eq!(check(3, &[], &[], None).pass, Some(true), "nothing parted");
    }

    #[test]
    fn a_shorter_text_is_no_equal_text() {
        assert_eq!(verdict(&[], &[(1, -0.1, -3.0)], None), Some(false));
    }

    #[test]
    fn a_token_outside_of_the_candidates_is_no_tie() {
        assert_eq!(verdict(&[(9, -0.1, -0.1)], &[(1, -0.1, -0.1)], None), Some(false));
    }

    #[test]
    fn another_model_is_asked_about_the_tokens_before() {
        let (on, off) = (
            [text(&[(1, -0.1, -3.0), (2, -0.7, -0.6)])],
            [text(&[(1, -0.1, -3.0), (1, -0.6, -0.7)])],
        );
        let parting = &partings(&on, &off)[0];
        assert_eq!(parting.question(&["p"], &on)["prompt"], json!(["p", 1]));
        assert_eq!(parting.preference(&text(&[(2, -1.0, -0.5)])), Some(0.5));
    }

    #[test]
    fn answers_without_candidates_are_refused() {
        assert!(Text::read(&json!({"content": "x"})).is_none());
        assert!(Text::read(&json!({"content": "x", "completion_probabilities": []})).is_none());
    }
}
