//! Fused CUDA kernels for llama.cpp's CUDA backend.
//!
//! A hook in ggml-cuda asks at every node of a compute graph whether a *window* starts there: a chain of nodes that one fused
//! kernel can replace. See `docs/architecture.md` for the shape of the house and [`window`] for how to add one.

#![warn(missing_docs)]

pub mod abi;
pub mod cache;
#[cfg(any(feature = "host", test))]
pub mod check;
pub mod gguf;
pub mod graph;
#[cfg(feature = "host")]
pub mod host;
pub mod kernel;
pub mod probe;
pub mod reference;
#[cfg(feature = "cli")]
pub mod report;
pub mod stream;
pub mod window;
