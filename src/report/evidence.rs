//! The evidence index: headlines of committed reports, and the markers in documents that quote them.

use super::{Better, Report, ReportError};
use serde::{Deserialize, Serialize};
use std::path::Path;

/// Name of the index in its folder.
pub const INDEX: &str = "index.json";

/// One line of the index.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Entry {
    /// Id by which documents quote the figure.
    pub id: String,
    /// The figure, rounded to four significant digits.
    pub value: f64,
    /// Unit; `x` for ratios.
    pub unit: String,
    /// Which way is better.
    pub better: Better,
    /// Where it was measured: the GPU, or the CPU where no GPU took part.
    pub gpu: Option<String>,
    /// Commit of this repository that was measured; `-dirty` when there were uncommitted changes.
    pub commit: Option<String>,
    /// File name of the report.
    pub report: String,
}

/// Why an index or a document cannot be made.
#[derive(Debug, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum EvidenceError {
    #[error(transparent)]
    Report(#[from] ReportError),
    #[error("{report}: {source}")]
    Unsound { report: String, source: ReportError },
    #[error("{id} is in {first} and in {second}: an id stands for one figure")]
    Duplicate { id: String, first: String, second: String },
    #[error("line {line}: no evidence has the id {id:?}")]
    UnknownId { line: usize, id: String },
    #[error("line {line}: unknown field {field:?}; gpu, commit and report exist")]
    UnknownField { line: usize, field: String },
    #[error("line {line}: the marker of {id:?} is not closed by <!-- /ev --> on its line")]
    Open { line: usize, id: String },
}

/// The index of the reports in `folder`, sorted by id. Every report is verified first.
pub fn index(folder: &Path) -> Result<Vec<Entry>, EvidenceError> {
    let io = |source| ReportError::Io {
        path: folder.to_owned(),
        source,
    };
    let mut names = Vec::new();
    for file in std::fs::read_dir(folder).map_err(io)? {
        let name = file.map_err(io)?.file_name().to_string_lossy().into_owned();
        if name.ends_with(".json") && name != INDEX {
            names.push(name);
        }
    }
    names.sort();
    let mut entries: Vec<Entry> = Vec::new();
    for name in names {
        let report = Report::load(&folder.join(&name))?;
        report.verify().map_err(|source| EvidenceError::Unsound {
            report: name.clone(),
            source,
        })?;
        for h in &report.headlines {
            if let Some(first) = entries.iter().find(|e| e.id == h.id) {
                let (id, first) = (h.id.clone(), first.report.clone());
                return Err(EvidenceError::Duplicate {
                    id,
                    first,
                    second: name,
                });
            }
            let suffix = if report.build.dirty == Some(true) { "-dirty" } else { "" };
            entries.push(Entry {
                id: h.id.clone(),
                value: round(h.value),
                unit: h.unit.clone(),
                better: h.better,
                gpu: report.machine.gpu.clone().or_else(|| report.machine.cpu.clone()),
                commit: report.build.commit.as_ref().map(|commit| format!("{commit}{suffix}")),
                report: name.clone(),
            });
        }
    }
    entries.sort_by(|a, b| a.id.cmp(&b.id));
    Ok(entries)
}

/// Four significant digits.
fn round(value: f64) -> f64 {
    if value == 0.0 || !value.is_finite() {
        return value;
    }
    let digits = 10f64.powi(3 - value.abs().log10().floor() as i32);
    (value * digits).round() / digits
}

/// The index file's text.
pub fn to_json(entries: &[Entry]) -> String {
    serde_json::to_string_pretty(entries).expect("entries have only text and numbers") + "\n"
}

/// The text with every marker's contents replaced by what the index says.
///
/// A marker is `<!-- ev:<id> -->…<!-- /ev -->` on one line; `<!-- ev:<id>#gpu -->` (or `commit`, `report`) quotes that field
/// instead of the figure.
pub fn render(text: &str, entries: &[Entry]) -> Result<String, EvidenceError> {
    const OPEN: &str = "<!-- ev:";
    const CLOSE: &str = "<!-- /ev -->";
    let mut out = String::with_capacity(text.len());
    for (n, line) in text.split_inclusive('\n').enumerate() {
        let at = n + 1;
        let mut rest = line;
        while let Some((before, marked)) = rest.split_once(OPEN) {
            let open = |id: &str| EvidenceError::Open {
                line: at,
                id: id.to_owned(),
            };
            let (name, contents) = marked.split_once("-->").ok_or_else(|| open(marked.trim()))?;
            let name = name.trim();
            let (_, after) = contents.split_once(CLOSE).ok_or_else(|| open(name))?;
            out += &format!("{before}{OPEN}{name} -->{}{CLOSE}", quoted(name, at, entries)?);
            rest = after;
        }
        out += rest;
    }
    Ok(out)
}

fn quoted(name: &str, line: usize, entries: &[Entry]) -> Result<String, EvidenceError> {
    let (id, field) = name
        .split_once('#')
        .map_or((name, None), |(id, field)| (id, Some(field)));
    let entry = entries.iter().find(|e| e.id == id).ok_or(EvidenceError::UnknownId {
        line,
        id: id.to_owned(),
    })?;
    let unknown = || "unknown".to_owned();
    match field {
        None if entry.unit == "x" => Ok(format!("{:.2}x", entry.value)),
        None => Ok(format!("{} {}", entry.value, entry.unit)),
        Some("gpu") => Ok(entry.gpu.clone().unwrap_or_else(unknown)),
        Some("commit") => Ok(entry.commit.clone().unwrap_or_else(unknown)),
        Some("report") => Ok(entry.report.clone()),
        Some(field) => Err(EvidenceError::UnknownField {
            line,
            field: field.to_owned(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entries() -> Vec<Entry> {
        vec![Entry {
            id: "tg128/m".into(),
            value: 1.314,
            unit: "x".into(),
            better: Better::Higher,
            gpu: Some("GPU".into()),
            commit: None,
            report: "r.json".into(),
        }]
    }

    #[test]
    fn markers_are_filled_and_filling_again_changes_nothing() {
        let text = "a <!-- ev:tg128/m -->?<!-- /ev --> on <!-- ev:tg128/m#gpu --><!-- /ev -->\nb\n";
        let once = render(text, &entries()).unwrap();
        assert_eq!(
            once,
            "a <!-- ev:tg128/m -->1.31x<!-- /ev --> on <!-- ev:tg128/m#gpu -->GPU<!-- /ev -->\nb\n"
        );
        assert_eq!(render(&once, &entries()).unwrap(), once);
    }

    #[test]
    fn bad_markers_are_named_with_their_line() {
        for (text, message) in [
            (
                "\n<!-- ev:absent -->1<!-- /ev -->",
                "line 2: no evidence has the id \"absent\"",
            ),
            (
                "<!-- ev:tg128/m#colour -->1<!-- /ev -->",
                "line 1: unknown field \"colour\"",
            ),
            (
                "<!-- ev:tg128/m -->1\n<!-- /ev -->",
                "line 1: the marker of \"tg128/m\" is not closed",
            ),
        ] {
            let error = render(text, &entries()).unwrap_err().to_string();
            assert!(error.starts_with(message), "{error}");
        }
    }

    #[test]
    fn four_digits() {
        assert_eq!(round(1.23456), 1.235);
        assert_eq!(round(123_456.0), 123_500.0);
        assert_eq!(round(0.00123456), 0.001235);
    }
}
