//! What the compiled kernels must contain, read from their machine code: a build can succeed and still be slow or wrong.

use crate::context::Context;
use crate::tools::Cuda;
use anyhow::{bail, ensure, Context as _, Result};
use std::path::Path;
use std::process::Command;

/// One kernel for one architecture.
#[derive(Debug, Default, PartialEq)]
struct Kernel {
    object: String,
    arch: String,
    name: String,
    /// Loads and stores on the stack, by its pointer R1: registers that did not suffice. Arrays indexed at run time, such as
    /// the one in sincosf's reduction of huge angles, go by other registers.
    spills: usize,
    /// Integer dot products of four bytes.
    dot: usize,
    /// Tensor-core instructions of warpgroups.
    wgmma: usize,
    /// Waits for the kernel before it (programmatic dependent launch).
    wait: usize,
}

/// Checks an archive that was compiled for sm_90a.
pub fn gate(context: &Context, cuda: &Cuda, archive: &Path) -> Result<String> {
    let kernels = parse(&cuobjdump(context, cuda, "-sass", archive)?);
    let faults: Vec<String> = kernels.iter().flat_map(faults).collect();
    if !faults.is_empty() {
        bail!("{}", faults.join("; "));
    }
    let hopper = kernels.iter().filter(|kernel| kernel.arch == "sm_90a").count();
    ensure!(hopper > 0, "{} has no kernel for sm_90a", archive.display());
    for (what, is_there) in [
        ("IDP", kernels.iter().any(|kernel| kernel.dot > 0)),
        ("HGMMA", kernels.iter().any(|kernel| kernel.wgmma > 0)),
    ] {
        ensure!(is_there, "{} has no kernel that uses {what}", archive.display());
    }
    let ptx = cuobjdump(context, cuda, "-lptx", archive)?;
    // Newer GPUs than the ones named compile this text.
    let with_ptx = ptx
        .lines()
        .filter(|line| line.contains("PTX file") && line.contains("sm_90.ptx"))
        .count();
    ensure!(with_ptx > 0, "{} has no PTX for compute_90", archive.display());
    Ok(format!(
        "{hopper} kernels for sm_90a, {with_ptx} objects with PTX for compute_90"
    ))
}

/// Checks an object of an attention module: its kernel lies in the host's data as machine code of its own.
pub fn attention(context: &Context, cuda: &Cuda, object: &Path) -> Result<()> {
    let bytes = std::fs::read(object).with_context(|| format!("cannot read {}", object.display()))?;
    let start = bytes.windows(4).skip(1).position(|four| four == b"\x7fELF");
    let start = start.with_context(|| format!("{} holds no machine code", object.display()))? + 1;
    let cubin = tempfile::Builder::new()
        .suffix(".cubin")
        .tempfile()
        .context("a temporary file")?;
    std::fs::write(cubin.path(), &bytes[start..]).context("a temporary file")?;
    let kernels = parse(&cuobjdump(context, cuda, "-sass", cubin.path())?);
    ensure!(!kernels.is_empty(), "{} holds no kernel", object.display());
    for kernel in &kernels {
        ensure!(
            kernel.spills == 0,
            "{}: {} spills to local memory",
            object.display(),
            kernel.spills
        );
        ensure!(kernel.wgmma > 0, "{} multiplies without HGMMA", object.display());
    }
    Ok(())
}

fn faults(kernel: &Kernel) -> Vec<String> {
    let Kernel {
        object,
        arch,
        name,
        spills,
        dot,
        wgmma,
        wait,
    } = kernel;
    let mut faults = Vec::new();
    if *spills > 0 {
        faults.push(format!("{object} {arch} {name}: {spills} spills to local memory"));
    }
    if object.contains("gemv_q") && name.contains("gemv") && *dot == 0 {
        faults.push(format!(
            "{object} {arch} {name}: multiplies quantised weights without IDP"
        ));
    }
    // On other GPUs it is a trap that nobody calls.
    if arch == "sm_90a" && name.contains("mm_kernel") && *wgmma == 0 {
        faults.push(format!("{object} {arch} {name}: multiplies without HGMMA"));
    }
    if arch.starts_with("sm_90") && *wait == 0 {
        faults.push(format!(
            "{object} {arch} {name}: does not wait for its predecessor under dependent launch"
        ));
    }
    faults
}

/// Reads `cuobjdump -sass`.
fn parse(text: &str) -> Vec<Kernel> {
    let mut kernels: Vec<Kernel> = Vec::new();
    let (mut object, mut arch) = (String::new(), String::new());
    for line in text.lines().map(str::trim) {
        if let Some(member) = line.strip_prefix("member ") {
            object = member
                .trim_end_matches(':')
                .rsplit([':', '/'])
                .next()
                .unwrap_or_default()
                .to_string();
        } else if let Some(value) = line.strip_prefix("arch = ") {
            arch = value.to_string();
        } else if let Some(name) = line.strip_prefix("Function : ") {
            let (object, arch, name) = (object.clone(), arch.clone(), name.to_string());
            kernels.push(Kernel {
                object,
                arch,
                name,
                ..Kernel::default()
            });
        } else if let (Some(kernel), Some(opcode)) = (kernels.last_mut(), opcode(line)) {
            match opcode.split('.').next().unwrap_or_default() {
                "STL" | "LDL" if line.contains("[R1]") || line.contains("[R1+") => kernel.spills += 1,
                "IDP" => kernel.dot += 1,
                "HGMMA" => kernel.wgmma += 1,
                "ACQBULK" => kernel.wait += 1,
                _ => {}
            }
        }
    }
    kernels
}

/// `LDG.E` of `/*0120*/  @P0 LDG.E R2, [R4] ;`.
fn opcode(line: &str) -> Option<&str> {
    let (_, rest) = line.strip_prefix("/*")?.split_once("*/")?;
    rest.split_whitespace()
        .find(|word| !word.starts_with(['@', '{']))
        .map(|word| word.trim_end_matches(';'))
}

fn cuobjdump(context: &Context, cuda: &Cuda, what: &str, archive: &Path) -> Result<String> {
    let program = cuda.program("cuobjdump")?;
    let mut path = vec![cuda.root.join("bin")];
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    // It calls nvdisasm by name.
    let path = std::env::join_paths(path).context("PATH")?;
    let output = Command::new(&program)
        .arg(what)
        .arg(archive)
        .env("PATH", path)
        .current_dir(&context.repo)
        .output();
    let output = output.with_context(|| format!("cannot run {}", program.display()))?;
    ensure!(
        output.status.success(),
        "cuobjdump failed on {}: {}",
        archive.display(),
        String::from_utf8_lossy(&output.stderr)
            .lines()
            .next()
            .unwrap_or_default()
    );
    // Hundreds of megabytes: not copied.
    String::from_utf8(output.stdout).context("cuobjdump printed no text")
}

#[cfg(test)]
mod tests {
    use super::*;

    const DUMP: &str = "\
member /b/libx.a:gemv-gemv_q4_k.o:

Fatbin elf code:
================
arch = sm_90a
\tcode for sm_90a
\t\tFunction : gemv_a
        /*0000*/                   LDC R1, c[0x0][0x28] ;           /* 0x00000a00ff017b82 */
                                                                     /* 0x000fe20000000800 */
        /*0010*/                   ACQBULK ;                         /* 0x0 */
        /*0020*/              @!P0 IDP.4A.S8.S8 R28, R4, R8, R28 ;   /* 0x0 */
member /b/libx.a:norm-norm.o:
arch = sm_90a
\t\tFunction : norm_a
        /*0000*/                   STL [R1], R2 ;                    /* 0x0 */
        /*0010*/                   LDL.64 R2, [R1+0x8] ;             /* 0x0 */
        /*0020*/                   LDL R3, [R18] ;                   /* 0x0 */
member /b/libx.a:mm-mm_q4_k.o:
arch = sm_90a
\t\tFunction : mm_kernel_a
        /*0000*/                   ACQBULK ;                         /* 0x0 */
        /*0010*/                   HGMMA.64x256x16.F32 R24, R4, gdesc[UR4], R24 ; /* 0x0 */
";

    #[test]
    fn instructions_are_counted_per_kernel() {
        let kernels = parse(DUMP);
        let found: Vec<_> = kernels
            .iter()
            .map(|k| (k.object.as_str(), k.name.as_str(), k.spills, k.dot, k.wgmma, k.wait))
            .collect();
        assert_eq!(
            found,
            [
                ("gemv-gemv_q4_k.o", "gemv_a", 0, 1, 0, 1),
                ("norm-norm.o", "norm_a", 2, 0, 0, 0),
                ("mm-mm_q4_k.o", "mm_kernel_a", 0, 0, 1, 1),
            ]
        );
    }

    #[test]
    fn each_fault_is_found() {
        let kernels = parse(DUMP);
        assert_eq!(faults(&kernels[0]), Vec::<String>::new());
        assert_eq!(faults(&kernels[1]).len(), 2);
        let slow = parse(&DUMP.replace("IDP.4A.S8.S8", "IMAD"));
        assert!(faults(&slow[0])[0].contains("without IDP"));
        assert_eq!(faults(&kernels[2]), Vec::<String>::new());
        let scalar = DUMP.replace("HGMMA.64x256x16.F32", "FFMA");
        assert!(faults(&parse(&scalar)[2])[0].contains("without HGMMA"));
        let elsewhere = parse(&scalar.replace("arch = sm_90a", "arch = sm_87"));
        assert_eq!(faults(&elsewhere[2]), Vec::<String>::new());
    }
}
