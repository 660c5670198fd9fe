//! Slots of the streamer against a plain model of them, and the simulator that plays traces through them.

use ggml_flashrt::stream::sim::{play, Group, Head, Machine, Record, SimError, Synthetic, Trace, TRACE};
use ggml_flashrt::stream::slot::{Full, Grant, Key, Policy, Slots, Step};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

fn key(layer: u32, expert: u32) -> Key {
    Key { layer, expert }
}

/// Requests experts and fills what must be filled; how many were there.
fn use_all(slots: &mut Slots, step: Step, keys: impl IntoIterator<Item = Key>) -> usize {
    slots.begin(step);
    let mut hits = 0;
    for k in keys {
        match slots.request(k) {
            Ok(Grant::Hit(_)) => hits += 1,
            Ok(Grant::Load { slot, .. }) => slots.loaded(slot),
            Ok(Grant::Coming(_)) => panic!("everything was filled"),
            Err(Full) => {
                slots.begin(step);
                let grant = slots.request(k).expect("a wave has room");
                slots.loaded(grant.slot());
            }
        }
    }
    hits
}

fn decode_set() -> Vec<Key> {
    (0..4)
        .flat_map(|layer| (0..10).map(move |expert| key(layer, expert)))
        .collect()
}

/// B36: a long prefill evicted the decode set.
#[test]
fn a_long_prompt_does_not_flush_what_decoding_uses() {
    let after_a_prompt = |policy| {
        let mut slots = Slots::new(60, policy);
        for _ in 0..3 {
            use_all(&mut slots, Step::Decode, decode_set());
        }
        assert_eq!(use_all(&mut slots, Step::Decode, decode_set()), 40);
        for _ in 0..20 {
            use_all(
                &mut slots,
                Step::Prefill,
                (0..4).flat_map(|layer| (0..128).map(move |e| key(layer, e))),
            );
        }
        use_all(&mut slots, Step::Decode, decode_set())
    };
    assert_eq!(after_a_prompt(Policy::Segmented), 40);
    assert_eq!(after_a_prompt(Policy::Lru), 0, "which is why LRU alone will not do");
}

#[test]
fn a_set_that_is_not_used_any_more_goes() {
    let mut slots = Slots::new(60, Policy::Segmented);
    for _ in 0..3 {
        use_all(&mut slots, Step::Decode, decode_set());
    }
    let other: Vec<Key> = decode_set().iter().map(|k| key(k.layer, k.expert + 50)).collect();
    for _ in 0..4 {
        use_all(&mut slots, Step::Decode, other.clone());
    }
    assert_eq!(use_all(&mut slots, Step::Decode, other), 40);
}

#[test]
fn a_slot_that_is_being_filled_is_nobodys_to_take() {
    let mut slots = Slots::new(2, Policy::Lru);
    let first = slots.request(key(0, 0)).unwrap();
    assert_eq!(slots.request(key(0, 0)).unwrap(), Grant::Coming(first.slot()));
    slots.begin(Step::Decode);
    let second = slots.request(key(0, 1)).unwrap();
    assert_eq!(slots.request(key(0, 2)), Err(Full), "one is coming, one is pinned");
    slots.loaded(first.slot());
    assert_eq!(
        slots.request(key(0, 2)).unwrap(),
        Grant::Load {
            slot: first.slot(),
            evicted: Some(key(0, 0))
        }
    );
    // A load that failed leaves an empty slot, and the next request loads again.
    slots.failed(second.slot());
    let again = slots.request(key(0, 1)).unwrap();
    assert_eq!(
        again,
        Grant::Load {
            slot: second.slot(),
            evicted: None
        }
    );
}

#[test]
fn prefetching_takes_no_slot_that_is_pinned_or_protected() {
    let mut slots = Slots::new(10, Policy::Segmented);
    let set: Vec<Key> = (0..8).map(|e| key(0, e)).collect();
    use_all(&mut slots, Step::Decode, set.clone());
    use_all(&mut slots, Step::Decode, set.clone());
    assert!(set.iter().all(|k| slots.is_protected(*k)));
    slots.begin(Step::Decode);
    let mut coming = BTreeSet::new();
    for e in 100..110 {
        if let Some(Grant::Load { slot, evicted }) = slots.prefetch(key(0, e)) {
            assert_eq!(evicted, None);
            coming.insert(slot);
        }
    }
    assert_eq!(coming.len(), 2, "the two that nobody has");
    assert_eq!(slots.prefetch(key(0, 3)), None, "it is there");
    assert_eq!(use_all(&mut slots, Step::Decode, set), 8);
}

/// Tokens of one step that share an expert are one use of it.
#[test]
fn only_a_later_step_protects() {
    let mut slots = Slots::new(10, Policy::Segmented);
    let twice = [key(0, 1), key(0, 1)];
    use_all(&mut slots, Step::Decode, twice);
    assert!(!slots.is_protected(key(0, 1)));
    use_all(&mut slots, Step::Prefill, twice);
    assert!(!slots.is_protected(key(0, 1)), "a prompt does not");
    use_all(&mut slots, Step::Decode, twice);
    assert!(slots.is_protected(key(0, 1)));
}

/// LRU as it is defined: a list of keys, the last used at its end.
#[derive(Default)]
struct Plain {
    order: Vec<Key>,
    pinned: BTreeSet<Key>,
}

impl Plain {
    /// Whether it was there, and who went.
    fn request(&mut self, k: Key, number: usize) -> Result<(bool, Option<Key>), Full> {
        let there = self.order.contains(&k);
        let mut gone = None;
        if !there && self.order.len() == number {
            let at = self.order.iter().position(|o| !self.pinned.contains(o)).ok_or(Full)?;
            gone = Some(self.order.remove(at));
        }
        self.order.retain(|o| *o != k);
        self.order.push(k);
        self.pinned.insert(k);
        Ok((there, gone))
    }
}

/// What is done to the slots.
#[derive(Debug, Clone)]
enum Act {
    Begin(bool),
    Request(u32, u32),
    Prefetch(u32, u32),
    Finish(bool),
}

fn acts() -> impl Strategy<Value = Vec<Act>> {
    let act = prop_oneof![
        2 => any::<bool>().prop_map(Act::Begin),
        8 => (0u32..3, 0u32..12).prop_map(|(l, e)| Act::Request(l, e)),
        2 => (0u32..3, 0u32..12).prop_map(|(l, e)| Act::Prefetch(l, e)),
        4 => any::<bool>().prop_map(Act::Finish),
    ];
    proptest::collection::vec(act, 0..200)
}

proptest! {
    #[test]
    fn lru_is_lru(number in 1usize..20, requests in proptest::collection::vec((any::<bool>(), 0u32..3, 0u32..12), 0..200)) {
        let mut slots = Slots::new(number, Policy::Lru);
        let mut plain = Plain::default();
        for (begin, layer, expert) in requests {
            if begin {
                slots.begin(Step::Decode);
                plain.pinned.clear();
            }
            let k = key(layer, expert);
            let got = slots.request(k).map(|grant| match grant {
                Grant::Load { slot, evicted } => {
                    slots.loaded(slot);
                    (false, evicted)
                }
                _ => (true, None),
            });
            prop_assert_eq!(got, plain.request(k, number));
        }
    }

    /// Whatever happens, in whatever order: an expert is in one slot, a slot has one expert, and nobody goes who is pinned, being
    /// filled, or protected from what is running.
    #[test]
    fn nobody_is_taken_out_of_use(number in 1usize..20, segmented: bool, acts in acts()) {
        let policy = if segmented { Policy::Segmented } else { Policy::Lru };
        let mut slots = Slots::new(number, policy);
        let mut step = Step::Decode;
        let mut pinned = BTreeSet::new();
        // What we know of every slot: its expert, and whether it is being filled.
        let mut known: BTreeMap<usize, (Key, bool)> = BTreeMap::new();
        for act in acts {
            let protected: BTreeSet<Key> = known.values().map(|(k, _)| *k).filter(|k| slots.is_protected(*k)).collect();
            prop_assert!(protected.len() <= number * 80 / 100);
            let (grant, k, demand) = match act {
                Act::Begin(decode) => {
                    step = if decode { Step::Decode } else { Step::Prefill };
                    slots.begin(step);
                    pinned.clear();
                    continue;
                }
                Act::Finish(well) => {
                    if let Some((&slot, &(k, _))) = known.iter().find(|(_, (_, loading))| *loading) {
                        if well {
                            slots.loaded(slot);
                            known.insert(slot, (k, false));
                        } else {
                            slots.failed(slot);
                            known.remove(&slot);
                            pinned.remove(&k);
                        }
                    }
                    continue;
                }
                Act::Request(l, e) => match slots.request(key(l, e)) {
                    Ok(grant) => (grant, key(l, e), true),
                    Err(Full) => {
                        let may_go = |(k, loading): &(Key, bool)| {
                            !loading && !pinned.contains(k) && (step == Step::Decode || !protected.contains(k))
                        };
                        prop_assert!(known.len() == number && !known.values().any(may_go));
                        continue;
                    }
                },
                Act::Prefetch(l, e) => match slots.prefetch(key(l, e)) {
                    Some(grant) => (grant, key(l, e), false),
                    None => continue,
                },
            };
            match grant {
                Grant::Hit(slot) => prop_assert_eq!(known.get(&slot), Some(&(k, false))),
                Grant::Coming(slot) => prop_assert_eq!(known.get(&slot), Some(&(k, true))),
                Grant::Load { slot, evicted } => {
                    prop_assert!(slot < number && known.values().all(|(there, _)| *there != k));
                    let before = known.insert(slot, (k, true));
                    prop_assert_eq!(before.map(|b| b.0), evicted);
                    if let Some((gone, loading)) = before {
                        prop_assert!(!loading && !pinned.contains(&gone));
                        prop_assert!((demand && step == Step::Decode) || !protected.contains(&gone));
                    }
                }
            }
            if demand {
                pinned.insert(k);
            }
            let mut there: Vec<_> = slots.residents().collect();
            let mut ours: Vec<_> = known.iter().map(|(slot, (k, _))| (*k, *slot)).collect();
            there.sort_unstable();
            ours.sort_unstable();
            prop_assert_eq!(there, ours);
        }
    }

    /// With one wave after another a prompt gets through any number of slots.
    #[test]
    fn a_prompt_gets_through_in_waves(number in 1usize..40, segmented: bool, experts in 1u32..200) {
        let policy = if segmented { Policy::Segmented } else { Policy::Lru };
        let mut slots = Slots::new(number, policy);
        for _ in 0..3 {
            use_all(&mut slots, Step::Decode, (0..number as u32).map(|e| key(0, e)));
        }
        use_all(&mut slots, Step::Prefill, (0..experts).map(|e| key(1, e)));
    }
}

// ---- the simulator

const MACHINE: Machine = Machine {
    bytes_per_second: 1e9,
    latency_seconds: 1e-3,
    step_seconds: 0.01,
};

fn one_group(trace: &Trace, slots: usize) -> Vec<Group> {
    vec![Group {
        layers: (0..trace.head.layers).collect(),
        bytes: 1_000_000,
        slots,
    }]
}

/// By hand: two layers, three tokens, two experts each.
#[test]
fn a_short_trace_gives_what_a_pencil_gives() {
    let token = |a: [u32; 2], b: [u32; 2]| Record {
        prompt: 0,
        experts: vec![a.to_vec(), b.to_vec()],
    };
    let trace = Trace {
        head: Head {
            trace: TRACE,
            layers: 2,
            experts: 4,
            used: 2,
            source: "by hand".into(),
        },
        steps: vec![token([0, 1], [2, 3]), token([0, 1], [2, 0]), token([3, 1], [2, 3])],
    };
    // Five slots. The first token loads 4 experts; the second expert 0 of layer 1, into the fifth; the third expert 3 of layer 0,
    // in place of the one used longest ago, 3 of layer 1, which it then wants again.
    let out = play(&trace, &one_group(&trace, 5), Policy::Lru, &MACHINE, 0).unwrap();
    assert_eq!((out.tokens, out.uses, out.hits, out.bytes), (3, 12, 5, 7_000_000));
    // Misses in 2 + 1 + 2 layers: their latencies, and a millisecond for each expert.
    let seconds = 3.0 * 0.01 + 5.0 * 1e-3 + 7.0 * 1e-3;
    assert!((out.seconds - seconds).abs() < 1e-12, "{}", out.seconds);
    // Without the first token: it always misses.
    let warm = play(&trace, &one_group(&trace, 5), Policy::Lru, &MACHINE, 1).unwrap();
    assert_eq!((warm.tokens, warm.hits), (2, 5));
    let refused = play(&trace, &one_group(&trace, 3), Policy::Lru, &MACHINE, 0);
    assert!(matches!(refused, Err(SimError::Slots { slots: 3, needed: 4 })));
}

/// The public figures that the defaults are fitted to.
#[test]
fn the_synthetic_router_is_as_local_as_real_ones_are_said_to_be() {
    let made = Synthetic {
        layers: 4,
        experts: 512,
        used: 10,
        tokens: 6000,
        ..Synthetic::default()
    };
    let trace = made.trace().unwrap();
    let hit_rate = |a_layer: usize| {
        // One group a layer: the figures are for an LRU of each.
        let groups: Vec<Group> = (0..4)
            .map(|layer| Group {
                layers: vec![layer],
                bytes: 1,
                slots: a_layer,
            })
            .collect();
        play(&trace, &groups, Policy::Lru, &MACHINE, 200).unwrap().hit_rate()
    };
    let (small, large) = (hit_rate(64), hit_rate(128));
    assert!((small - 0.67).abs() < 0.01, "64 a layer: {small}");
    assert!((large - 0.81).abs() < 0.01, "128 a layer: {large}");
    let mut counts = vec![0u32; 512];
    trace
        .steps
        .iter()
        .flat_map(|s| &s.experts[0])
        .for_each(|e| counts[*e as usize] += 1);
    counts.sort_unstable_by(|a, b| b.cmp(a));
    let top = f64::from(counts[..32].iter().sum::<u32>()) / f64::from(counts.iter().sum::<u32>());
    assert!((0.07..0.12).contains(&top), "the 32 most frequent take {top}");
}

#[test]
fn more_slots_never_hurt_lru_and_all_of_them_never_miss() {
    let trace = Synthetic {
        layers: 6,
        experts: 32,
        used: 4,
        tokens: 200,
        ..Synthetic::default()
    }
    .trace()
    .unwrap();
    let rate = |slots| play(&trace, &one_group(&trace, slots), Policy::Lru, &MACHINE, 0).unwrap();
    let rates: Vec<f64> = [24, 48, 96, 144, 192].map(|n| rate(n).hit_rate()).to_vec();
    assert!(rates.windows(2).all(|w| w[0] <= w[1]), "{rates:?}");
    let all = play(&trace, &one_group(&trace, 192), Policy::Lru, &MACHINE, 190).unwrap();
    assert_eq!((all.hit_rate(), all.bytes), (1.0, 0));
    assert!((all.tokens_per_second() - 1.0 / MACHINE.step_seconds).abs() < 1e-6);
}

/// B36 once more, as the simulator shows it: the first tokens after a prompt.
#[test]
fn decoding_after_a_prompt_hits_as_before_it() {
    let made = Synthetic {
        layers: 4,
        experts: 64,
        used: 4,
        tokens: 370,
        reach: 3.0,
        tail: 1.5,
        ..Synthetic::default()
    };
    let quiet = made.trace().unwrap();
    let prompt = Record {
        prompt: 2048,
        experts: vec![(0..64).collect(); 4],
    };
    let mut interrupted = quiet.clone();
    interrupted.steps.insert(350, prompt);
    // Misses of the 20 tokens from there on.
    let misses = |trace: &Trace, policy| {
        let out = play(trace, &one_group(trace, 64), policy, &MACHINE, 350).unwrap();
        (out.uses - out.hits, out.waves)
    };
    let ((before, none), (after, waves)) = (
        misses(&quiet, Policy::Segmented),
        misses(&interrupted, Policy::Segmented),
    );
    let (flushed, _) = misses(&interrupted, Policy::Lru);
    assert!(none == 0 && waves > 0);
    assert!(after <= before + before / 5, "{before} {after}");
    assert!(flushed > after + after / 5, "{after} {flushed}");
}

#[test]
fn traces_are_read_as_they_are_written_and_broken_ones_are_named() {
    let trace = Synthetic {
        layers: 3,
        experts: 16,
        used: 2,
        prompt: 100,
        tokens: 5,
        ..Synthetic::default()
    }
    .trace()
    .unwrap();
    let mut text = Vec::new();
    trace.write(&mut text).unwrap();
    assert_eq!(Trace::read(text.as_slice()).unwrap(), trace);
    assert_eq!(trace.steps[0].prompt, 100);

    let head = r#"{"trace":1,"layers":1,"experts":4,"used":2,"source":"x"}"#;
    for (line, why) in [
        (r#"{"experts":[[0,1],[0]]}"#, "2 layers of 1"),
        (r#"{"experts":[[0,4]]}"#, "[0, 4]"),
        (r#"{"experts":[[1,1]]}"#, "[1, 1]"),
        (r#"{"experts":[[0,1,2]]}"#, "[0, 1, 2]"),
        ("{", "line 2"),
    ] {
        let error = Trace::read(format!("{head}\n{line}\n").as_bytes())
            .unwrap_err()
            .to_string();
        assert!(error.contains(why) && error.starts_with("line 2"), "{error}");
    }
    let of = |text: &str| Trace::read(text.as_bytes()).unwrap_err().to_string();
    assert!(of(&head.replace("\"trace\":1", "\"trace\":2")).contains("version 2"));
    assert!(of(&head.replace("\"used\":2", "\"used\":5")).contains("5 of 4 experts"));
    assert!(of(head).contains("no step") && of("").contains("no step"));
}
