//! Which expert lies in which slot, and which one goes when another must come. Logic only: nothing is copied here.
//!
//! What the running step uses is pinned until the next one begins, because the GPU may still read it. A slot that is being
//! filled is nobody's to take. There is one [`Slots`] for each layout of experts of a model on a device; it knows no other.

use std::collections::{BTreeMap, HashMap};

/// An expert of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[allow(missing_docs)]
pub struct Key {
    pub layer: u32,
    pub expert: u32,
}

/// Who goes first.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Whoever was used longest ago.
    Lru,
    /// LRU in two segments: an expert enters on probation, and decoding it again in a later step protects it. Prompts, which touch
    /// nearly every expert once, neither protect anybody nor take a protected one's slot.
    Segmented,
}

/// What a step does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A few tokens, whose experts are likely to be used again soon.
    Decode,
    /// A part of a prompt.
    Prefill,
}

/// Where a requested expert is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// There.
    Hit(usize),
    /// There as soon as the load that was begun earlier is over.
    Coming(usize),
    /// The caller fills this slot and says [`Slots::loaded`] or [`Slots::failed`].
    Load {
        /// The slot.
        slot: usize,
        /// Who was in it.
        evicted: Option<Key>,
    },
}

impl Grant {
    /// The slot.
    pub fn slot(self) -> usize {
        match self {
            Grant::Hit(slot) | Grant::Coming(slot) | Grant::Load { slot, .. } => slot,
        }
    }
}

/// Every slot that may be taken is pinned or being filled: the step must go on in a further wave.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("every slot is in use by the running step")]
pub struct Full;

/// Share of the slots that may be protected, in percent; the rest always takes newcomers.
const PROTECTED_PERCENT: usize = 80;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Segment {
    Probation,
    Protected,
}

#[derive(Debug, Clone, Copy)]
struct Resident {
    key: Key,
    segment: Segment,
    /// Place in its segment's order.
    stamp: u64,
    loading: bool,
    /// Wave that pinned it last.
    pinned: u64,
    /// Wave of its first request.
    since: u64,
}

/// The slots of one layout.
#[derive(Debug)]
pub struct Slots {
    policy: Policy,
    step: Step,
    wave: u64,
    clock: u64,
    residents: Vec<Option<Resident>>,
    places: HashMap<Key, usize>,
    free: Vec<usize>,
    /// Slots by age, the oldest first.
    probation: BTreeMap<u64, usize>,
    protected: BTreeMap<u64, usize>,
}

impl Slots {
    /// `number` empty slots. 0 is no number of slots: whoever plans them refuses that.
    pub fn new(number: usize, policy: Policy) -> Slots {
        assert!(number > 0, "a budget without a slot was to be refused");
        Slots {
            policy,
            step: Step::Decode,
            wave: 1,
            clock: 0,
            residents: vec![None; number],
            places: HashMap::new(),
            free: (0..number).rev().collect(),
            probation: BTreeMap::new(),
            protected: BTreeMap::new(),
        }
    }

    /// How many slots there are.
    pub fn number(&self) -> usize {
        self.residents.len()
    }

    /// Experts that are there or coming, with their slots.
    pub fn residents(&self) -> impl Iterator<Item = (Key, usize)> + '_ {
        self.places.iter().map(|(key, slot)| (*key, *slot))
    }

    /// Is the expert protected from prompts?
    pub fn is_protected(&self, key: Key) -> bool {
        let slot = self.places.get(&key);
        slot.and_then(|s| self.residents[*s])
            .is_some_and(|r| r.segment == Segment::Protected)
    }

    /// Begins a step, or a further wave of one: the GPU is done with what was pinned.
    pub fn begin(&mut self, step: Step) {
        self.step = step;
        self.wave += 1;
    }

    /// The running step uses this expert: pins it, and makes room if it is not there.
    pub fn request(&mut self, key: Key) -> Result<Grant, Full> {
        if let Some(&slot) = self.places.get(&key) {
            let resident = self.residents[slot].as_mut().expect("a place has a resident");
            resident.pinned = self.wave;
            let loading = resident.loading;
            self.used(slot);
            return Ok(if loading { Grant::Coming(slot) } else { Grant::Hit(slot) });
        }
        let (slot, evicted) = self.room(self.step == Step::Decode)?;
        self.settle(slot, key, self.wave);
        Ok(Grant::Load { slot, evicted })
    }

    /// A later step may use this expert: makes room if that costs nobody who is pinned or protected. `None`: it is there, or there
    /// is no such room.
    pub fn prefetch(&mut self, key: Key) -> Option<Grant> {
        if self.places.contains_key(&key) {
            return None;
        }
        let (slot, evicted) = self.room(false).ok()?;
        self.settle(slot, key, 0);
        Some(Grant::Load { slot, evicted })
    }

    /// The slot holds what it was given for.
    pub fn loaded(&mut self, slot: usize) {
        let resident = self.residents[slot].as_mut().expect("a slot that was granted");
        resident.loading = false;
    }

    /// It could not be filled: the slot is empty, and a later request tries again.
    pub fn failed(&mut self, slot: usize) {
        let resident = self.leave(slot);
        debug_assert!(resident.loading, "only a load fails");
        self.free.push(slot);
    }

    /// A free slot, else that of the oldest who may go.
    fn room(&mut self, from_protected: bool) -> Result<(usize, Option<Key>), Full> {
        if let Some(slot) = self.free.pop() {
            return Ok((slot, None));
        }
        let may_go = |slot: &&usize| {
            let resident = self.residents[**slot].as_ref().expect("in a segment");
            !resident.loading && resident.pinned != self.wave
        };
        let oldest = self.probation.values().find(may_go);
        let oldest = oldest.or_else(|| self.protected.values().filter(|_| from_protected).find(may_go));
        let slot = *oldest.ok_or(Full)?;
        Ok((slot, Some(self.leave(slot).key)))
    }

    fn settle(&mut self, slot: usize, key: Key, pinned: u64) {
        self.clock += 1;
        self.probation.insert(self.clock, slot);
        self.places.insert(key, slot);
        self.residents[slot] = Some(Resident {
            key,
            segment: Segment::Probation,
            stamp: self.clock,
            loading: true,
            pinned,
            since: self.wave,
        });
    }

    fn leave(&mut self, slot: usize) -> Resident {
        let resident = self.residents[slot].take().expect("somebody is there");
        self.places.remove(&resident.key);
        self.segment(resident.segment).remove(&resident.stamp);
        resident
    }

    fn segment(&mut self, segment: Segment) -> &mut BTreeMap<u64, usize> {
        match segment {
            Segment::Probation => &mut self.probation,
            Segment::Protected => &mut self.protected,
        }
    }

    /// Moves a slot to where its use puts it.
    fn used(&mut self, slot: usize) {
        let resident = self.residents[slot].expect("somebody is there");
        let to = match (self.policy, self.step) {
            (Policy::Lru, _) => Segment::Probation,
            // Once more in a prompt says nothing about the text to come.
            (Policy::Segmented, Step::Prefill) => return,
            (Policy::Segmented, Step::Decode) if resident.since == self.wave => resident.segment,
            (Policy::Segmented, Step::Decode) => Segment::Protected,
        };
        self.put(slot, to);
        let most = self.number() * PROTECTED_PERCENT / 100;
        if self.protected.len() > most {
            let oldest = *self.protected.values().next().expect("not empty");
            self.put(oldest, Segment::Probation);
        }
    }

    /// Makes a slot the youngest of a segment.
    fn put(&mut self, slot: usize, to: Segment) {
        self.clock += 1;
        let stamp = self.clock;
        let resident = self.residents[slot].as_mut().expect("somebody is there");
        let (from, old) = (resident.segment, resident.stamp);
        (resident.segment, resident.stamp) = (to, stamp);
        self.segment(from).remove(&old);
        self.segment(to).insert(stamp, slot);
    }
}
