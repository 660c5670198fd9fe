//! Reads what `ptxas -v` says about each kernel.

/// Kernels that spill registers to memory, as "kernel for arch: N bytes stored, M loaded".
pub fn spills(log: &str) -> Vec<String> {
    let mut kernel = "unknown kernel".to_string();
    let mut found = Vec::new();
    for line in log.lines() {
        if let Some((_, rest)) = line.split_once("Compiling entry function ") {
            kernel = rest.replace('\'', "");
        }
        let stored = bytes_before(line, " bytes spill stores");
        let loaded = bytes_before(line, " bytes spill loads");
        if stored + loaded > 0 {
            found.push(format!("{kernel}: {stored} bytes stored, {loaded} loaded"));
        }
    }
    found
}

/// Where the assembler gave up what the code relies on, such as running wgmma instructions asynchronously, in its own words, which name
/// the kernel. It only says so as information, and the kernel is right, but slower by a multiple.
pub fn losses(log: &str) -> Vec<String> {
    let loss = |line: &str| {
        line.split_once("Potential Performance Loss: ")
            .map(|(_, loss)| loss.to_string())
    };
    log.lines().filter_map(loss).collect()
}

fn bytes_before(line: &str, what: &str) -> u64 {
    let number = line
        .split_once(what)
        .and_then(|(before, _)| before.rsplit([' ', ',']).next());
    number.and_then(|n| n.parse().ok()).unwrap_or(0)
}
