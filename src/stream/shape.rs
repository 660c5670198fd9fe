//! What a model's metadata say about the memory it takes besides its weights.
//!
//! Where metadata leave something open the larger reading is taken, and what cannot be sized at all is an error: a budget that
//! is too large by a little costs a few slots, one that is too small costs the run.

use crate::gguf::{Gguf, Value};
use crate::graph::DType;

/// Why a model's memory cannot be sized.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[allow(missing_docs)] // the messages say it
pub enum ShapeError {
    #[error("the model does not say {0}")]
    Missing(String),
    #[error("{key} has {found} entries for {layers} layers")]
    Entries { key: String, found: usize, layers: u64 },
    #[error("{0} is not of this world")]
    Range(String),
    #[error(
        "{arch} keeps state beside its KV cache ({key}), whose size this version does not know: state it with --state"
    )]
    State { arch: String, key: String },
    #[error("rows of {row} values cannot be kept as {ty}")]
    CacheType { row: u64, ty: &'static str },
}

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Shape {
    /// Architecture.
    pub arch: String,
    /// Layers, with those that only predict.
    pub layers: Vec<Layer>,
    /// Width of the hidden state.
    pub embd: u64,
    /// Entries of the vocabulary.
    pub vocab: u64,
    /// Query heads, the most of any layer.
    pub heads: u64,
    /// Width of a key, the most of any layer.
    pub head_k: u64,
    /// Inner width of a dense feed-forward, the most of any layer; 0: none.
    pub ff: u64,
    /// Inner width of an expert; 0: no experts.
    pub ff_expert: u64,
    /// Routed experts of a layer; 0: none.
    pub experts: u64,
    /// Of them, how many a token uses, the most of any layer.
    pub experts_used: u64,
    /// Tokens that a layer with a sliding window sees.
    pub window: u64,
    /// Metadata key of a state beside the KV cache.
    pub state: Option<String>,
}

/// What a layer keeps of each token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layer {
    /// Values of all keys.
    pub k: u64,
    /// Values of all values; 0 where keys serve as both.
    pub v: u64,
    /// Does it see only the last [`Shape::window`] tokens?
    pub sliding: bool,
}

/// Architectures whose windows llama.cpp knows without metadata: every so many layers one sees everything, the last of them or
/// the first.
const PATTERNS: [(&str, u64, bool); 11] = [
    ("afmoe", 4, false),
    ("cohere2", 4, false),
    ("cohere2moe", 4, true),
    ("exaone-moe", 4, false),
    ("exaone4", 4, false),
    ("gemma2", 2, false),
    ("gemma3", 6, false),
    ("gemma3n", 5, false),
    ("gpt-oss", 2, false),
    ("olmo2", 4, false),
    ("smallthinker", 4, true),
];

/// Beginnings of keys, after the architecture's name, that speak of state beside the KV cache.
const STATES: [&str; 7] = [
    "ssm.",
    "wkv.",
    "rwkv.",
    "shortconv.",
    "kda.",
    "attention.indexer.",
    "linear_attention.",
];

/// No model has more layers; a broken header is not to make us allocate.
const MAX_LAYERS: u64 = 4096;
/// Nor more experts in a layer.
const MAX_EXPERTS: u64 = 1 << 20;

impl Shape {
    /// Reads a header's metadata.
    pub fn of(header: &Gguf) -> Result<Shape, ShapeError> {
        let arch = header
            .architecture()
            .ok_or_else(|| ShapeError::Missing("general.architecture".into()))?;
        let key = |name: &str| format!("{arch}.{name}");
        let get = |name: &str| header.get(&key(name)).and_then(Value::as_u64);
        let need = |name: &str| get(name).ok_or_else(|| ShapeError::Missing(key(name)));
        let n = need("block_count")?;
        if n == 0 || n > MAX_LAYERS {
            return Err(ShapeError::Range(key("block_count")));
        }
        // A number for all layers, or one for each.
        let each = |name: &str| -> Result<Option<Vec<u64>>, ShapeError> {
            let Some(value) = header.get(&key(name)) else {
                return Ok(None);
            };
            let list = match value.as_u64() {
                Some(all) => vec![all; n as usize],
                None => value.as_u64s().ok_or_else(|| ShapeError::Range(key(name)))?,
            };
            if list.len() < n as usize {
                return Err(ShapeError::Entries {
                    key: key(name),
                    found: list.len(),
                    layers: n,
                });
            }
            Ok(Some(list))
        };
        let most = |list: &Option<Vec<u64>>| list.iter().flatten().copied().max().unwrap_or(0);
        let embd = need("embedding_length")?;
        let heads = each("attention.head_count")?.ok_or_else(|| ShapeError::Missing(key("attention.head_count")))?;
        let kv_heads = each("attention.head_count_kv")?.unwrap_or_else(|| heads.clone());
        let most_heads = heads.iter().copied().max().unwrap_or(0);
        let default = embd.checked_div(most_heads).unwrap_or(0);
        let head_k = get("attention.key_length").unwrap_or(default);
        let head_v = get("attention.value_length").unwrap_or(default);
        // Layers with a window may have heads of another width.
        let wide = |name: &str, full: u64| get(name).unwrap_or(full);
        let (swa_k, swa_v) = (
            wide("attention.key_length_swa", head_k),
            wide("attention.value_length_swa", head_v),
        );
        // Latent attention keeps one vector for keys and values.
        let latent = get("attention.key_length_mla").is_some_and(|n| n > 0);
        let window = get("attention.sliding_window").unwrap_or(0);
        let sliding = sliding(header, arch, n, window);
        let layers = kv_heads.iter().zip(&sliding).map(|(&kv, &sliding)| {
            let (k, v) = if sliding { (swa_k, swa_v) } else { (head_k, head_v) };
            let product = |width: u64| {
                kv.checked_mul(width)
                    .ok_or_else(|| ShapeError::Range("a head's width".into()))
            };
            Ok(Layer {
                k: product(k)?,
                v: if latent { 0 } else { product(v)? },
                sliding,
            })
        });
        let layers = layers.collect::<Result<_, ShapeError>>()?;
        let vocab = get("vocab_size").or_else(|| {
            let tokens = header.get("tokenizer.ggml.tokens").and_then(Value::array_len);
            tokens.map(|n| n as u64)
        });
        let embeddings = header.tensor("token_embd.weight").and_then(|t| t.dims.get(1).copied());
        let vocab = embeddings
            .max(vocab)
            .ok_or_else(|| ShapeError::Missing("the size of its vocabulary".into()))?;
        let state = STATES.iter().find_map(|prefix| {
            let wanted = key(prefix);
            let mut keys = header.metadata.iter().map(|(k, _)| k);
            keys.find(|k| k.starts_with(&wanted)).cloned()
        });
        let experts = most(&each("expert_count")?);
        if experts > MAX_EXPERTS {
            return Err(ShapeError::Range(key("expert_count")));
        }
        Ok(Shape {
            arch: arch.to_owned(),
            layers,
            embd,
            vocab,
            heads: most_heads,
            head_k: head_k.max(swa_k),
            ff: most(&each("feed_forward_length")?),
            ff_expert: most(&each("expert_feed_forward_length")?),
            experts,
            experts_used: most(&each("expert_used_count")?),
            window,
            state,
        })
    }

    /// Bytes of the KV cache. llama.cpp rounds contexts up to 256 cells, gives each sequence a part of them, and layers with a
    /// window no more than window and ubatch need.
    pub fn kv_bytes(&self, cache: &Cache) -> Result<u64, ShapeError> {
        let overflow = || ShapeError::Range("the KV cache's size".into());
        let sequences = cache.sequences.max(1);
        let cells = cache
            .context
            .div_ceil(sequences)
            .checked_next_multiple_of(256)
            .ok_or_else(overflow)?;
        let seen = self.window.checked_add(cache.ubatch).ok_or_else(overflow)?;
        let windowed = cells.min(seen.checked_next_multiple_of(256).ok_or_else(overflow)?);
        let mut total = 0u64;
        for layer in &self.layers {
            let row = |values: u64, ty: DType| {
                ty.row_bytes(values).ok_or(ShapeError::CacheType {
                    row: values,
                    ty: ty.name(),
                })
            };
            let (k, v) = (row(layer.k, cache.type_k)?, row(layer.v, cache.type_v)?);
            let token = k.checked_add(v).ok_or_else(overflow)?;
            let kept = if layer.sliding { windowed } else { cells };
            let bytes = kept.checked_mul(sequences).and_then(|n| n.checked_mul(token));
            total = bytes.and_then(|b| total.checked_add(b)).ok_or_else(overflow)?;
        }
        Ok(total)
    }

    /// Bytes of the tensors that live at the same time while a ubatch is computed: the largest of three moments, counted no
    /// smaller than llama.cpp's allocator was seen to need (`tests/stream_budget.rs` has its figures).
    pub fn transient_bytes(&self, cache: &Cache) -> Result<u64, ShapeError> {
        let overflow = || ShapeError::Range("the size of a ubatch's tensors".into());
        let sum = |terms: &[(u64, u64)]| {
            let products = terms.iter().map(|(a, b)| u128::from(*a) * u128::from(*b));
            products.sum::<u128>()
        };
        // Values of a token: the last hidden state, its norm, and the logits, which are reserved for every token.
        let output = sum(&[(1, self.vocab), (2, self.embd)]);
        // Q, K, V and the result, residual and norm beside them; without flash attention also all products of Q and K.
        let kept = u128::from(cache.context.checked_next_multiple_of(256).ok_or_else(overflow)?);
        let wide = 4 * sum(&[(self.heads, self.head_k), (1, self.embd)]);
        let scores = if cache.flash_attention {
            0
        } else {
            kept * u128::from(self.heads)
        };
        // The mask, one for layers with a window and one for the others: 2 bytes a cell, or 4.
        let masks = if self.layers.iter().any(|l| l.sliding) { 2 } else { 1 };
        let mask = if cache.flash_attention { kept.div_ceil(2) } else { kept } * masks;
        let attention = wide + scores + mask;
        // Gate, up, their product, and the results of the experts before they are summed.
        let experts = sum(&[
            (3 * self.experts_used.min(self.experts), self.ff_expert),
            (2 * self.experts_used.min(self.experts), self.embd),
            (3, self.experts),
            (3, self.embd),
        ]);
        let dense = sum(&[(3, self.ff), (3, self.embd)]);
        // Token numbers, positions, rows of the outputs.
        let inputs = 16;
        let values = inputs + output.max(attention).max(experts + mask).max(dense + mask);
        let bytes = values.checked_mul(4).and_then(|v| v.checked_mul(cache.ubatch.into()));
        bytes.and_then(|b| u64::try_from(b).ok()).ok_or_else(overflow)
    }
}

/// How a context is set up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cache {
    /// Tokens of all sequences together.
    pub context: u64,
    /// Sequences at the same time.
    pub sequences: u64,
    /// Tokens that are computed at once.
    pub ubatch: u64,
    /// Type of keys.
    pub type_k: DType,
    /// Type of values.
    pub type_v: DType,
    /// Is flash attention on?
    pub flash_attention: bool,
}

/// Which layers have a window. Unknown: none, which is the larger cache.
fn sliding(header: &Gguf, arch: &str, layers: u64, window: u64) -> Vec<bool> {
    let all = |f: &dyn Fn(u64) -> bool| (0..layers).map(f).collect::<Vec<bool>>();
    if window == 0 {
        return all(&|_| false);
    }
    let pattern = header.get(&format!("{arch}.attention.sliding_window_pattern"));
    if let Some(list) = pattern.and_then(Value::as_u64s) {
        return all(&|i| list.get(i as usize).is_some_and(|flag| *flag != 0));
    }
    let known = PATTERNS.iter().find(|(name, ..)| *name == arch);
    let Some((_, period, dense_first)) = known else {
        return all(&|_| false);
    };
    let period = pattern.and_then(Value::as_u64).unwrap_or(*period);
    match (period, dense_first) {
        (0, _) => all(&|_| true),
        (n, true) => all(&|i| i % n != 0),
        (n, false) => all(&|i| i % n < n - 1),
    }
}
