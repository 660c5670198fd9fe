//! Blocks of device memory that grow and never move. A captured CUDA graph may hold any address the arena ever gave out, so
//! blocks are freed only with the context they belong to.

/// Where blocks come from.
pub trait BlockSource {
    /// A new block of device memory, or why there is none.
    fn allocate(&self, bytes: usize) -> Result<usize, String>;
    /// Gives a block back.
    fn free(&self, address: usize);
}

/// Scratch memory of one context. Plans of a context run one after another on one stream, so all share the newest block.
#[derive(Debug, Default)]
pub struct Arena {
    blocks: Vec<(usize, usize)>,
}

/// Smallest block.
const MIN_BLOCK: usize = 1 << 20;

impl Arena {
    /// An address with `bytes` bytes behind it. Allocates when no block is large enough.
    pub fn reserve(&mut self, bytes: usize, source: &dyn BlockSource) -> Result<usize, String> {
        if bytes == 0 {
            return Ok(0);
        }
        if let Some(&(address, _)) = self.blocks.iter().rev().find(|&&(_, size)| size >= bytes) {
            return Ok(address);
        }
        let size = bytes.max(2 * self.blocks.last().map_or(0, |b| b.1)).max(MIN_BLOCK);
        let address = source.allocate(size)?;
        self.blocks.push((address, size));
        Ok(address)
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
        fn allocate(&self, bytes: usize) -> Result<usize, String> {
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
        let small = arena.reserve(100, &source).unwrap();
        let large = arena.reserve(8 << 20, &source).unwrap();
        assert_ne!(small, large);
        assert!(source.0.borrow().1.contains(&small), "a captured graph may still use it");
        assert_eq!(arena.reserve(100, &source).unwrap(), large);
    }

    #[test]
    fn growth_is_geometric() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        for megabytes in 1..200 {
            arena.reserve(megabytes << 20, &source).unwrap();
        }
        assert!(source.0.borrow().1.len() <= 9, "{} blocks", source.0.borrow().1.len());
        assert!(arena.bytes() <= 4 * (200 << 20));
    }

    #[test]
    fn a_refused_block_changes_nothing() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        arena.reserve(1, &source).unwrap();
        let before = arena.bytes();
        assert!(arena.reserve(2 << 30, &source).is_err());
        assert_eq!(arena.bytes(), before);
    }

    #[test]
    fn clear_gives_everything_back() {
        let (mut arena, source) = (Arena::default(), Fake::default());
        arena.reserve(5 << 20, &source).unwrap();
        arena.reserve(50 << 20, &source).unwrap();
        arena.clear(&source);
        assert!(source.0.borrow().1.is_empty());
        assert_eq!(arena.bytes(), 0);
    }
}
