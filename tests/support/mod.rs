//! Graphs for tests, built as llama.cpp builds them.
#![allow(dead_code, reason = "each test binary uses its part")]

pub mod machine;
pub mod model;
