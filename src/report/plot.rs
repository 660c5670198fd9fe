//! Outcomes as an SVG: a bar for each arm's median, a dot for each sample.

use super::{ArmResult, Outcome};
use std::fmt::Write;

const ROW: f64 = 64.0;
const LEFT: f64 = 96.0;
const WIDTH: f64 = 560.0;
const TOP: f64 = 40.0;

/// The picture. Each test has its own scale: prefill and decode rates are orders of magnitude apart.
pub fn svg(title: &str, outcomes: &[Outcome]) -> String {
    let height = TOP + ROW * outcomes.len() as f64 + 8.0;
    let mut out = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {w} {height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n\
         <text x=\"12\" y=\"24\" font-size=\"15\">{title}</text>\n",
        w = LEFT + WIDTH + 104.0,
        title = escape(title),
    );
    for (i, o) in outcomes.iter().enumerate() {
        let y = TOP + ROW * i as f64;
        let most = o
            .adapter
            .samples_ts
            .iter()
            .chain(&o.stock.samples_ts)
            .copied()
            .fold(f64::MIN_POSITIVE, f64::max);
        let _ = writeln!(out, "<text x=\"12\" y=\"{}\">{}</text>", y + 28.0, escape(&o.test));
        let _ = writeln!(
            out,
            "<text x=\"12\" y=\"{}\" font-weight=\"bold\">{:.2}x</text>",
            y + 46.0,
            o.ratio
        );
        bar(&mut out, y + 8.0, &o.adapter, most, "#3b7dd8");
        bar(&mut out, y + 34.0, &o.stock, most, "#9aa3ad");
    }
    out + "</svg>\n"
}

fn bar(out: &mut String, y: f64, arm: &ArmResult, most: f64, colour: &str) {
    let x = |ts: f64| WIDTH * ts / most;
    let length = x(arm.median_ts);
    let _ = writeln!(
        out,
        "<rect x=\"{LEFT}\" y=\"{y}\" width=\"{length:.1}\" height=\"22\" fill=\"{colour}\"/>"
    );
    for ts in &arm.samples_ts {
        let at = LEFT + x(*ts);
        let _ = writeln!(
            out,
            "<circle cx=\"{at:.1}\" cy=\"{}\" r=\"2.5\" fill=\"black\" fill-opacity=\"0.5\"/>",
            y + 11.0
        );
    }
    let _ = writeln!(
        out,
        "<text x=\"{}\" y=\"{}\">{:.0} t/s</text>",
        LEFT + WIDTH + 10.0,
        y + 16.0,
        arm.median_ts
    );
}

fn escape(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bars_are_in_proportion_and_every_sample_has_a_dot() {
        let arm = |ts: f64| ArmResult {
            setting: "default".into(),
            samples_ts: vec![ts; 3],
            median_ts: ts,
            spread: 0.0,
        };
        let outcome = Outcome {
            test: "tg128".into(),
            adapter: arm(200.0),
            stock: arm(100.0),
            ratio: 2.0,
            ratio_by_pass: vec![],
        };
        let picture = svg("a < b", &[outcome]);
        assert!(
            picture.contains("width=\"560.0\"") && picture.contains("width=\"280.0\""),
            "{picture}"
        );
        assert_eq!(picture.matches("<circle").count(), 6);
        assert!(picture.contains("a &lt; b") && picture.contains("2.00x"));
    }
}
