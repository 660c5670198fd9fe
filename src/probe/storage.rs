//! What lies between a file and the disks that hold it.

use super::root::{Reading, Root};
use serde::Serialize;
use std::path::{Path, PathBuf};

/// Where a file's bytes are.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Storage {
    /// The file, without links.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Where its file system is mounted.
    pub mount: String,
    /// Kind of the file system.
    pub fs: String,
    /// What is mounted, as the kernel names it.
    pub source: String,
    /// Mount options that matter here.
    pub read_only: bool,
    /// From the file system down, each layer before those that carry it.
    pub layers: Reading<Vec<Layer>>,
    /// The disks at the bottom.
    pub disks: Reading<Vec<Disk>>,
    /// What O_DIRECT asks of this file.
    pub direct: Reading<Direct>,
}

/// A block device on the way down.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Layer {
    /// Kernel's name.
    pub name: String,
    /// What it is.
    pub kind: Kind,
    /// Further name: that of the mapping, or the file behind a loop device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub label: Option<String>,
}

/// Kinds of block devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Kind {
    Partition,
    Lvm,
    Crypt,
    DeviceMapper,
    Raid,
    Loop,
    Disk,
}

/// How a disk is attached.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs)]
pub enum Transport {
    Nvme,
    Virtio,
    Mmc,
    Usb,
    Scsi,
    Memory,
    Other,
}

/// A disk.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Disk {
    /// Kernel's name.
    pub name: String,
    /// How it is attached.
    pub transport: Transport,
    /// As it calls itself.
    pub model: Reading<String>,
    /// Does it turn?
    pub rotational: Reading<bool>,
    /// Smallest piece that can be addressed.
    pub logical_block_bytes: Reading<u64>,
    /// Longest single transfer: longer reads are cut by the kernel.
    pub max_transfer_bytes: Reading<u64>,
    /// Requests that the kernel queues.
    pub queue_depth: Reading<u64>,
    /// PCIe link of an NVMe disk.
    pub pcie: Reading<String>,
}

/// What reads past the page cache must be aligned to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Direct {
    /// Address in memory.
    pub memory_bytes: u64,
    /// Offset in the file and length.
    pub offset_bytes: u64,
}

/// Deeper stacks are a loop.
const MAX_LAYERS: usize = 32;

/// Everything about the file `path`.
pub(super) fn read(root: &Root, path: &Path) -> Result<Storage, String> {
    let file = root.real(path)?;
    let host = root.host(&file);
    let meta = host.metadata().map_err(|e| format!("{}: {e}", file.display()))?;
    if !meta.is_file() {
        return Err(format!("{} is no file", file.display()));
    }
    let mounts = root.text("/proc/self/mountinfo")?;
    let mount = mount_of(&mounts, &file)?;
    let stack = below(root, &mount, &file, 0);
    let (layers, disks) = match stack {
        Ok(stack) => (Ok(stack.layers), Ok(stack.disks)),
        Err(why) => (Err(why.clone()), Err(why)),
    };
    let direct = if root.is_live() {
        crate::stream::direct::alignment(&host).map(|a| Direct {
            memory_bytes: a.memory,
            offset_bytes: a.offset,
        })
    } else {
        Err("not tried on a copy of another machine's files".to_owned())
    };
    Ok(Storage {
        file: file.display().to_string(),
        bytes: meta.len(),
        mount: mount.at.clone(),
        fs: mount.fs.clone(),
        source: mount.source.clone(),
        read_only: mount.options.iter().any(|o| o == "ro"),
        layers: Reading::new("/sys/dev/block", layers),
        disks: Reading::new("/sys/dev/block", disks),
        direct: Reading::new("the file", direct),
    })
}

#[derive(Debug, Clone)]
struct Mount {
    device: String,
    at: String,
    fs: String,
    source: String,
    options: Vec<String>,
    super_options: Vec<String>,
}

/// mountinfo writes blanks and backslashes as three octal digits.
fn unescape(field: &str) -> String {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        let octal = (byte == b'\\')
            .then(|| std::str::from_utf8(tail.get(..3)?).ok())
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match octal {
            Some(value) => {
                bytes.push(value);
                rest = &tail[3..];
            }
            None => {
                bytes.push(byte);
                rest = tail;
            }
        }
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

fn parse_mount(line: &str) -> Option<Mount> {
    let (head, tail) = line.split_once(" - ")?;
    let head: Vec<&str> = head.split(' ').collect();
    let tail: Vec<&str> = tail.split(' ').collect();
    let list = |text: &str| text.split(',').map(unescape).collect();
    Some(Mount {
        device: (*head.get(2)?).to_owned(),
        at: unescape(head.get(4)?),
        options: list(head.get(5)?),
        fs: (*tail.first()?).to_owned(),
        source: unescape(tail.get(1)?),
        super_options: list(tail.get(2)?),
    })
}

/// The mount that shows `file`: the longest mount point above it, and of several at one point the last, which hides the others.
fn mount_of(mounts: &str, file: &Path) -> Result<Mount, String> {
    let above = mounts
        .lines()
        .filter_map(parse_mount)
        .filter(|m| file.starts_with(&m.at));
    let longest = above.max_by_key(|m| Path::new(&m.at).components().count());
    longest.ok_or_else(|| format!("/proc/self/mountinfo shows no mount above {}", file.display()))
}

#[derive(Default)]
struct Stack {
    layers: Vec<Layer>,
    disks: Vec<Disk>,
}

/// The devices below a mounted file.
fn below(root: &Root, mount: &Mount, file: &Path, depth: usize) -> Result<Stack, String> {
    if depth > MAX_LAYERS {
        return Err("the file systems lie over each other in a loop".to_owned());
    }
    if mount.fs == "overlay" {
        return below_overlay(root, mount, file, depth);
    }
    let device = match mount.device.split_once(':') {
        Some(("0", _)) | None => by_source(root, mount)?,
        Some(_) => device_path(root, &format!("/sys/dev/block/{}", mount.device))?,
    };
    let mut stack = Stack::default();
    walk(root, &device, &mut stack)?;
    Ok(stack)
}

/// Some file systems that do lie on a block device (btrfs, bind mounts of it) have a device number of their own.
fn by_source(root: &Root, mount: &Mount) -> Result<PathBuf, String> {
    let no_device = || {
        format!(
            "{} at {} lies on no block device of this machine ({})",
            mount.fs, mount.at, mount.source
        )
    };
    if !mount.source.starts_with("/dev/") {
        return Err(no_device());
    }
    // /dev/mapper/name is a link to /dev/dm-N.
    let node = root
        .real(Path::new(&mount.source))
        .unwrap_or_else(|_| PathBuf::from(&mount.source));
    let name = node
        .file_name()
        .map(|n| n.to_string_lossy().into_owned())
        .unwrap_or_default();
    device_path(root, &format!("/sys/class/block/{name}")).map_err(|_| no_device())
}

/// The highest layer of an overlay that has the file, and what is below that.
fn below_overlay(root: &Root, overlay: &Mount, file: &Path, depth: usize) -> Result<Stack, String> {
    let inside = file.strip_prefix(&overlay.at).unwrap_or(file);
    let option = |name: &str| {
        let mut options = overlay.super_options.iter();
        options.find_map(|o| Some(o.strip_prefix(name)?.strip_prefix('=')?.to_owned()))
    };
    let lower = option("lowerdir").unwrap_or_default();
    let folders: Vec<String> = option("upperdir")
        .into_iter()
        .chain(lower.split(':').filter(|l| !l.is_empty()).map(str::to_owned))
        .collect();
    let hidden = || {
        format!(
            "an overlay shows the file, and the folders it is made of cannot be seen from here: {}",
            folders.join(", ")
        )
    };
    for folder in &folders {
        let Ok(real) = root.real(&Path::new(folder).join(inside)) else {
            continue;
        };
        let mount = mount_of(&root.text("/proc/self/mountinfo")?, &real)?;
        return below(root, &mount, &real, depth + 1);
    }
    Err(hidden())
}

/// The device's folder in sysfs, without links.
fn device_path(root: &Root, link: &str) -> Result<PathBuf, String> {
    root.real(Path::new(link))
}

/// Adds `device` and all that carry it.
fn walk(root: &Root, device: &Path, stack: &mut Stack) -> Result<(), String> {
    if stack.layers.len() > MAX_LAYERS {
        return Err("the block devices lie over each other in a loop".to_owned());
    }
    let name = device.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let at = device.display().to_string();
    let text = |file: &str| root.text(&format!("{at}/{file}")).ok();
    let slaves = root.list(&format!("{at}/slaves")).unwrap_or_default();
    let mut push = |kind, label| {
        stack.layers.push(Layer {
            name: name.clone(),
            kind,
            label,
        });
    };
    if text("partition").is_some() {
        push(Kind::Partition, None);
        let disk = device
            .parent()
            .ok_or_else(|| format!("{at} is no partition of a disk"))?;
        return walk(root, disk, stack);
    }
    if let Some(file) = text("loop/backing_file") {
        push(Kind::Loop, Some(file.clone()));
        let real = root
            .real(Path::new(&file))
            .map_err(|why| format!("{name} shows {file}: {why}"))?;
        let mounts = root.text("/proc/self/mountinfo")?;
        let depth = stack.layers.len();
        let under = below(root, &mount_of(&mounts, &real)?, &real, depth)?;
        stack.layers.extend(under.layers);
        stack.disks.extend(under.disks);
        return Ok(());
    }
    if let Some(label) = text("dm/name") {
        let uuid = text("dm/uuid").unwrap_or_default();
        let kind = match uuid.split('-').next() {
            Some("LVM") => Kind::Lvm,
            Some("CRYPT") => Kind::Crypt,
            _ => Kind::DeviceMapper,
        };
        push(kind, Some(label));
    } else if root.exists(&format!("{at}/md")) {
        push(Kind::Raid, text("md/level"));
    } else {
        push(Kind::Disk, None);
        let disk = disk(root, &name, &at);
        if !stack.disks.iter().any(|d| d.name == disk.name) {
            stack.disks.push(disk);
        }
        return Ok(());
    }
    if slaves.is_empty() {
        return Err(format!("{at}/slaves names no device that carries {name}"));
    }
    for slave in slaves {
        let link = device_path(root, &format!("{at}/slaves/{slave}"))?;
        walk(root, &link, stack)?;
    }
    Ok(())
}

fn disk(root: &Root, name: &str, at: &str) -> Disk {
    let transport = match name {
        n if n.starts_with("nvme") => Transport::Nvme,
        n if n.starts_with("vd") => Transport::Virtio,
        n if n.starts_with("mmcblk") => Transport::Mmc,
        n if n.starts_with("zram") || n.starts_with("ram") || n.starts_with("pmem") => Transport::Memory,
        _ if at.contains("/usb") => Transport::Usb,
        n if n.starts_with("sd") => Transport::Scsi,
        _ => Transport::Other,
    };
    let number = |file: &str| {
        let path = format!("{at}/queue/{file}");
        Reading::new(path.clone(), root.number(&path))
    };
    let rotational = match number("rotational") {
        Reading::Known { value, from } => Reading::Known {
            value: value != 0,
            from,
        },
        Reading::Unknown { unknown } => Reading::Unknown { unknown },
    };
    let kib = match number("max_sectors_kb") {
        Reading::Known { value, from } => Reading::Known {
            value: value.saturating_mul(1024),
            from,
        },
        unknown => unknown,
    };
    Disk {
        name: name.to_owned(),
        transport,
        model: Reading::new(
            format!("{at}/device/model"),
            root.text(&format!("{at}/device/model")).map(|m| m.trim().to_owned()),
        ),
        rotational,
        logical_block_bytes: number("logical_block_size"),
        max_transfer_bytes: kib,
        queue_depth: number("nr_requests"),
        pcie: pcie(root, transport, at),
    }
}

/// `8.0 GT/s PCIe x4 (of 16.0 GT/s PCIe x4)`: what the slot gave, and what the disk could do.
fn pcie(root: &Root, transport: Transport, at: &str) -> Reading<String> {
    if transport != Transport::Nvme {
        return Reading::unknown("no NVMe disk");
    }
    // The controller's PCI function is the parent of the controller, which is the parent of the disk.
    let from = format!("{at}/device/device");
    let field = |name: &str| root.text(&format!("{from}/{name}"));
    let link = |speed: &str, width: &str| Ok::<_, String>(format!("{} x{}", field(speed)?, field(width)?));
    let both =
        link("current_link_speed", "current_link_width").map(|now| match link("max_link_speed", "max_link_width") {
            Ok(max) => format!("{now} (of {max})"),
            Err(_) => now,
        });
    Reading::new(from, both)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_of_the_longest_mount_points_shows_the_file() {
        let mounts = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                      2 1 8:2 / /data rw - ext4 /dev/sda2 rw\n\
                      3 1 8:3 / /data rw,relatime - xfs /dev/sda3 rw\n\
                      4 1 8:4 / /database rw - ext4 /dev/sda4 rw\n\
                      5 1 8:5 / /my\\040models ro - ext4 /dev/sda5 rw\n";
        let at = |file: &str| mount_of(mounts, Path::new(file)).unwrap().device;
        assert_eq!(at("/model"), "8:1");
        assert_eq!(at("/data/model"), "8:3");
        assert_eq!(at("/database/model"), "8:4");
        assert_eq!(at("/my models/model"), "8:5");
        assert!(mount_of("", Path::new("/model")).is_err());
    }
}
