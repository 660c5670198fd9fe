//! Device memory that outlives a call: scratch of windows and hand-offs between them.

mod arena;

pub use arena::{Arena, Block, BlockSource, TICKET_BYTES};
