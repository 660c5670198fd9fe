//! Shapes and metadata of the models that `synth` knows.

use ggml_flashrt::gguf::Writer;

/// A model whose shapes are known.
#[derive(Clone, Copy, Debug, PartialEq, clap::ValueEnum)]
pub enum Kind {
    /// Gemma 3 270M.
    #[value(name = "gemma3-270m")]
    Gemma3_270m,
    /// Gemma 3 1B.
    #[value(name = "gemma3-1b")]
    Gemma3_1b,
    /// Gemma 2B (the first generation).
    #[value(name = "gemma-2b")]
    Gemma2b,
    /// Llama 3.1 8B.
    #[value(name = "llama-8b")]
    Llama8b,
    /// Qwen3 4B.
    #[value(name = "qwen3-4b")]
    Qwen3_4b,
    /// Qwen3 8B.
    #[value(name = "qwen3-8b")]
    Qwen3_8b,
    /// Qwen3 30B-A3B: 128 experts, 8 of them used.
    #[value(name = "qwen3-moe")]
    Qwen3Moe,
}

/// Everything that shapes a model.
#[derive(Clone, Copy)]
pub struct Model {
    name: &'static str,
    /// llama.cpp's name of the architecture.
    pub arch: &'static str,
    /// Layers of the real model.
    pub layers: u32,
    embd: u64,
    heads: u64,
    kv_heads: u64,
    head_dim: u64,
    ff: u64,
    vocab: u64,
    context: u32,
    eps: f32,
    rope_base: f32,
    sliding_window: Option<u32>,
    /// The output matrix is the embedding matrix.
    tied: bool,
    /// Q and K are normalised per head.
    qk_norm: bool,
    /// Attention and feed-forward results are normalised before they are added.
    post_norm: bool,
    /// Llama 3.1's frequency factors.
    rope_factors: bool,
    experts: Option<Experts>,
}

#[derive(Clone, Copy)]
struct Experts {
    count: u64,
    used: u32,
    ff: u64,
}

/// A tensor to write.
pub struct Tensor {
    /// Its name in the file.
    pub name: String,
    /// Extents, fastest first.
    pub dims: Vec<u64>,
    /// Layer it belongs to; 0 outside of layers.
    pub layer: u32,
    /// Multiplies the last hidden state.
    pub is_output: bool,
    /// One that mixes store with more bits in some layers.
    pub more_bits: bool,
    /// Never quantised.
    pub keep_f32: bool,
    /// What to fill it with.
    pub fill: Fill,
}

/// Distribution of a tensor's values.
#[derive(Clone, Copy, PartialEq)]
pub enum Fill {
    /// Zero mean, variance 1 / row length, so that activations keep their size from layer to layer.
    Matrix,
    /// Close to 1, as norm weights are.
    Norm,
    /// Frequency factors as Llama 3.1 defines them.
    RopeFactors,
}

impl Kind {
    /// The model's shapes.
    pub fn model(self) -> Model {
        let gemma3 = Model {
            name: "gemma3-270m",
            arch: "gemma3",
            layers: 18,
            embd: 640,
            heads: 4,
            kv_heads: 1,
            head_dim: 256,
            ff: 2048,
            vocab: 262_144,
            context: 32_768,
            eps: 1e-6,
            rope_base: 1e6,
            sliding_window: Some(512),
            tied: true,
            qk_norm: true,
            post_norm: true,
            rope_factors: false,
            experts: None,
        };
        let qwen3 = Model {
            name: "qwen3-8b",
            arch: "qwen3",
            layers: 36,
            embd: 4096,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            ff: 12_288,
            vocab: 151_936,
            context: 40_960,
            sliding_window: None,
            tied: false,
            post_norm: false,
            ..gemma3
        };
        match self {
            Kind::Gemma3_270m => gemma3,
            Kind::Gemma3_1b => Model {
                name: "gemma3-1b",
                layers: 26,
                embd: 1152,
                ff: 6912,
                sliding_window: Some(512),
                ..gemma3
            },
            Kind::Gemma2b => Model {
                name: "gemma-2b",
                arch: "gemma",
                embd: 2048,
                heads: 8,
                ff: 16_384,
                vocab: 256_000,
                context: 8192,
                rope_base: 1e4,
                sliding_window: None,
                qk_norm: false,
                post_norm: false,
                ..gemma3
            },
            Kind::Llama8b => Model {
                name: "llama-8b",
                arch: "llama",
                layers: 32,
                ff: 14_336,
                vocab: 128_256,
                context: 131_072,
                eps: 1e-5,
                rope_base: 5e5,
                qk_norm: false,
                rope_factors: true,
                ..qwen3
            },
            Kind::Qwen3_4b => Model {
                name: "qwen3-4b",
                embd: 2560,
                ff: 9728,
                tied: true,
                ..qwen3
            },
            Kind::Qwen3_8b => qwen3,
            Kind::Qwen3Moe => Model {
                name: "qwen3-moe",
                arch: "qwen3moe",
                layers: 48,
                embd: 2048,
                kv_heads: 4,
                ff: 6144,
                experts: Some(Experts {
                    count: 128,
                    used: 8,
                    ff: 768,
                }),
                ..qwen3
            },
        }
    }
}

impl Model {
    /// All tensors in the order in which converters write them.
    pub fn tensors(&self, layers: u32) -> Vec<Tensor> {
        let matrix = |layer: Option<u32>, name: &str, dims: &[u64]| Tensor {
            name: match layer {
                Some(layer) => format!("blk.{layer}.{name}.weight"),
                None => format!("{name}.weight"),
            },
            dims: dims.to_vec(),
            layer: layer.unwrap_or(0),
            is_output: name == "output" || (name == "token_embd" && self.tied),
            more_bits: matches!(name, "attn_v" | "ffn_down" | "ffn_down_exps"),
            keep_f32: name == "ffn_gate_inp",
            fill: Fill::Matrix,
        };
        let norm = |layer: Option<u32>, name: &str, n: u64| Tensor {
            fill: Fill::Norm,
            ..matrix(layer, name, &[n])
        };

        let mut out = vec![matrix(None, "token_embd", &[self.embd, self.vocab])];
        for i in (0..layers).map(Some) {
            let (q, kv) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
            out.push(norm(i, "attn_norm", self.embd));
            out.push(matrix(i, "attn_q", &[self.embd, q]));
            out.push(matrix(i, "attn_k", &[self.embd, kv]));
            out.push(matrix(i, "attn_v", &[self.embd, kv]));
            out.push(matrix(i, "attn_output", &[q, self.embd]));
            if self.qk_norm {
                out.push(norm(i, "attn_q_norm", self.head_dim));
                out.push(norm(i, "attn_k_norm", self.head_dim));
            }
            if self.post_norm {
                out.push(norm(i, "post_attention_norm", self.embd));
            }
            out.push(norm(i, "ffn_norm", self.embd));
            match &self.experts {
                None => {
                    out.push(matrix(i, "ffn_gate", &[self.embd, self.ff]));
                    out.push(matrix(i, "ffn_up", &[self.embd, self.ff]));
                    out.push(matrix(i, "ffn_down", &[self.ff, self.embd]));
                }
                Some(e) => {
                    out.push(matrix(i, "ffn_gate_inp", &[self.embd, e.count]));
                    out.push(matrix(i, "ffn_gate_exps", &[self.embd, e.ff, e.count]));
                    out.push(matrix(i, "ffn_up_exps", &[self.embd, e.ff, e.count]));
                    out.push(matrix(i, "ffn_down_exps", &[e.ff, self.embd, e.count]));
                }
            }
            if self.post_norm {
                out.push(norm(i, "post_ffw_norm", self.embd));
            }
        }
        out.push(norm(None, "output_norm", self.embd));
        if self.rope_factors {
            out.push(Tensor {
                fill: Fill::RopeFactors,
                ..matrix(None, "rope_freqs", &[self.head_dim / 2])
            });
        }
        if !self.tied {
            out.push(matrix(None, "output", &[self.embd, self.vocab]));
        }
        out
    }

    /// What llama.cpp needs to load the file.
    pub fn metadata(&self, w: &mut Writer, layers: u32, file_type: u32) {
        let key = |name: &str| format!("{}.{name}", self.arch);
        w.set("general.name", format!("{} shape, random weights", self.name).as_str());
        w.set("general.file_type", file_type);
        w.set(&key("block_count"), layers);
        w.set(&key("context_length"), self.context);
        w.set(&key("embedding_length"), self.embd as u32);
        w.set(&key("feed_forward_length"), self.ff as u32);
        w.set(&key("attention.head_count"), self.heads as u32);
        w.set(&key("attention.head_count_kv"), self.kv_heads as u32);
        w.set(&key("attention.key_length"), self.head_dim as u32);
        w.set(&key("attention.value_length"), self.head_dim as u32);
        w.set(&key("attention.layer_norm_rms_epsilon"), self.eps);
        w.set(&key("rope.dimension_count"), self.head_dim as u32);
        w.set(&key("rope.freq_base"), self.rope_base);
        w.set(&key("vocab_size"), self.vocab as u32);
        if let Some(window) = self.sliding_window {
            w.set(&key("attention.sliding_window"), window);
        }
        if let Some(e) = &self.experts {
            w.set(&key("expert_count"), e.count as u32);
            w.set(&key("expert_used_count"), e.used);
            w.set(&key("expert_feed_forward_length"), e.ff as u32);
        }
        tokenizer(w, self.vocab);
    }
}

/// A vocabulary of `n` tokens for which every text has an encoding: the 256 bytes, printable ASCII, and made-up words.
fn tokenizer(w: &mut Writer, n: u64) {
    const NORMAL: i32 = 1;
    const UNKNOWN: i32 = 2;
    const CONTROL: i32 = 3;
    const BYTE: i32 = 6;
    let mut tokens: Vec<(String, i32)> = [("<unk>", UNKNOWN), ("<s>", CONTROL), ("</s>", CONTROL)]
        .map(|(t, kind)| (t.to_owned(), kind))
        .into();
    tokens.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), BYTE)));
    tokens.push(("\u{2581}".to_owned(), NORMAL)); // how SentencePiece writes a space
    tokens.extend((b'!'..=b'~').map(|c| (char::from(c).to_string(), NORMAL)));
    let named = tokens.len() as u64;
    tokens.extend((named..n).map(|i| (format!("\u{2581}w{i}"), NORMAL)));
    let scores: Vec<f32> = (0..n).map(|i| -(i as f32)).collect();
    let kinds: Vec<i32> = tokens.iter().map(|(_, kind)| *kind).collect();
    w.set("tokenizer.ggml.model", "llama");
    w.set(
        "tokenizer.ggml.tokens",
        tokens.into_iter().map(|(t, _)| t.into_bytes()).collect::<Vec<_>>(),
    );
    w.set("tokenizer.ggml.scores", &scores[..]);
    w.set("tokenizer.ggml.token_type", &kinds[..]);
    w.set("tokenizer.ggml.unknown_token_id", 0u32);
    w.set("tokenizer.ggml.bos_token_id", 1u32);
    w.set("tokenizer.ggml.eos_token_id", 2u32);
}
