//! `cargo xtask bundle`: what a GPU machine without a tool chain needs, in parts that travel easily.

use crate::context::Context;
use crate::fetch;
use crate::files::{self, Digesting, IoContext, Staging};
use crate::host::{self, Backend, Extent, Plan};
use crate::test;
use crate::tools::{self, Cuda};
use crate::Llama;
use anyhow::{bail, ensure, Context as _, Result};
use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
use liblzma::write::XzEncoder;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::process::Stdio;

/// Some ways of carrying files end at 64 MiB.
const PART: u64 = 56 << 20;
/// libggml-cuda.so of the adapter and of stock are nearly the same and follow each other: the second is then almost free.
const DICTIONARY: u32 = 128 << 20;
/// Every family that kernels are written for.
const MATRIX: &str = "87;90a;110a";
/// Text for Orin, which the driver of any newer GPU compiles: its results can be checked where no Orin is.
const ORIN_TEXT: &str = "87-virtual";

const SCRIPTS: [(&str, &str); 8] = [
    ("run/env.sh", include_str!("../bundle/env.sh")),
    ("run/text.sh", include_str!("../bundle/text.sh")),
    ("run/bench.sh", include_str!("../bundle/bench.sh")),
    ("run/backend-ops.sh", include_str!("../bundle/backend-ops.sh")),
    ("run/cases.sh", include_str!("../bundle/cases.sh")),
    ("run/cases.py", include_str!("../../bench/run_cases.py")),
    ("run/gpu-tests.sh", include_str!("../bundle/gpu-tests.sh")),
    ("README.md", include_str!("../bundle/README.md")),
];
const REASSEMBLE: &str = include_str!("../bundle/reassemble.sh");

/// For `cargo xtask bundle`.
#[derive(Args, Debug)]
pub struct BundleArgs {
    /// Include the model
    #[arg(long)]
    pub with_model: bool,
    /// Include cuBLAS, for a machine that has a driver and nothing else of CUDA
    #[arg(long)]
    pub with_cublas: bool,
    /// Fill attention masks by ranges (host/mask), in the adapter's build and in stock's
    #[arg(long)]
    pub mask: bool,
    /// CUDA architectures of the host binaries
    #[arg(long, default_value = "90", value_parser = tools::cmake_archs)]
    pub arch: String,
    /// Where the parts go; a former bundle there is replaced
    #[arg(long, value_name = "DIR")]
    pub out: Option<PathBuf>,
    #[command(flatten)]
    pub llama: Llama,
}

/// Builds everything and packs it.
pub fn run(context: &Context, args: &BundleArgs) -> Result<()> {
    let out = args.out.clone().unwrap_or_else(|| context.home.join("bundle"));
    let out = std::path::absolute(&out).at("find", &out)?;
    refuse_foreign(&out)?;
    let tools = tools::ensure(context, true)?;
    let cuda = tools.cuda.as_ref().context("asked for")?;
    let plan = |hook| Plan {
        backend: Backend::Cuda,
        arch: args.arch.clone(),
        hook,
        mask: args.mask,
        extent: Extent::Programs,
        llama: args.llama.clone(),
    };
    let adapter = host::build(context, &tools, &plan(true))?;
    let stock = host::build(context, &tools, &plan(false))?;
    let step = format!(
        "compile kernels, GPU tests and the command for {MATRIX} and pack it all into {}",
        out.display()
    );
    if context.would(step) {
        return Ok(());
    }
    let archive = test::build_archive(context, cuda, MATRIX)?;
    let tests = gpu_programs(context, cuda, MATRIX, "target")?;
    let orin_tests = gpu_programs(context, cuda, ORIN_TEXT, "target-ptx87")?;

    let staging = Staging::new(&out)?;
    let mut pack = Pack::new(staging.path())?;
    for (name, text) in SCRIPTS {
        pack.text(name, text)?;
    }
    pack.tree(&context.repo.join("third_party/licences"), Path::new("licences"))?;
    for (program, name) in &tests {
        pack.file(
            program,
            &Path::new(if name == "flashrt" { "bin" } else { "tests" }).join(name),
        )?;
    }
    for (program, name) in orin_tests.iter().filter(|(_, name)| name != "flashrt") {
        pack.file(program, &Path::new("tests-ptx87").join(name))?;
    }
    pack.file(&archive, Path::new("kernels/libggml_flashrt.a"))?;
    pack.file(&context.repo.join("include/flashrt.h"), Path::new("kernels/flashrt.h"))?;
    for library in libraries(args.with_cublas) {
        pack.file(
            &cuda.lib().join(library).canonicalize().at("find", &cuda.lib())?,
            &Path::new("lib").join(library),
        )?;
    }
    if args.with_model {
        pack.file(
            &fetch::model(context, &tools)?,
            &Path::new("model").join(&context.pins.model.file),
        )?;
        for (name, text) in fetch::model_terms(context, &tools)? {
            pack.bytes(&format!("model/{name}"), &text)?;
        }
    }
    pack.twins(&adapter, &stock)?;
    let parts = pack.finish()?;

    let sums: Vec<_> = parts
        .iter()
        .map(|part| format!("{}  {}\n", part.sha256, part.name))
        .collect();
    files::write(&staging.path().join("parts.sha256"), sums.concat())?;
    let script = staging.path().join("reassemble.sh");
    files::write(&script, REASSEMBLE)?;
    fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).at("set the mode of", &script)?;
    staging.commit()?;
    let size: u64 = parts.iter().map(|part| part.size).sum();
    println!(
        "bundle: {} in {} parts, {} MB; there: sh reassemble.sh DIR",
        out.display(),
        parts.len(),
        size >> 20
    );
    Ok(())
}

/// Only a former bundle may be replaced.
fn refuse_foreign(out: &Path) -> Result<()> {
    let mut entries = match fs::read_dir(out) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(error) => return Err(error).at("list", out),
    };
    if entries.next().is_some() && !out.join("reassemble.sh").is_file() {
        bail!(
            "{} holds something else than a bundle: name an empty or a new directory with --out",
            out.display()
        );
    }
    Ok(())
}

fn libraries(with_cublas: bool) -> &'static [&'static str] {
    match with_cublas {
        true => &["libcudart.so.13", "libcublas.so.13", "libcublasLt.so.13"],
        false => &["libcudart.so.13"],
    }
}

/// The `flashrt` command and the `gpu_*` tests, compiled with kernels for `archs`, as (file, name).
fn gpu_programs(context: &Context, cuda: &Cuda, archs: &str, target: &str) -> Result<Vec<(PathBuf, String)>> {
    let mut cargo = test::kernel_cargo(context, cuda, archs);
    cargo.args([
        "test",
        "--release",
        "--no-run",
        "--features",
        "cuda,cli,host",
        "--message-format",
        "json-render-diagnostics",
    ]);
    cargo
        .arg("--target-dir")
        .arg(context.home.join(target))
        .args(["--bin", "flashrt"])
        .stderr(Stdio::inherit());
    for test in test::gpu_test_names(context)? {
        cargo.args(["--test", &test]);
    }
    let output = cargo.output().context("cannot run cargo")?;
    ensure!(
        output.status.success(),
        "compiling the GPU tests for {archs} failed ({})",
        output.status
    );
    let mut programs = artifacts(&String::from_utf8_lossy(&output.stdout));
    ensure!(
        !programs.is_empty(),
        "cargo built neither GPU tests nor the flashrt command"
    );
    programs.sort_by(|a, b| a.1.cmp(&b.1));
    Ok(programs)
}

/// Programs in cargo's messages that run on the GPU machine.
fn artifacts(messages: &str) -> Vec<(PathBuf, String)> {
    let messages = messages
        .lines()
        .filter_map(|line| serde_json::from_str::<serde_json::Value>(line).ok());
    let wanted = messages.filter_map(|message| {
        let name = message["target"]["name"].as_str()?.to_string();
        let program = PathBuf::from(message["executable"].as_str()?);
        let kind = message["target"]["kind"][0].as_str()?;
        let is_test = message["profile"]["test"].as_bool()?;
        let command = kind == "bin" && name == "flashrt" && !is_test;
        (command || (kind == "test" && name.starts_with("gpu_"))).then_some((program, name))
    });
    wanted.collect()
}

/// A finished part.
struct Part {
    name: String,
    size: u64,
    sha256: String,
}

/// Writes a stream into files of a bounded size.
struct Parts {
    dir: PathBuf,
    limit: u64,
    current: Option<(Digesting<File>, u64)>,
    done: Vec<Part>,
}

impl Parts {
    fn new(dir: &Path, limit: u64) -> Parts {
        Parts {
            dir: dir.to_path_buf(),
            limit,
            current: None,
            done: Vec::new(),
        }
    }

    fn close(&mut self) {
        if let Some((file, size)) = self.current.take() {
            let name = part_name(self.done.len());
            self.done.push(Part {
                name,
                size,
                sha256: file.finish(),
            });
        }
    }
}

fn part_name(index: usize) -> String {
    format!("bundle.tar.xz.{index:02}")
}

impl Write for Parts {
    fn write(&mut self, buffer: &[u8]) -> io::Result<usize> {
        if self.current.as_ref().is_some_and(|(_, size)| *size == self.limit) {
            self.close();
        }
        if self.current.is_none() {
            let file = File::create(self.dir.join(part_name(self.done.len())))?;
            self.current = Some((Digesting::new(file), 0));
        }
        let (file, size) = self.current.as_mut().expect("just opened");
        let room = usize::try_from(self.limit - *size).unwrap_or(usize::MAX);
        let n = file.write(&buffer[..buffer.len().min(room)])?;
        *size += n as u64;
        Ok(n)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The archive while it is written.
struct Pack {
    tar: tar::Builder<XzEncoder<Parts>>,
    bar: ProgressBar,
}

impl Pack {
    fn new(dir: &Path) -> Result<Pack> {
        let mut options = LzmaOptions::new_preset(1).context("xz")?;
        options.dict_size(DICTIONARY);
        let stream = Stream::new_stream_encoder(Filters::new().lzma2(&options), Check::Crc64).context("xz")?;
        let mut tar = tar::Builder::new(XzEncoder::new_stream(Parts::new(dir, PART), stream));
        tar.follow_symlinks(false);
        tar.mode(tar::HeaderMode::Deterministic);
        let bar = ProgressBar::new_spinner();
        bar.set_style(ProgressStyle::with_template("{spinner} packing {msg} {elapsed}").expect("a constant template"));
        Ok(Pack { tar, bar })
    }

    fn text(&mut self, name: &str, text: &str) -> Result<()> {
        self.bytes(name, text.as_bytes())
    }

    fn bytes(&mut self, name: &str, content: &[u8]) -> Result<()> {
        let mut header = tar::Header::new_gnu();
        header.set_size(content.len() as u64);
        header.set_mode(if name.ends_with(".sh") { 0o755 } else { 0o644 });
        self.tar
            .append_data(&mut header, name, content)
            .at("pack", Path::new(name))
    }

    fn file(&mut self, file: &Path, name: &Path) -> Result<()> {
        self.bar.set_message(name.display().to_string());
        self.bar.tick();
        self.tar.append_path_with_name(file, name).at("pack", file)
    }

    fn tree(&mut self, dir: &Path, name: &Path) -> Result<()> {
        for file in sorted(dir)? {
            self.file(
                &file,
                &name.join(file.file_name().expect("a directory entry has a name")),
            )?;
        }
        Ok(())
    }

    /// Two builds of the same programs, each file next to its twin.
    fn twins(&mut self, adapter: &Path, stock: &Path) -> Result<()> {
        for file in sorted(adapter)? {
            let name = file.file_name().expect("a directory entry has a name");
            self.file(&file, &Path::new("adapter").join(name))?;
            let twin = stock.join(name);
            if fs::symlink_metadata(&twin).is_ok() {
                self.file(&twin, &Path::new("stock").join(name))?;
            }
        }
        Ok(())
    }

    fn finish(self) -> Result<Vec<Part>> {
        self.bar.finish_and_clear();
        let name = Path::new("the bundle");
        let mut parts = self.tar.into_inner().and_then(XzEncoder::finish).at("write", name)?;
        parts.close();
        Ok(parts.done)
    }
}

/// Files and links of one directory.
fn sorted(dir: &Path) -> Result<Vec<PathBuf>> {
    let mut files: Vec<_> = fs::read_dir(dir)
        .at("list", dir)?
        .flatten()
        .map(|entry| entry.path())
        .collect();
    files.retain(|file| fs::symlink_metadata(file).is_ok_and(|meta| !meta.is_dir()));
    files.sort();
    Ok(files)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;
    use tempfile::TempDir;

    #[test]
    fn parts_are_bounded_and_lose_nothing() {
        let dir = TempDir::new().unwrap();
        let mut parts = Parts::new(dir.path(), 10);
        parts.write_all(&[7; 10]).unwrap();
        parts.write_all(&[8; 15]).unwrap();
        parts.close();
        let sizes: Vec<_> = parts.done.iter().map(|part| part.size).collect();
        assert_eq!(sizes, [10, 10, 5]);
        let joined: Vec<u8> = parts
            .done
            .iter()
            .flat_map(|part| fs::read(dir.path().join(&part.name)).unwrap())
            .collect();
        assert_eq!(joined, [[7; 10].as_slice(), &[8; 15]].concat());
        for part in &parts.done {
            assert_eq!(part.sha256, files::sha256(&dir.path().join(&part.name)).unwrap());
        }
    }

    /// Packs a small bundle and runs the script that a user runs.
    #[test]
    fn the_script_reassembles_a_bundle_and_refuses_a_damaged_one() {
        let dir = TempDir::new().unwrap();
        let (bin, bundle) = (dir.path().join("bin"), dir.path().join("bundle"));
        fs::create_dir(&bundle).unwrap();
        files::write(&bin.join("program"), "binary").unwrap();
        files::symlink(Path::new("program"), &bin.join("link")).unwrap();
        let mut pack = Pack::new(&bundle).unwrap();
        pack.text("run/text.sh", "true\n").unwrap();
        pack.twins(&bin, &bin).unwrap();
        let parts = pack.finish().unwrap();
        let sums: String = parts
            .iter()
            .map(|part| format!("{}  {}\n", part.sha256, part.name))
            .collect();
        files::write(&bundle.join("parts.sha256"), sums).unwrap();
        files::write(&bundle.join("reassemble.sh"), REASSEMBLE).unwrap();
        let reassemble = |to: &str| {
            let run = Command::new("sh")
                .arg(bundle.join("reassemble.sh"))
                .arg(dir.path().join(to))
                .output()
                .unwrap();
            (run.status.success(), String::from_utf8_lossy(&run.stderr).into_owned())
        };

        assert_eq!(reassemble("good"), (true, String::new()));
        assert_eq!(
            fs::read_to_string(dir.path().join("good/stock/link")).unwrap(),
            "binary"
        );

        fs::write(bundle.join(part_name(0)), "damaged").unwrap();
        let (passed, why) = reassemble("bad");
        assert!(!passed && why.contains("damaged"), "{why}");
        assert!(!dir.path().join("bad").exists());
    }

    #[test]
    fn only_a_former_bundle_is_replaced() {
        let dir = TempDir::new().unwrap();
        assert!(refuse_foreign(&dir.path().join("new")).is_ok());
        assert!(refuse_foreign(dir.path()).is_ok());
        fs::write(dir.path().join("thesis.txt"), "").unwrap();
        assert!(refuse_foreign(dir.path()).unwrap_err().to_string().contains("--out"));
        fs::write(dir.path().join("reassemble.sh"), "").unwrap();
        assert!(refuse_foreign(dir.path()).is_ok());
    }

    #[test]
    fn gpu_programs_are_picked_from_cargos_messages() {
        let message = |name: &str, kind: &str, test: bool| {
            format!(
                "{{\"reason\":\"compiler-artifact\",\"target\":{{\"name\":\"{name}\",\"kind\":[\"{kind}\"]}},\
                 \"profile\":{{\"test\":{test}}},\"executable\":\"/t/{name}\"}}\n"
            )
        };
        let messages = [
            message("gpu_norm", "test", true),
            message("abi_c", "test", true),
            message("flashrt", "bin", true),
            message("flashrt", "bin", false),
            "note\n".into(),
        ];
        let names: Vec<_> = artifacts(&messages.concat())
            .into_iter()
            .map(|(_, name)| name)
            .collect();
        assert_eq!(names, ["gpu_norm", "flashrt"]);
    }
}
