//! The library as its host sees it, without a GPU: the C header and entry points, the ways of linking, the hook patches and the
//! glue. A new test goes to the file named after what it looks at; C and C++ sources lie in tests/c.
#![cfg(unix)]

mod archive;
mod c_program;
mod hook;
#[cfg(target_os = "linux")]
mod link_matrix;
