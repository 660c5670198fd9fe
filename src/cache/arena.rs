//! Blocks of device memory that grow and never move. A captured CUDA graph may hold any address the arena ever gave out, so
//! blocks are freed only with the context they belong to.

/// Where blocks come from.
pub trait BlockSource {
    /// A new block of device memory, or why there is none. Its first `zeroed` bytes are set to zero on
    /// `stream`, the address of a `cudaStream_t`.
    fn allocate(&self, bytes: usize, zeroed: usize, stream: usize) -> Result<usize, String>;
    /// Gives a block back.
    fn free(&self, address: usize);
}

/// Where a plan's memory lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Block {
    /// [`TICKET_BYTES`] bytes of counters at rest.
    pub tickets: usize,
    /// The plan's own bytes.
    pub scratch: usize,
}

impl Block {
    fn at(address: usize) -> Block {
        Block {
            tickets: address,
            scratch: address + TICKET_BYTES,
        }
    }
}

/// Scratch memory of one context. Plans of a context run one after another on one stream, so all share the newest block.
#[derive(Debug, Default)]
pub struct Arena {
    blocks: Vec<(usize, usize)>,
}

/// Smallest block.
const MIN_BLOCK: usize = 1 << 20;

/// Bytes at the start of each block that are zero whenever no kernel runs: counters that every kernel leaves as it found them.
pub const TICKET_BYTES: usize = 1 << 16;

impl Arena {
    /// A block with `bytes` bytes behind its tickets. Allocates when no block is large enough.
    pub fn reserve(&mut self, bytes: usize, source: &dyn BlockSource, stream: usize) -> Result<Block, String> {
        if bytes == 0 {
            return Ok(Block { tickets: 0, scratch: 0 });
        }
        let bytes = bytes + TICKET_BYTES;
        if let Some(&(address, _)) = self.blocks.iter().rev().find(|&&(_, size)| size >= bytes) {
            return Ok(Block::at(address));
        }
        let size = bytes.max(2 * self.blocks.last().map_or(0, |b| b.1)).max(MIN_BLOCK);
        let address = source.allocate(size, TICKET_BYTES, stream)?;
        self.blocks.push((address, size));
        Ok(Block::at(address))
    }

    /// Bytes held.
    pub fn bytes(&self) -> usize {
        self.blocks.iter().map(|b| b.1).sum()
    }

    /// Gives every block back.
    pub fn clear(&mut self, source: &dyn BlockSource) {
        for (address, _) in self.blocks.drain(..) {
            source.free(address);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::RefCell;

    #[derive(Default)]
    struct Fake(RefCell<(usize, Vec<usize>)>);

    impl BlockSource for Fake {
        fn allocate(&self, bytes: usize, _zeroed: usize, _stream: usize) -> Result<usize, String> {
            let mut state = self.0.borrow_mut();
            if bytes > 1 << 30 {
                return Err("out of memory".into());
            }
            state.0 += 1 << 32;
            let address = state.0;
            state.1.push(address);
            Ok(address)
        }
        fn free(&self, address: usize) {
            self.0.borrow_mut().1.retain(|&a| a != address);
        }
    }

    #[test]
    fn earlier_addresses_stay_valid_while_the_arena_grows() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        let small = arena.reserve(100, &source, 0).unwrap();
        let large = arena.reserve(8 << 20, &source, 0).unwrap();
        assert_ne!(small, large);
        assert!(
            source.0.borrow().1.contains(&small.tickets),
            "a captured graph may still use it"
        );
        assert_eq!(arena.reserve(100, &source, 0).unwrap(), large);
    }

    #[test]
    fn growth_is_geometric() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        for megabytes in 1..200 {
            arena.reserve(megabytes << 20, &source, 0).unwrap();
        }
        assert!(source.0.borrow().1.len() <= 9, "{} blocks", source.0.borrow().1.len());
        assert!(arena.bytes() <= 4 * (200 << 20));
    }

    #[test]
    fn a_refused_block_changes_nothing() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        arena.reserve(1, &source, 0).unwrap();
        let before = arena.bytes();
        assert!(arena.reserve(2 << 30, &source, 0).is_err());
        assert_eq!(arena.bytes(), before);
    }

    #[test]
    fn clear_gives_everything_back() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        arena.reserve(5 << 20, &source, 0).unwrap();
        arena.reserve(50 << 20, &source, 0).unwrap();
        arena.clear(&source);
        assert!(source.0.borrow().1.is_empty());
        assert_eq!(arena.bytes(), 0);
    }
}
