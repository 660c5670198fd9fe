//! What stands in the way, and what to do about it.

use super::{Probe, Reading, Transport};
use serde::Serialize;

/// Something to know, with its remedy.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Finding {
    /// Short name, stable.
    pub id: &'static str,
    /// What was found.
    pub what: String,
    /// What to do.
    pub remedy: &'static str,
}

/// Least compute capability (times 10) that the kernels are written for.
const MIN_CC: i32 = 80;

/// What the streamer cannot do without. An unknown that it needs is one of them.
pub(super) fn blockers(probe: &Probe, model_named: bool) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |id, what, remedy| found.push(Finding { id, what, remedy });
    if !probe.live {
        add(
            "copy",
            "these are a copy of another machine's files".to_owned(),
            "run the probe on that machine",
        );
    }
    match &probe.cuda.devices {
        Reading::Unknown { unknown } => add(
            "cuda",
            unknown.clone(),
            "install NVIDIA's driver; in a container pass the GPU through (--gpus all, --runtime nvidia)",
        ),
        Reading::Known { value, .. } if value.is_empty() => add(
            "cuda",
            "the driver shows no device".to_owned(),
            "look at CUDA_VISIBLE_DEVICES; in a container pass the GPU through",
        ),
        Reading::Known { value, .. } => {
            for d in value {
                let name = format!("device {} ({}, sm_{})", d.ordinal, d.name, d.cc);
                if d.cc < MIN_CC {
                    add(
                        "capability",
                        format!("{name} is older than sm_{MIN_CC}"),
                        "hide the device with CUDA_VISIBLE_DEVICES",
                    );
                } else if let Err(why) = d.kernels.get() {
                    add(
                        "kernels",
                        format!("{name}: {why}"),
                        "use a build with feature `cuda` and this architecture in FLASHRT_CUDA_ARCHS, or hide the device",
                    );
                }
            }
        }
    }
    if let Err(why) = probe.memory.usable_bytes.get() {
        add(
            "memory",
            format!("usable memory is unknown: {why}"),
            "mount /proc and the memory control group where the process can see them",
        );
    }
    if let (true, Err(why)) = (model_named, probe.storage.get()) {
        add("model", why, "name a file that this process may read");
    }
    found
}

/// What costs speed or safety but does not stop anything.
pub(super) fn warnings(probe: &Probe) -> Vec<Finding> {
    let mut found = Vec::new();
    let mut add = |id, what, remedy| found.push(Finding { id, what, remedy });
    let memory = &probe.memory;
    if let Some(limits) = memory.rlimits.known() {
        if let Some(bytes) = limits.address_space_bytes {
            add(
                "address-space",
                format!("the address space is limited to {bytes} bytes: CUDA reserves far more addresses than memory"),
                "ulimit -v unlimited",
            );
        }
    }
    let disk_swap = |swaps: &Vec<super::Swap>| swaps.iter().any(|s| !s.in_memory);
    if memory.swaps.known().is_some_and(disk_swap) {
        add(
            "swap",
            "there is swap on a disk: what is swapped out competes with the streamer's reads".to_owned(),
            "swapoff while the model runs, or keep swap on another disk",
        );
    }
    if let (Some(total), Some(sold)) = (memory.total_bytes.known(), probe.board.module_memory_bytes.known()) {
        if total > sold {
            add(
                "module-memory",
                format!("the kernel has {total} bytes of memory, but the module is sold with {sold}"),
                "report the board: its part number is not what this version takes it for",
            );
        }
    }
    let Some(storage) = probe.storage.known() else {
        return found;
    };
    match &storage.disks {
        Reading::Unknown { unknown } => add(
            "disk",
            format!("what disk holds the model is unknown: {unknown}"),
            "keep the model on a file system of a local NVMe disk; in a container mount that folder",
        ),
        Reading::Known { value, .. } => {
            for disk in value {
                if disk.rotational.known() == Some(&true) && disk.transport != Transport::Virtio {
                    add(
                        "disk",
                        format!("{} is a turning disk", disk.name),
                        "keep the model on an NVMe disk",
                    );
                } else if disk.transport != Transport::Nvme {
                    add(
                        "disk",
                        format!("{} is no NVMe disk", disk.name),
                        "keep the model on an NVMe disk: every expert that is not resident is read from it",
                    );
                }
            }
        }
    }
    if probe.live {
        if let Err(why) = storage.direct.get() {
            add(
                "direct",
                format!("reads go through the page cache: {why}"),
                "keep the model on ext4, xfs or another file system with O_DIRECT",
            );
        }
        if let Err(why) = probe.io_uring.get() {
            add("io-uring", why, "allow io_uring, or live with reads by threads");
        }
    }
    found
}
