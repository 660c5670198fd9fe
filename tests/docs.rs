//! The documents against the code: tables that come from the list of windows and switches, reasons for declining, links, and
//! figures. `UPDATE_EXPECT=1 cargo test --test docs` rewrites the tables.

use ggml_flashrt::window::settings::SWITCHES;
use ggml_flashrt::window::WINDOWS;
use std::collections::BTreeSet;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR"))
}

fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))
}

/// Files below `dir` with this extension.
fn files(dir: &Path, extension: &str, found: &mut Vec<PathBuf>) {
    for path in fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()) {
        if path.is_dir() {
            files(&path, extension, found);
        } else if path.extension().is_some_and(|e| e == extension) {
            found.push(path);
        }
    }
}

fn documents() -> Vec<PathBuf> {
    let mut found = Vec::new();
    for dir in ["docs", "third_party", "xtask/bundle"] {
        files(&root().join(dir), "md", &mut found);
    }
    found.extend(["README.md", "CONTRIBUTING.md", "CHANGELOG.md"].map(|name| root().join(name)));
    found
}

fn page(name: &str) -> String {
    format!("{}.md", name.to_lowercase())
}

fn switches_table() -> String {
    let windows = WINDOWS.iter().map(|w| {
        let default = if w.on_by_default {
            ""
        } else {
            " (the default; `0` lets the window have it)"
        };
        format!("| `{}` | leaves to stock: {}{default} |\n", w.switch, w.replaces)
    });
    let others = SWITCHES.iter().map(|s| format!("| `{}` | {} |\n", s.name, s.does));
    format!(
        "| switch | effect |\n|---|---|\n{}",
        windows.chain(others).collect::<String>()
    )
}

fn windows_table() -> String {
    let row = |name: &str, computes: &str, replaces: &str, cc: i32| {
        format!("| [{name}]({}) | `{computes}` | {replaces} | sm_{cc} |\n", page(name))
    };
    let rows: String = WINDOWS
        .iter()
        .map(|w| row(w.name, w.computes, w.replaces, w.min_cc))
        .collect();
    format!("| window | computes | replaces | from |\n|---|---|---|---|\n{rows}")
}

/// Where in `text` the table between two marked lines lies.
fn table_range(text: &str, name: &str) -> Option<Range<usize>> {
    let open = format!("<!-- table:{name} -->\n");
    let start = text.find(&open)? + open.len();
    Some(start..start + text[start..].find("<!-- /table -->")?)
}

fn expect_table(file: &str, name: &str, wanted: &str) {
    let path = root().join(file);
    let mut text = read(&path);
    let range = table_range(&text, name).unwrap_or_else(|| panic!("{file} has no table {name}"));
    if &text[range.clone()] == wanted {
        return;
    }
    if std::env::var_os("UPDATE_EXPECT").is_some() {
        text.replace_range(range, wanted);
        fs::write(&path, text).unwrap();
        return;
    }
    panic!("{file}: table {name} should be, see UPDATE_EXPECT in tests/docs.rs:\n{wanted}");
}

#[test]
fn the_readme_lists_every_switch() {
    expect_table("README.md", "switches", &switches_table());
}

#[test]
fn the_index_lists_every_window_and_each_has_a_page() {
    expect_table("docs/windows/README.md", "windows", &windows_table());
    let dir = root().join("docs/windows");
    for w in WINDOWS {
        let text = read(&dir.join(page(w.name)));
        assert!(
            text.starts_with(&format!("# {}\n", w.name)),
            "{}: the title is not its name",
            page(w.name)
        );
        assert!(text.contains(w.switch), "{} does not name {}", page(w.name), w.switch);
    }
    let mut pages = Vec::new();
    files(&dir, "md", &mut pages);
    let names: BTreeSet<String> = WINDOWS
        .iter()
        .map(|w| page(w.name))
        .chain(["README.md".to_owned()])
        .collect();
    for path in pages {
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        assert!(names.contains(&name), "docs/windows/{name} is about no window");
    }
}

/// Reasons in the source, as the statistics print them.
fn reasons_in_source() -> BTreeSet<String> {
    let mut sources = Vec::new();
    files(&root().join("src/window"), "rs", &mut sources);
    let mut reasons = BTreeSet::new();
    for path in sources {
        for call in read(&path).split("Decline::new(").skip(1) {
            if let Some((reason, _)) = call
                .trim_start()
                .strip_prefix('"')
                .and_then(|text| text.split_once('"'))
            {
                reasons.insert(reason.to_owned());
            }
        }
    }
    reasons
}

#[test]
fn reasons_for_declining_are_explained_as_they_are_printed() {
    let source = reasons_in_source();
    assert!(
        source.contains("many tokens"),
        "the reasons are looked for in the wrong place: {source:?}"
    );
    let mut pages = Vec::new();
    files(&root().join("docs/windows"), "md", &mut pages);
    let text: String = pages.iter().map(|path| read(path)).collect();
    for reason in &source {
        assert!(
            text.contains(&format!("`{reason}`")),
            "docs/windows explains no decline for `{reason}`"
        );
    }
    let mut in_table = false;
    for line in text.lines() {
        in_table = line.starts_with("| reason |") || (in_table && line.starts_with('|'));
        if let Some((reason, _)) = line
            .strip_prefix("| `")
            .filter(|_| in_table)
            .and_then(|l| l.split_once('`'))
        {
            assert!(
                source.contains(reason),
                "docs/windows explains `{reason}`, which is never printed"
            );
        }
    }
}

#[test]
fn links_lead_somewhere() {
    for document in documents() {
        for link in read(&document)
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split_once(')'))
            .map(|(link, _)| link)
        {
            let file = link.split('#').next().unwrap_or_default();
            if file.is_empty() || file.contains("://") {
                continue;
            }
            let target = document.parent().unwrap().join(file);
            assert!(target.exists(), "{}: {link} leads nowhere", document.display());
        }
    }
}

/// Ids of the markers in a text, without the field after `#`.
fn quoted_ids(text: &str) -> impl Iterator<Item = &str> {
    let names = text.split("<!-- ev:").skip(1).filter_map(|rest| rest.split_once("-->"));
    names.map(|(name, _)| name.trim().split('#').next().unwrap_or_default())
}

#[test]
fn quoted_figures_have_a_known_id() {
    let known = read(&root().join("docs/evidence/README.md"));
    let mut found = 0;
    for document in documents() {
        for id in quoted_ids(&read(&document)).filter(|id| id.contains('/')) {
            assert!(
                known.contains(&format!("| `{id}` |")),
                "{}: docs/evidence/README.md has no {id}",
                document.display()
            );
            found += 1;
        }
    }
    assert!(found > 0, "no document quotes a figure");
}

/// The index follows from the reports, and the documents from the index.
#[cfg(feature = "cli")]
#[test]
fn quoted_figures_are_those_of_the_reports() {
    use ggml_flashrt::report::evidence::{index, render, to_json, INDEX};
    let folder = root().join("docs/evidence");
    if !folder.join(INDEX).exists() {
        println!("skipped: nothing has been measured yet");
        return;
    }
    let entries = index(&folder).unwrap();
    assert_eq!(
        read(&folder.join(INDEX)),
        to_json(&entries),
        "run `flashrt evidence index docs/evidence`"
    );
    for document in documents()
        .into_iter()
        .filter(|d| !d.ends_with("docs/evidence/README.md"))
    {
        let text = read(&document);
        let rendered = render(&text, &entries).unwrap_or_else(|e| panic!("{}: {e}", document.display()));
        assert_eq!(text, rendered, "{}: run `flashrt evidence render`", document.display());
    }
}
