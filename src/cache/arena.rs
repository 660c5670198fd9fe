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

/// Scratch memory of one context, within a limit. Plans of a context run one after another on one stream, so all share the newest
/// block.
#[derive(Debug)]
pub struct Arena {
    limit: usize,
    blocks: Vec<(usize, usize)>,
}

/// Smallest block, where the limit allows it.
const MIN_BLOCK: usize = 1 << 20;

/// Bytes at the start of each block that are zero whenever no kernel runs: counters that every kernel leaves as it found them.
pub const TICKET_BYTES: usize = 1 << 16;

impl Arena {
    /// An arena whose blocks together never exceed `limit` bytes.
    pub fn new(limit: usize) -> Arena {
        Arena {
            limit,
            blocks: Vec::new(),
        }
    }

    /// Bytes that a plan may ask for. Blocks have half the limit, a quarter and so on, each once at most: so whether a plan fits
    /// does not depend on which came before it.
    pub fn budget(&self) -> usize {
        (self.limit / 2).saturating_sub(TICKET_BYTES)
    }

    /// A block with `bytes` bytes behind its tickets. Allocates when no block is large enough.
    pub fn reserve(&mut self, bytes: usize, source: &dyn BlockSource, stream: usize) -> Result<Block, String> {
        if bytes == 0 {
            return Ok(Block { tickets: 0, scratch: 0 });
        }
        if bytes > self.budget() {
            return Err(format!("more than the limit of {} allows at a time", self.limit));
        }
        let bytes = bytes + TICKET_BYTES;
        if let Some(&(address, _)) = self.blocks.iter().rev().find(|&&(_, size)| size >= bytes) {
            return Ok(Block::at(address));
        }
        let mut size = self.limit / 2;
        while size / 2 >= bytes.max(MIN_BLOCK) {
            size /= 2;
        }
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

    const LIMIT: usize = 256 << 20;

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
        let (mut arena, source) = (Arena::new(LIMIT), Fake::default());
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
    fn blocks_together_stay_within_the_limit() {
        let (mut arena, source) = (Arena::new(LIMIT), Fake::default());
        let mut bytes = 1;
        while bytes < arena.budget() {
            arena.reserve(bytes, &source, 0).unwrap();
            bytes += 300 << 10;
        }
        arena.reserve(arena.budget(), &source, 0).unwrap();
        assert!(source.0.borrow().1.len() <= 9, "{} blocks", source.0.borrow().1.len());
        assert!(arena.bytes() <= LIMIT);
        assert!(arena.reserve(arena.budget() + 1, &source, 0).is_err());
    }

    #[test]
    fn what_fits_does_not_depend_on_what_came_before() {
        let source = Fake::default();
        for before in [0, 1 << 20, 5 << 20, 20 << 20, 100 << 20] {
            let mut arena = Arena::new(LIMIT);
            arena.reserve(before, &source, 0).unwrap();
            arena.reserve(arena.budget(), &source, 0).unwrap();
            assert!(arena.bytes() <= LIMIT, "{before}");
        }
    }

    #[test]
    fn a_small_limit_gives_small_blocks_and_none_gives_none() {
        let source = Fake::default();
        let mut arena = Arena::new(1 << 20);
        arena.reserve(1000, &source, 0).unwrap();
        assert_eq!(arena.bytes(), 1 << 19);
        let mut none = Arena::new(0);
        assert_eq!(none.budget(), 0);
        assert!(none.reserve(1, &source, 0).is_err());
        assert!(none.reserve(0, &source, 0).is_ok());
    }

    #[test]
    fn a_refused_block_changes_nothing() {
        let (mut arena, source) = (Arena::new(8 << 30), Fake::default());
        arena.reserve(1, &source, 0).unwrap();
        let before = arena.bytes();
        assert!(arena.reserve(2 << 30, &source, 0).is_err());
        assert_eq!(arena.bytes(), before);
    }

    #[test]
    fn clear_gives_everything_back() {
        let (mut arena, source) = (Arena::new(LIMIT), Fake::default());
        arena.reserve(5 << 20, &source, 0).unwrap();
        arena.reserve(50 << 20, &source, 0).unwrap();
        arena.clear(&source);
        assert!(source.0.borrow().1.is_empty());
        assert_eq!(arena.bytes(), 0);
    }
}
