//! The expert streamer: models with routed experts that are larger than memory.
//!
//! What is here does not touch a GPU yet. `docs/streamer.md` says what exists.

pub mod budget;
pub mod direct;
pub mod read;
pub mod shape;
pub mod source;
