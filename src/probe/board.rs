//! What board this is and what runs on it. Tables name exactly what they know; anything else is unknown.

use super::root::{Reading, Root};
use serde::Serialize;

/// Board, module and their software.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Board {
    /// As the device tree or the firmware names it.
    pub model: Reading<String>,
    /// Part number of the Jetson module, for example `p3767-0005`.
    pub module: Reading<String>,
    /// Name of the module with that part number.
    pub module_name: Reading<String>,
    /// Memory that a module with that part number is sold with.
    pub module_memory_bytes: Reading<u64>,
    /// System on chip, for example `tegra234`.
    pub soc: Reading<String>,
    /// Release of Jetson Linux, for example `36.4.3`.
    pub l4t: Reading<String>,
    /// Version of JetPack.
    pub jetpack: Reading<String>,
    /// Power mode of a Jetson.
    pub power_mode: Reading<String>,
    /// Clock of a Jetson's GPU.
    pub gpu_clock: Reading<Clock>,
    /// Release of the kernel.
    pub kernel: Reading<String>,
}

/// What devfreq says of a clock.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Clock {
    /// Highest that the power mode allows now.
    pub max_hz: u64,
    /// Now.
    pub now_hz: u64,
}

/// Part number, name and memory of modules whose GPU the library has kernels for, by NVIDIA's list of module part numbers.
const MODULES: [(&str, &str, u64); 10] = [
    ("p3701-0000", "Jetson AGX Orin 32GB (developer kit)", 32),
    ("p3701-0004", "Jetson AGX Orin 32GB", 32),
    ("p3701-0005", "Jetson AGX Orin 64GB", 64),
    ("p3701-0008", "Jetson AGX Orin Industrial 64GB", 64),
    ("p3767-0000", "Jetson Orin NX 16GB", 16),
    ("p3767-0001", "Jetson Orin NX 8GB", 8),
    ("p3767-0003", "Jetson Orin Nano 8GB", 8),
    ("p3767-0004", "Jetson Orin Nano 4GB", 4),
    ("p3767-0005", "Jetson Orin Nano 8GB (developer kit)", 8),
    ("p3834-0008", "Jetson T5000 128GB", 128),
];

/// JetPack of each release of Jetson Linux.
const JETPACKS: [(&str, &str); 12] = [
    ("35.1.0", "5.0.2"),
    ("35.2.1", "5.1"),
    ("35.3.1", "5.1.1"),
    ("35.4.1", "5.1.2"),
    ("35.5.0", "5.1.3"),
    ("35.6.0", "5.1.4"),
    ("36.2.0", "6.0 DP"),
    ("36.3.0", "6.0"),
    ("36.4.0", "6.1"),
    ("36.4.3", "6.2"),
    ("36.4.4", "6.2.1"),
    ("38.2.0", "7.0"),
];

const COMPATIBLE: &str = "/proc/device-tree/compatible";
const TEGRA_RELEASE: &str = "/etc/nv_tegra_release";
const DPKG: &str = "/var/lib/dpkg/status";

impl Board {
    pub(super) fn read(root: &Root) -> Board {
        let module = module(root);
        let row = module
            .clone()
            .and_then(|part| known_module(&part).ok_or_else(|| format!("{part} is no module that this version knows")));
        let l4t = l4t(root);
        Board {
            model: model(root),
            module: Reading::new(COMPATIBLE, module),
            module_name: Reading::new("the part number", row.clone().map(|(_, name, _)| name.to_owned())),
            module_memory_bytes: Reading::new("the part number", row.map(|(_, _, gib)| gib << 30)),
            soc: Reading::new(COMPATIBLE, soc(root)),
            jetpack: jetpack(root, &l4t),
            l4t: Reading::new(TEGRA_RELEASE, l4t),
            power_mode: power_mode(root),
            gpu_clock: gpu_clock(root),
            kernel: Reading::new("/proc/sys/kernel/osrelease", root.text("/proc/sys/kernel/osrelease")),
        }
    }
}

fn known_module(part: &str) -> Option<(&'static str, &'static str, u64)> {
    MODULES.iter().find(|row| row.0 == part).copied()
}

fn model(root: &Root) -> Reading<String> {
    const TREE: &str = "/proc/device-tree/model";
    const DMI: &str = "/sys/class/dmi/id/product_name";
    match (root.text(TREE), root.text(DMI)) {
        (Ok(model), _) => Reading::new(TREE, Ok(model)),
        (_, Ok(model)) => Reading::new(DMI, Ok(model)),
        (Err(tree), Err(dmi)) => Reading::unknown(format!("{tree}, {dmi}")),
    }
}

/// Entries of the device tree's list, most specific first.
fn compatible(root: &Root) -> Result<Vec<String>, String> {
    let entries = root.text(COMPATIBLE)?;
    Ok(entries.split('\0').map(str::to_owned).collect())
}

/// The entry for the module alone; one that names carrier and module together, `nvidia,p3768-0000+p3767-0005`, will do.
fn module(root: &Root) -> Result<String, String> {
    let entries = compatible(root)?;
    let ids = entries.iter().filter_map(|e| e.strip_prefix("nvidia,"));
    let parts = ids.flat_map(|id| id.split('+')).filter(|part| is_part_number(part));
    let mut modules: Vec<&str> = parts
        .filter(|part| MODULES.iter().any(|(known, ..)| known[..5] == part[..5]))
        .collect();
    modules.dedup();
    match modules[..] {
        [] => Err(format!("{COMPATIBLE} names no Jetson module: {entries:?}")),
        [one] => Ok(one.to_owned()),
        _ => Err(format!("{COMPATIBLE} names several modules: {modules:?}")),
    }
}

/// `p` and four digits, `-`, four digits.
fn is_part_number(part: &str) -> bool {
    let digits = |s: &str| s.len() == 4 && s.bytes().all(|b| b.is_ascii_digit());
    part.strip_prefix('p')
        .and_then(|rest| rest.split_once('-'))
        .is_some_and(|(board, sku)| digits(board) && digits(sku))
}

fn soc(root: &Root) -> Result<String, String> {
    let entries = compatible(root)?;
    let soc = entries.iter().rev().find_map(|e| e.strip_prefix("nvidia,tegra"));
    soc.map(|n| format!("tegra{n}"))
        .ok_or_else(|| format!("{COMPATIBLE} names no Tegra: {entries:?}"))
}

/// `# R36 (release), REVISION: 4.3, …` is 36.4.3.
fn l4t(root: &Root) -> Result<String, String> {
    let text = root.text(TEGRA_RELEASE)?;
    let line = text.lines().next().unwrap_or_default();
    let parsed = line.strip_prefix("# R").and_then(|rest| {
        let (major, rest) = rest.split_once(" (release), REVISION: ")?;
        let (revision, _) = rest.split_once(',')?;
        let version = format!("{major}.{revision}");
        let numbers = version.split('.').collect::<Vec<_>>();
        let numeric = |n: &str| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit());
        (numbers.len() == 3 && numbers.iter().all(|&n| numeric(n))).then_some(version)
    });
    parsed.ok_or_else(|| format!("{TEGRA_RELEASE} begins with {line:?}, which names no release"))
}

/// The installed meta package says it; without one the table, if it has this very release.
fn jetpack(root: &Root, l4t: &Result<String, String>) -> Reading<String> {
    if let Some(version) = installed_version(root, "nvidia-jetpack") {
        return Reading::new(DPKG, Ok(version));
    }
    let from_table = l4t.clone().and_then(|l4t| {
        let row = JETPACKS.iter().find(|(release, _)| *release == l4t);
        row.map(|(_, jetpack)| (*jetpack).to_owned()).ok_or_else(|| {
            format!("nvidia-jetpack is not installed, and this version does not know Jetson Linux {l4t}")
        })
    });
    Reading::new("the release of Jetson Linux", from_table)
}

fn installed_version(root: &Root, package: &str) -> Option<String> {
    let status = root.text(DPKG).ok()?;
    let entries = status.split("\n\n");
    let field = |entry: &str, name: &str| {
        let mut lines = entry.lines();
        lines.find_map(|l| Some(l.strip_prefix(name)?.strip_prefix(": ")?.trim().to_owned()))
    };
    let entry = entries
        .filter(|e| field(e, "Package").as_deref() == Some(package))
        .find(|e| field(e, "Status").as_deref() == Some("install ok installed"))?;
    field(entry, "Version")
}

/// nvpmodel keeps the number of the mode, its configuration the names.
fn power_mode(root: &Root) -> Reading<String> {
    const STATUS: &str = "/var/lib/nvpmodel/status";
    const NAMES: &str = "/etc/nvpmodel.conf";
    let mode = root.text(STATUS).and_then(|status| {
        let id = status.trim().strip_prefix("pmode:").and_then(|n| n.parse::<u32>().ok());
        id.ok_or_else(|| format!("{STATUS} holds {status:?}, no mode"))
    });
    let named = mode.map(|id| {
        let name = root.text(NAMES).ok().and_then(|conf| {
            let lines = conf.lines().filter(|l| l.trim_start().starts_with("< POWER_MODEL "));
            let field = |line: &str, key: &str| {
                let words = line.split_whitespace();
                words.filter_map(|w| w.strip_prefix(key)).map(str::to_owned).next()
            };
            lines
                .filter(|l| field(l, "ID=").and_then(|n| n.parse().ok()) == Some(id))
                .find_map(|l| field(l, "NAME="))
        });
        match name {
            Some(name) => format!("{name} (mode {id})"),
            None => format!("mode {id}, whose name {NAMES} does not say"),
        }
    });
    Reading::new(STATUS, named)
}

fn gpu_clock(root: &Root) -> Reading<Clock> {
    const CLOCKS: &str = "/sys/class/devfreq";
    let names = match root.list(CLOCKS) {
        Ok(names) => names,
        Err(why) => return Reading::unknown(why),
    };
    // Called 17000000.gpu or 17000000.ga10b, by kernel.
    let is_gpu = |name: &&String| name.ends_with(".gpu") || name.ends_with(".ga10b");
    let Some(name) = names.iter().find(is_gpu) else {
        return Reading::unknown(format!("{CLOCKS} has no GPU of a Jetson: {names:?}"));
    };
    let from = format!("{CLOCKS}/{name}");
    let clock = root.number(&format!("{from}/max_freq")).and_then(|max_hz| {
        let now_hz = root.number(&format!("{from}/cur_freq"))?;
        Ok(Clock { max_hz, now_hz })
    });
    Reading::new(from, clock)
}
