//! The attention modules that `cargo xtask fa4` compiles: build/fa4/modules.json.

use serde::Deserialize;
use std::sync::LazyLock;

/// An attention module.
#[derive(Debug, Clone, Deserialize)]
pub struct Module {
    /// Its name, `fa4_<name>` in the objects.
    pub name: String,
    /// Values of a head of Q and K.
    pub head_dim: i64,
    /// Values of a head of V.
    pub head_dim_v: i64,
    /// Tokens of a tile.
    pub tile_m: usize,
    /// Keys of a tile.
    pub tile_n: usize,
    /// What it is there for.
    pub why: String,
}

#[derive(Deserialize)]
struct Table {
    modules: Vec<Module>,
}

/// All of them. Which are in this build: [`super::prefill_fa4_modules`].
pub static MODULES: LazyLock<Vec<Module>> = LazyLock::new(|| {
    let table: Table = serde_json::from_str(include_str!("../../build/fa4/modules.json")).expect("checked by a test");
    table.modules
});

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_names_each_module_once_and_says_why() {
        let mut names: Vec<&str> = MODULES.iter().map(|m| m.name.as_str()).collect();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), MODULES.len());
        for m in MODULES.iter() {
            let sizes = [m.head_dim, m.head_dim_v];
            // Rows of 16 bytes; whole warpgroups of queries; keys in steps of wgmma, and of the mask's scan.
            assert!(sizes.iter().all(|n| (8..=256).contains(n) && n % 8 == 0), "{m:?}");
            assert!(m.tile_m % 64 == 0 && m.tile_n % 16 == 0 && !m.why.is_empty(), "{m:?}");
            let same = |o: &&Module| [o.head_dim, o.head_dim_v] == sizes;
            assert_eq!(MODULES.iter().filter(same).count(), 1, "{m:?}");
        }
    }
}
