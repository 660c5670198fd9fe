//! How much memory there is to be had, and what limits it.

use super::root::{Reading, Root};
use serde::Serialize;

/// Memory of the machine and the limits of this process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Memory {
    /// `MemTotal`.
    pub total_bytes: Reading<u64>,
    /// `MemAvailable`: what can be taken without swapping.
    pub available_bytes: Reading<u64>,
    /// Swap devices and files.
    pub swaps: Reading<Vec<Swap>>,
    /// Limits of this process's control groups and of the groups around them. Empty: none is set.
    pub cgroup: Reading<Vec<Limit>>,
    /// Resource limits of this process.
    pub rlimits: Reading<Rlimits>,
    /// `available_bytes`, tightened by every limit.
    pub usable_bytes: Reading<u64>,
}

/// A swap device or file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Swap {
    pub name: String,
    pub total_bytes: u64,
    pub used_bytes: u64,
    /// Compressed memory, not a disk: it takes from the same memory that it seems to add.
    pub in_memory: bool,
}

/// A limit of a control group.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Limit {
    /// File that sets it.
    pub file: String,
    /// The limit.
    pub bytes: u64,
    /// What is left of it; inactive pages of files count as free, because the kernel drops them first.
    pub left_bytes: u64,
}

/// Soft limits; `None` is unlimited.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[allow(missing_docs)]
pub struct Rlimits {
    pub address_space_bytes: Option<u64>,
    pub data_bytes: Option<u64>,
    pub locked_bytes: Option<u64>,
}

/// Version 1 knows no word for "no limit": it shows the largest number of whole pages.
const V1_UNLIMITED: u64 = (i64::MAX as u64) / 65_536 * 65_536;

impl Memory {
    pub(super) fn read(root: &Root) -> Memory {
        const INFO: &str = "/proc/meminfo";
        let info = root.text(INFO);
        let field = |name| Reading::new(INFO, info.clone().and_then(|text| kib(&text, name)));
        let available = field("MemAvailable");
        let cgroup = cgroups(root);
        let rlimits = rlimits(root);
        let usable = usable(&available, &cgroup, &rlimits);
        Memory {
            total_bytes: field("MemTotal"),
            available_bytes: available,
            swaps: Reading::new("/proc/swaps", root.text("/proc/swaps").and_then(|t| swaps(&t))),
            cgroup: Reading::new("/proc/self/cgroup", cgroup),
            rlimits: Reading::new("/proc/self/limits", rlimits),
            usable_bytes: Reading::new("the readings above", usable),
        }
    }
}

/// The least of all; an unknown limit could be the tightest, so then nothing is known.
fn usable(
    available: &Reading<u64>,
    cgroup: &Result<Vec<Limit>, String>,
    rlimits: &Result<Rlimits, String>,
) -> Result<u64, String> {
    let rlimits = rlimits.as_ref().map_err(Clone::clone)?;
    let groups = cgroup.as_ref().map_err(Clone::clone)?;
    let limits = groups.iter().map(|l| l.left_bytes);
    let limits = limits.chain(rlimits.data_bytes).chain(rlimits.address_space_bytes);
    Ok(limits.fold(*available.get()?, u64::min))
}

/// A line of /proc/meminfo, in bytes.
fn kib(text: &str, name: &str) -> Result<u64, String> {
    let rest = text.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
    let rest = rest.ok_or_else(|| format!("/proc/meminfo has no {name}"))?;
    let number = rest.trim().strip_suffix(" kB").and_then(|n| n.parse::<u64>().ok());
    let bytes = number.and_then(|n| n.checked_mul(1024));
    bytes.ok_or_else(|| format!("/proc/meminfo says {name}:{rest}"))
}

fn swaps(text: &str) -> Result<Vec<Swap>, String> {
    let parse = |line: &str| {
        let mut words = line.split_whitespace();
        let name = words.next()?.to_owned();
        let _kind = words.next()?;
        let (total, used) = (words.next()?.parse::<u64>().ok()?, words.next()?.parse::<u64>().ok()?);
        Some(Swap {
            in_memory: name.starts_with("/dev/zram"),
            name,
            total_bytes: total.checked_mul(1024)?,
            used_bytes: used.checked_mul(1024)?,
        })
    };
    let lines = text.lines().skip(1).filter(|l| !l.trim().is_empty());
    lines
        .map(|l| parse(l).ok_or_else(|| format!("/proc/swaps has the line {l:?}")))
        .collect()
}

fn rlimits(root: &Root) -> Result<Rlimits, String> {
    let text = root.text("/proc/self/limits")?;
    let soft = |name: &str| {
        let rest = text.lines().find_map(|l| l.strip_prefix(name));
        let word = rest.and_then(|r| r.split_whitespace().next());
        match word {
            Some("unlimited") => Ok(None),
            Some(n) => n
                .parse()
                .map(Some)
                .map_err(|_| format!("/proc/self/limits says {n:?} for {name}")),
            None => Err(format!("/proc/self/limits has no {name}")),
        }
    };
    Ok(Rlimits {
        address_space_bytes: soft("Max address space")?,
        data_bytes: soft("Max data size")?,
        locked_bytes: soft("Max locked memory")?,
    })
}

/// A mounted hierarchy of control groups.
struct Hierarchy {
    /// Where it is mounted.
    at: String,
    /// Which group is shown there; in a container often the container's own.
    shown: String,
    v2: bool,
}

/// Limits of the group of this process and of all groups around it. Both versions are looked at: a machine may mount both.
fn cgroups(root: &Root) -> Result<Vec<Limit>, String> {
    let own = root.text("/proc/self/cgroup")?;
    let mounts = root.text("/proc/self/mountinfo")?;
    let hierarchies: Vec<Hierarchy> = mounts.lines().filter_map(hierarchy).collect();
    let mut limits = Vec::new();
    for line in own.lines() {
        // id:controllers:path, with no controllers for version 2.
        let mut fields = line.splitn(3, ':');
        let (Some(_), Some(controllers), Some(path)) = (fields.next(), fields.next(), fields.next()) else {
            return Err(format!("/proc/self/cgroup has the line {line:?}"));
        };
        let v2 = controllers.is_empty();
        if !v2 && !controllers.split(',').any(|c| c == "memory") {
            continue;
        }
        match hierarchies.iter().find(|h| h.v2 == v2) {
            Some(h) => limits.extend(chain(root, h, path)?),
            // Version 2 without a mount beside a version 1: systemd's bookkeeping, without controllers.
            None if v2 && hierarchies.iter().any(|h| !h.v2) => {}
            None => return Err(format!("the hierarchy of the group {path} is not mounted")),
        }
    }
    Ok(limits)
}

/// The mount of version 2, or of version 1's memory controller.
fn hierarchy(line: &str) -> Option<Hierarchy> {
    let (head, tail) = line.split_once(" - ")?;
    let head: Vec<&str> = head.split(' ').collect();
    let mut tail = tail.split(' ');
    let (kind, options) = (tail.next()?, tail.nth(1)?);
    let v2 = kind == "cgroup2";
    let v1 = kind == "cgroup" && options.split(',').any(|o| o == "memory");
    (v1 || v2).then(|| Hierarchy {
        at: (*head.get(4).unwrap_or(&"")).to_owned(),
        shown: (*head.get(3).unwrap_or(&"/")).to_owned(),
        v2,
    })
}

fn chain(root: &Root, h: &Hierarchy, path: &str) -> Result<Vec<Limit>, String> {
    // The group as seen from the mount. One that lies outside is a container's whose group has another name inside: the mount's top is it.
    let below = path.strip_prefix(h.shown.trim_end_matches('/')).unwrap_or("");
    let below = if below.is_empty() || below.starts_with('/') {
        below
    } else {
        ""
    };
    let mut group = format!("{}{}", h.at, below.trim_end_matches('/'));
    if !root.exists(&group) {
        group.clone_from(&h.at);
    }
    let names: &[&str] = if h.v2 {
        &["memory.max", "memory.high"]
    } else {
        &["memory.limit_in_bytes"]
    };
    let current = if h.v2 {
        "memory.current"
    } else {
        "memory.usage_in_bytes"
    };
    let mut limits = Vec::new();
    loop {
        for name in names {
            let file = format!("{group}/{name}");
            // The top of a machine's hierarchy has no limit and no such file, nor has one without the controller.
            if !root.exists(&file) {
                continue;
            }
            let text = root.text(&file)?;
            if text == "max" {
                continue;
            }
            let bytes = root.number(&file)?;
            if bytes >= V1_UNLIMITED && !h.v2 {
                continue;
            }
            let used = root.number(&format!("{group}/{current}"))?;
            let stat = root.text(&format!("{group}/memory.stat")).unwrap_or_default();
            let inactive = stat_field(&stat, if h.v2 { "inactive_file" } else { "total_inactive_file" });
            let left_bytes = bytes.saturating_sub(used.saturating_sub(inactive));
            limits.push(Limit {
                file,
                bytes,
                left_bytes,
            });
        }
        if group.len() <= h.at.len() {
            return Ok(limits);
        }
        group.truncate(group.rfind('/').unwrap_or(0));
    }
}

/// A field of memory.stat; 0 where it is missing, which leaves less.
fn stat_field(stat: &str, name: &str) -> u64 {
    let words = stat.lines().filter_map(|l| l.split_once(' '));
    let mut found = words.filter(|(key, _)| *key == name);
    found.find_map(|(_, n)| n.trim().parse().ok()).unwrap_or(0)
}
