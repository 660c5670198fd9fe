//! From CMake's `CMAKE_CUDA_ARCHITECTURES` syntax to nvcc's `-gencode`. A pure function, so that its table is a test.

/// Families the kernels are written for; a plain number compiles to machine code and, see [`entry`], PTX.
const KNOWN: [u32; 10] = [80, 86, 87, 89, 90, 100, 103, 110, 120, 121];

/// One thing for nvcc to put into the fat binary, named by its architecture number and suffix ("90a").
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Code {
    /// Machine code, `sm_…`.
    Sass(String),
    /// Text that a newer driver compiles, `compute_…`.
    Ptx(String),
}

impl Code {
    /// As `frt_archs()` prints it.
    pub fn name(&self) -> String {
        match self {
            Code::Sass(arch) => format!("sm_{arch}"),
            Code::Ptx(arch) => format!("compute_{arch}"),
        }
    }

    /// The value of one `-gencode` argument.
    pub fn gencode(&self) -> String {
        let (Code::Sass(arch) | Code::Ptx(arch)) = self;
        format!("arch=compute_{arch},code={}", self.name())
    }

    /// The architecture's number without its suffix.
    pub fn number(&self) -> u32 {
        let (Code::Sass(arch) | Code::Ptx(arch)) = self;
        arch.trim_end_matches(char::is_alphabetic).parse().unwrap_or(0)
    }
}

/// Reads a `;`-separated list such as `87;90a-real`. Duplicates collapse, order is kept.
pub fn parse(list: &str) -> Result<Vec<Code>, String> {
    let mut codes = Vec::new();
    for item in list.split(';').map(str::trim).filter(|item| !item.is_empty()) {
        for code in entry(item)? {
            if !codes.contains(&code) {
                codes.push(code);
            }
        }
    }
    if codes.is_empty() {
        return Err(format!(
            "no CUDA architecture in \"{list}\": name some, such as 90a or 87;90a"
        ));
    }
    Ok(codes)
}

fn entry(item: &str) -> Result<Vec<Code>, String> {
    let (arch, sass, ptx) = match item.rsplit_once('-') {
        Some((arch, "real")) => (arch, true, false),
        Some((arch, "virtual")) => (arch, false, true),
        _ => (item, true, true),
    };
    match item {
        "native" => {
            return Err(
                "CUDA architecture \"native\": the archive must not depend on the GPU of the machine that builds \
                        it, which may have none; name the numbers, such as 90a"
                    .into(),
            )
        }
        "all" | "all-major" => {
            return Err(format!(
                "CUDA architecture \"{item}\": kernels start at sm_80; name the numbers, such as 87;90a;110a"
            ))
        }
        _ => {}
    }
    let digits = arch.trim_end_matches(['a', 'f']);
    let suffix = &arch[digits.len()..];
    let number: u32 = digits.parse().map_err(|_| {
        format!("CUDA architecture \"{item}\" is not a number with an optional suffix (90, 90a, 90-real, 87-virtual)")
    })?;
    if number < 80 {
        return Err(format!("CUDA architecture \"{item}\": the kernels need sm_80 or newer"));
    }
    if !KNOWN.contains(&number) {
        return Err(format!("CUDA architecture \"{item}\" is unknown; known are {KNOWN:?}"));
    }
    if suffix.len() > 1 || (suffix == "a" && number < 90) || (suffix == "f" && number < 100) {
        return Err(format!(
            "CUDA architecture \"{item}\": {number} has no variant \"{suffix}\""
        ));
    }
    // Hopper's and Thor's tensor-core instructions exist only in the `a` variants. Hopper's PTX is kept plain, so that newer
    // GPUs can run it; PTX of a variant runs on its own GPU only, so beside machine code it would be of no use.
    let (sass_arch, ptx_arch) = match number {
        90 => ("90a", "90"),
        110 => ("110a", "110a"),
        _ => (arch, arch),
    };
    let ptx = ptx && !(sass && ptx_arch.ends_with(char::is_alphabetic));
    let sass = sass.then(|| Code::Sass(sass_arch.to_string()));
    let ptx = ptx.then(|| Code::Ptx(ptx_arch.to_string()));
    Ok(sass.into_iter().chain(ptx).collect())
}
