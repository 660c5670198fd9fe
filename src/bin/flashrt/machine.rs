//! What machine and what build this is, for reports.

use ggml_flashrt::report::{Build, Machine};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;

/// Reasons by the path of the field that stays null.
pub type Missing = BTreeMap<String, String>;

/// The machine, GPU fields by nvidia-smi.
pub fn machine(missing: &mut Missing) -> Machine {
    let cpu_info = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu_info
        .lines()
        .find_map(|l| l.strip_prefix("model name")?.split_once(':'));
    let release = std::fs::read_to_string("/proc/sys/kernel/osrelease").ok();
    let mut machine = Machine {
        cpu: model.map(|(_, name)| name.trim().to_owned()),
        cores: std::thread::available_parallelism().ok().map(|n| n.get() as u32),
        kernel: release.map(|r| r.trim().to_owned()),
        ..Machine::default()
    };
    missing.insert("machine.sm_count".into(), "nvidia-smi does not report it".into());
    const QUERY: &str = "name,compute_cap,driver_version,memory.total,clocks.sm,clocks.max.sm,clocks.mem,power.limit";
    let query = format!("--query-gpu={QUERY}");
    let answer = match stdout_of(Command::new("nvidia-smi").args([&query, "--format=csv,noheader,nounits"])) {
        Ok(answer) => answer,
        Err(why) => {
            missing.insert("machine".into(), format!("nvidia-smi: {why}"));
            return machine;
        }
    };
    // With several GPUs the first one speaks for all: hosts have one kind.
    let first: Vec<&str> = answer
        .lines()
        .next()
        .unwrap_or_default()
        .split(',')
        .map(str::trim)
        .collect();
    if let [name, cap, driver, memory, sm, sm_max, mem, power] = first[..] {
        machine.gpu = Some(name.to_owned());
        machine.gpu_count = Some(answer.lines().filter(|l| !l.trim().is_empty()).count() as u32);
        machine.compute_capability = Some(cap.to_owned());
        machine.driver = Some(driver.to_owned());
        machine.memory_mib = memory.parse().ok();
        machine.clock_sm_mhz = sm.parse().ok();
        machine.clock_sm_max_mhz = sm_max.parse().ok();
        machine.clock_mem_mhz = mem.parse().ok();
        machine.power_limit_w = power.parse().ok();
    } else {
        missing.insert("machine".into(), format!("nvidia-smi answered {answer:?}"));
    }
    machine
}

/// This build. The commit comes from FLASHRT_COMMIT (`<hash>`, with `-dirty` for uncommitted changes), else from git in the
/// working directory, if that is this repository.
pub fn build(missing: &mut Missing) -> Build {
    let mut build = Build {
        version: env!("CARGO_PKG_VERSION").to_owned(),
        ..Build::default()
    };
    let stated = std::env::var("FLASHRT_COMMIT").ok().or_else(|| {
        Path::new("csrc/flashrt_kernels.h").exists().then_some(())?;
        let hash = stdout_of(Command::new("git").args(["rev-parse", "HEAD"])).ok()?;
        let status = stdout_of(Command::new("git").args(["status", "--porcelain", "--untracked-files=no"])).ok()?;
        Some(if status.trim().is_empty() {
            hash.trim().to_owned()
        } else {
            format!("{}-dirty", hash.trim())
        })
    });
    match stated {
        Some(commit) => {
            build.dirty = Some(commit.ends_with("-dirty"));
            build.commit = Some(commit.trim_end_matches("-dirty").to_owned());
        }
        None => {
            let why = "not run in the repository, and FLASHRT_COMMIT is not set";
            missing.insert("build.commit".into(), why.into());
            missing.insert("build.dirty".into(), why.into());
        }
    }
    build
}

/// Now, UTC, RFC 3339.
pub fn now() -> String {
    let since = std::time::SystemTime::now()
        .duration_since(std::time::UNIX_EPOCH)
        .unwrap_or_default();
    rfc3339(since.as_secs())
}

/// Days to a date as in Howard Hinnant's `civil_from_days`.
fn rfc3339(seconds: u64) -> String {
    let (days, time) = (seconds / 86_400 + 719_468, seconds % 86_400);
    let (era, day_of_era) = (days / 146_097, days % 146_097);
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month + 2) / 5 + 1;
    let month = if month < 10 { month + 3 } else { month - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z",
        time / 3600,
        time / 60 % 60,
        time % 60
    )
}

fn stdout_of(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|e| e.to_string())?;
    if !output.status.success() {
        return Err(output.status.to_string());
    }
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

#[cfg(test)]
mod tests {
    use super::rfc3339;

    #[test]
    fn dates() {
        assert_eq!(rfc3339(0), "1970-01-01T00:00:00Z");
        assert_eq!(rfc3339(951_782_399), "2000-02-28T23:59:59Z");
        assert_eq!(rfc3339(951_782_400), "2000-02-29T00:00:00Z");
        assert_eq!(rfc3339(1_796_083_200), "2026-12-01T00:00:00Z");
    }
}
