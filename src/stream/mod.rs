//! The expert streamer: models with routed experts that are larger than memory.
//!
//! What is here does not touch a GPU yet. `docs/streamer.md` says what exists. From the model to the slot: [`source`] knows where its
//! experts lie, [`shape`] and [`budget`] how many fit, [`read`] fetches them ([`direct`]: what this machine lets us), [`slot`] says where
//! to, and [`sim`] plays that without a GPU.

pub mod budget;
pub mod direct;
pub mod read;
pub mod shape;
pub mod sim;
pub mod slot;
pub mod source;
