//! `include/flashrt.h`: written by cbindgen from `src/abi`, opened with the contract, closed with the tables that the glue
//! checks and translates by.

use anyhow::{Context, Result};
use ggml_flashrt::abi::layout;
use ggml_flashrt::graph::raw::{RawGraph, RawTensor};
use ggml_flashrt::graph::{Op, FLAG_COMPUTE, FLAG_INPUT, FLAG_OUTPUT};
use std::fmt::Write;
use std::mem::size_of;
use std::path::Path;

const OPENING: &str = r#"// SPDX-License-Identifier: Apache-2.0
//
// ggml-flashrt: fused CUDA kernels for chains of ggml nodes ("windows"). The C interface of libggml_flashrt.a, and all that a
// host includes. Generated from src/abi by `cargo xtask header`; edit it there.
//
// Ownership
//   The host owns its graph, tensors, buffers and streams; the library reads the structs in place during a call and keeps
//   nothing of them but addresses to compare. What the library allocates belongs to a context (flashrt_host.context) or is
//   derived from a buffer, and is freed by flashrt_context_free or flashrt_buffer_freed. A string that the library returns is
//   never freed by the caller; its comment says how long it lives. Outputs are written only on success unless stated otherwise.
//   Pointers may be null only where stated; a null is answered with FLASHRT_STATUS_BAD_ARGUMENT, or with "not ours".
//
// Threads and streams
//   Every function may be called from any thread. The calls of one context follow one another: eval_begin, then takes and fuse
//   in any number, then eval_end, all from one thread; different contexts need no order between them. Kernels go to
//   flashrt_host.stream and nowhere else, with flashrt_host.device current. The library never creates or destroys a CUDA context,
//   leaves the current device as it was, and never synchronises, with one exception: the first eval_begin on a device runs every
//   kernel once, on a stream of its own, and waits for the results to compare them.
//
// Capture
//   Between eval_begin and eval_end the stream may be capturing (FLASHRT_HOST_CAPTURING). Memory is allocated in eval_begin only,
//   and nothing that a captured graph has seen moves before the context is freed, so a captured graph may be replayed for as long
//   as its context lives. An evaluation that only replays calls eval_begin and eval_end, and no fuse.
//
// Errors
//   Before the first launch of a window everything has been checked: declining (0) leaves no trace and the host runs the node
//   itself. A launch that fails is latched, its CUDA error consumed; flashrt_eval_end reports it. No function aborts, and no
//   panic leaves the library: it is logged once and the library switches itself off, while inference goes on.
//   flashrt_last_error tells the last error of the calling thread in words.
//
// Versioning
//   flashrt_host begins with the version and size that the host was compiled with. Any difference, either way, refuses the host
//   with one log line. Status codes and flashrt_op codes keep their numbers; a retired number is not used again.
//
// Linking
//   A shared library:  c++ -shared host.o libggml_flashrt.a -Wl,--exclude-libs,libggml_flashrt.a -lcudart -lstdc++ -lpthread -ldl -lm
//   A program:         c++ host.o libggml_flashrt.a -lcudart -lstdc++ -lpthread -ldl -lm
//   --exclude-libs keeps the symbols of the archive, Rust's standard library among them, out of the dynamic symbol table. An
//   archive built without kernels needs neither cudart nor stdc++. CMake: link FlashRT::flashrt of cmake/FlashRT.cmake."#;

/// The text of `include/flashrt.h`.
pub fn generate() -> Result<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"))
        .parent()
        .context("xtask lies in the repository")?;
    let mut config = cbindgen::Config::from_file(root.join("cbindgen.toml")).map_err(anyhow::Error::msg)?;
    config.header = Some(OPENING.to_owned());
    config.trailer = Some(tables()?);
    let builder = cbindgen::Builder::new()
        .with_config(config)
        .with_src(root.join("src/abi/mod.rs"));
    let mut text = Vec::new();
    builder.generate().context("cbindgen")?.write(&mut text);
    // What Rust calls the safety section reads as a precondition in C.
    Ok(String::from_utf8(text)?.replace("// # Safety\n", "// Requires:\n"))
}

fn tables() -> Result<String> {
    let mut out = String::new();
    writeln!(
        out,
        "// Operations in the library's numbering. FLASHRT_OPS(X) names those that ggml has too: GGML_OP_<name>."
    )?;
    writeln!(out, "enum flashrt_op {{")?;
    for op in Op::ALL {
        writeln!(out, "    FLASHRT_OP_{} = {},", op.name(), *op as u8)?;
    }
    writeln!(out, "}};\n")?;
    let own = Op::ALL.iter().filter(|op| **op != Op::Other);
    list(&mut out, "FLASHRT_OPS", own.map(|op| op.name().to_owned()))?;

    writeln!(
        out,
        "// Layout of the host's structs as the library reads them: X(field, offset)."
    )?;
    for (name, fields) in [
        ("FLASHRT_TENSOR_FIELDS", layout::TENSOR),
        ("FLASHRT_HASH_SET_FIELDS", layout::HASH_SET),
        ("FLASHRT_CGRAPH_FIELDS", layout::CGRAPH),
    ] {
        list(
            &mut out,
            name,
            fields.iter().map(|(field, offset)| format!("{field}, {offset}")),
        )?;
    }
    writeln!(out, "#define FLASHRT_TENSOR_SIZE {}", size_of::<RawTensor>())?;
    writeln!(out, "#define FLASHRT_CGRAPH_SIZE {}", size_of::<RawGraph>())?;
    writeln!(out, "#define FLASHRT_TENSOR_FLAG_INPUT {FLAG_INPUT}")?;
    writeln!(out, "#define FLASHRT_TENSOR_FLAG_OUTPUT {FLAG_OUTPUT}")?;
    write!(out, "#define FLASHRT_TENSOR_FLAG_COMPUTE {FLAG_COMPUTE}")?;
    Ok(out)
}

/// A macro that applies `X` to each entry.
fn list(out: &mut String, name: &str, entries: impl Iterator<Item = String>) -> Result<()> {
    write!(out, "#define {name}(X)")?;
    for entry in entries {
        write!(out, " \\\n    X({entry})")?;
    }
    writeln!(out, "\n")?;
    Ok(())
}
