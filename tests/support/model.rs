//! Decoder layers in the order llama.cpp's builders put them.

use ggml_flashrt::graph::dump::GraphRecord;
use ggml_flashrt::graph::{BufferKind, DType, GraphBuilder, Op, TensorId};

/// Which model the layers are of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Pre-norms, Q V K order, normal RoPE with frequency factors, SwiGLU.
    Llama,
    /// Like Llama with biases on Q, K and V and NeoX RoPE.
    Qwen2,
    /// Like Llama with norms on the heads of Q and K and NeoX RoPE.
    Qwen3,
    /// Like Qwen3 with experts instead of one feed-forward block. Which experts, and by how much, are inputs: the router is not
    /// ours.
    Qwen3Moe,
    /// Norms before and after each block, norms on heads, a scale on Q, Q K V order, GeGLU.
    Gemma3,
}

/// Shapes of a model.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    pub family: Family,
    pub n_layers: usize,
    pub n_embd: i64,
    pub n_head: i64,
    pub n_head_kv: i64,
    pub head_dim: i64,
    pub n_ff: i64,
    pub n_vocab: i64,
    pub n_tokens: i64,
    pub n_kv: i64,
    /// Weight types of Q and K, V, gate and up, output and down.
    pub types: [DType; 4],
    pub kv: DType,
    pub norm_eps: f32,
}

impl Shape {
    pub fn small(family: Family) -> Shape {
        Shape {
            family,
            n_layers: 2,
            n_embd: 256,
            n_head: 4,
            n_head_kv: 2,
            head_dim: 64,
            n_ff: 512,
            n_vocab: 64,
            n_tokens: 1,
            n_kv: 16,
            types: [DType::Q8_0; 4],
            kv: DType::F16,
            norm_eps: 1e-6,
        }
    }
}

impl Shape {
    /// Just large enough for blocks of 32: for tests that run whole graphs many times.
    pub fn tiny(family: Family) -> Shape {
        Shape {
            n_layers: 1,
            n_embd: 64,
            n_head: 2,
            n_head_kv: 1,
            head_dim: 64,
            n_ff: 128,
            n_vocab: 32,
            n_kv: 8,
            ..Shape::small(family)
        }
    }
}

/// The same graph as an RPC server sees it: no uid, no buffer marked as weights, uses of nodes only.
pub fn on_an_rpc_server(mut record: GraphRecord) -> GraphRecord {
    record.uid = 0;
    for (id, t) in record.tensors.iter_mut().enumerate() {
        if t.buffer == BufferKind::OwnWeights {
            t.buffer = BufferKind::Own;
        }
        if !record.nodes.contains(&id) {
            t.uses = 0;
        }
    }
    record
}

/// Experts of [`Family::Qwen3Moe`], and how many of them a token takes.
pub const N_EXPERTS: i64 = 4;
pub const N_USED: i64 = 2;

/// Operation parameters from floats and integers.
pub fn f(v: f32) -> i32 {
    v.to_bits() as i32
}

struct Layers {
    b: GraphBuilder,
    s: Shape,
    pos: TensorId,
    k_rows: TensorId,
    v_rows: TensorId,
    mask: TensorId,
    freq_factors: Option<TensorId>,
}

/// A whole model: embedding scale, layers, final norm, output.
pub fn model(s: Shape) -> GraphRecord {
    let mut b = GraphBuilder::new();
    let inp = b.input("inp_embd", DType::F32, [s.n_embd, s.n_tokens, 1, 1]);
    let pos = b.input("inp_pos", DType::I32, [s.n_tokens, 1, 1, 1]);
    let k_rows = b.input("k_idxs", DType::I64, [s.n_tokens, 1, 1, 1]);
    let v_rows = b.input("v_idxs", DType::I64, [s.n_tokens, 1, 1, 1]);
    let mask = b.input("kq_mask", DType::F16, [s.n_kv, s.n_tokens, 1, 1]);
    let ff = (s.family == Family::Llama).then(|| b.weight("rope_freqs", DType::F32, [s.head_dim / 2, 1, 1, 1]));
    let mut l = Layers {
        b,
        s,
        pos,
        k_rows,
        v_rows,
        mask,
        freq_factors: ff,
    };
    let mut x = l.b.node(
        "inp_scaled",
        Op::Scale,
        DType::F32,
        [s.n_embd, s.n_tokens, 1, 1],
        &[Some(inp)],
    );
    l.b.tensor_mut(x).params = vec![f(1.5)];
    for il in 0..s.n_layers {
        x = l.layer(il, x);
    }
    let normed = l.norm("result_norm", x);
    let out = l.mat_vec("result_output", DType::Q8_0, normed, s.n_vocab);
    l.b.tensor_mut(out).flags |= ggml_flashrt::graph::FLAG_OUTPUT;
    l.b.finish()
}

impl Layers {
    fn tokens(&self, width: i64) -> [i64; 4] {
        [width, self.s.n_tokens, 1, 1]
    }

    fn norm(&mut self, name: &str, x: TensorId) -> TensorId {
        let ne = self.b.tensor_mut(x).ne;
        let w = self.b.weight(&format!("{name}.weight"), DType::F32, [ne[0], 1, 1, 1]);
        let n = self
            .b
            .node(&format!("{name}-n"), Op::RmsNorm, DType::F32, ne, &[Some(x)]);
        self.b.tensor_mut(n).params = vec![f(self.s.norm_eps)];
        self.b.node(name, Op::Mul, DType::F32, ne, &[Some(n), Some(w)])
    }

    fn mat_vec(&mut self, name: &str, dtype: DType, x: TensorId, n_rows: i64) -> TensorId {
        let k = self.b.tensor_mut(x).ne[0];
        let w = self.b.weight(&format!("{name}.weight"), dtype, [k, n_rows, 1, 1]);
        self.b
            .node(name, Op::MulMat, DType::F32, self.tokens(n_rows), &[Some(w), Some(x)])
    }

    fn add(&mut self, name: &str, a: TensorId, b: TensorId) -> TensorId {
        let ne = self.b.tensor_mut(a).ne;
        self.b.node(name, Op::Add, DType::F32, ne, &[Some(a), Some(b)])
    }

    fn projection(&mut self, name: &str, dtype: DType, x: TensorId, heads: i64) -> TensorId {
        let width = heads * self.s.head_dim;
        let mut p = self.mat_vec(name, dtype, x, width);
        if self.s.family == Family::Qwen2 {
            let bias = self.b.weight(&format!("{name}.bias"), DType::F32, [width, 1, 1, 1]);
            p = self.add(&format!("{name}+b"), p, bias);
        }
        let ne = [self.s.head_dim, heads, self.s.n_tokens, 1];
        self.b
            .view_node(&format!("{name} (reshaped)"), Op::Reshape, p, ne, 0, &[Some(p)])
    }

    fn rotated(&mut self, name: &str, heads: TensorId) -> TensorId {
        let mut x = heads;
        if matches!(self.s.family, Family::Qwen3 | Family::Qwen3Moe | Family::Gemma3) {
            x = self.norm(&format!("{name}_normed"), x);
        }
        let ne = self.b.tensor_mut(x).ne;
        let src = [Some(x), Some(self.pos), self.freq_factors];
        let src = if self.freq_factors.is_some() {
            &src[..]
        } else {
            &src[..2]
        };
        let r = self.b.node(&format!("{name}_rope"), Op::Rope, DType::F32, ne, src);
        let mode = if self.s.family == Family::Llama { 0 } else { 2 };
        self.b.tensor_mut(r).params = vec![
            0,
            self.s.head_dim as i32,
            mode,
            0,
            8192,
            f(10000.0),
            f(1.0),
            f(0.0),
            f(1.0),
            f(32.0),
            f(1.0),
        ];
        r
    }

    fn store(&mut self, name: &str, heads: TensorId, cache: TensorId, rows: TensorId) -> TensorId {
        let ne = self.b.tensor_mut(heads).ne;
        let flat = self.b.view_node(
            &format!("{name} (view)"),
            Op::View,
            heads,
            [ne[0] * ne[1], ne[2], 1, 1],
            0,
            &[Some(heads)],
        );
        let cache_ne = self.b.tensor_mut(cache).ne;
        self.b.view_node(
            name,
            Op::SetRows,
            cache,
            cache_ne,
            0,
            &[Some(flat), Some(rows), Some(cache)],
        )
    }

    fn layer(&mut self, il: usize, x: TensorId) -> TensorId {
        let s = self.s;
        let gemma = s.family == Family::Gemma3;
        let normed = self.norm(&format!("attn_norm-{il}"), x);
        let [t_qk, t_v, t_ffn, t_out] = s.types;

        let kv_width = s.head_dim * s.n_head_kv;
        let k_cache = self.b.input(&format!("cache_k_l{il}"), s.kv, [kv_width, s.n_kv, 1, 1]);
        let v_cache = self.b.input(&format!("cache_v_l{il}"), s.kv, [kv_width, s.n_kv, 1, 1]);
        let q = self.projection(&format!("Qcur-{il}"), t_qk, normed, s.n_head);
        let (q, k, v) = if gemma {
            let k = self.projection(&format!("Kcur-{il}"), t_qk, normed, s.n_head_kv);
            let v = self.projection(&format!("Vcur-{il}"), t_v, normed, s.n_head_kv);
            let q = self.rotated(&format!("Qcur-{il}"), q);
            let k = self.rotated(&format!("Kcur-{il}"), k);
            let ne = self.b.tensor_mut(q).ne;
            let scaled = self
                .b
                .node(&format!("Qscaled-{il}"), Op::Scale, DType::F32, ne, &[Some(q)]);
            self.b.tensor_mut(scaled).params = vec![f(0.0625)];
            (scaled, k, v)
        } else {
            let q = self.rotated(&format!("Qcur-{il}"), q);
            let v = self.projection(&format!("Vcur-{il}"), t_v, normed, s.n_head_kv);
            let k = self.projection(&format!("Kcur-{il}"), t_qk, normed, s.n_head_kv);
            let k = self.rotated(&format!("Kcur-{il}"), k);
            (q, k, v)
        };
        let k_store = self.store(&format!("k_store-{il}"), k, k_cache, self.k_rows);
        let v_store = self.store(&format!("v_store-{il}"), v, v_cache, self.v_rows);

        // Heads before rows or tokens, as attention takes them.
        let permuted = |b: &mut GraphBuilder, name: String, of: TensorId| {
            let (ne, nb) = (b.tensor_mut(of).ne, b.tensor_mut(of).nb);
            let view = b.view_node(&name, Op::Permute, of, [ne[0], ne[2], ne[1], ne[3]], 0, &[Some(of)]);
            b.tensor_mut(view).nb = [nb[0], nb[2], nb[1], nb[3]];
            view
        };
        let q_view = permuted(&mut self.b, format!("q_view-{il}"), q);
        let heads = |cache: TensorId, b: &mut GraphBuilder, name: String| {
            let ne = [s.head_dim, s.n_head_kv, s.n_kv, 1];
            let view = b.view_node(&format!("{name} (view)"), Op::View, cache, ne, 0, &[Some(cache)]);
            permuted(b, name, view)
        };
        let k_view = heads(k_store, &mut self.b, format!("k_view-{il}"));
        let v_view = heads(v_store, &mut self.b, format!("v_view-{il}"));
        let attn = self.b.node(
            &format!("attn-{il}"),
            Op::FlashAttnExt,
            DType::F32,
            [s.head_dim, s.n_head, s.n_tokens, 1],
            &[Some(q_view), Some(k_view), Some(v_view), Some(self.mask)],
        );
        self.b.tensor_mut(attn).params = vec![f(if gemma { 1.0 } else { (s.head_dim as f32).powf(-0.5) }), 0, 0, 10];
        let ne = self.tokens(s.head_dim * s.n_head);
        let flat = self
            .b
            .view_node(&format!("kqv_out-{il}"), Op::Reshape, attn, ne, 0, &[Some(attn)]);
        let out = self.mat_vec(&format!("attn_out-{il}"), t_out, flat, s.n_embd);
        let out = if gemma {
            self.norm(&format!("attn_post_norm-{il}"), out)
        } else {
            out
        };
        let residual = self.add(&format!("ffn_inp-{il}"), out, x);

        let normed = self.norm(&format!("ffn_norm-{il}"), residual);
        if s.family == Family::Qwen3Moe {
            let out = self.experts(il, normed);
            return self.add(&format!("l_out-{il}"), out, residual);
        }
        let up = self.mat_vec(&format!("ffn_up-{il}"), t_ffn, normed, s.n_ff);
        let gate = self.mat_vec(&format!("ffn_gate-{il}"), t_ffn, normed, s.n_ff);
        let ne = self.tokens(s.n_ff);
        let glu = self.b.node(
            &format!("ffn_glu-{il}"),
            Op::Glu,
            DType::F32,
            ne,
            &[Some(gate), Some(up)],
        );
        self.b.tensor_mut(glu).params = vec![if gemma { 1 } else { 2 }];
        let down = self.mat_vec(&format!("ffn_out-{il}"), t_out, glu, s.n_embd);
        let down = if gemma {
            self.norm(&format!("ffn_post_norm-{il}"), down)
        } else {
            down
        };
        self.add(&format!("l_out-{il}"), down, residual)
    }

    fn experts_product(&mut self, name: &str, dtype: DType, x: TensorId, ids: TensorId, n_rows: i64) -> TensorId {
        let k = self.b.tensor_mut(x).ne[0];
        let w = self
            .b
            .weight(&format!("{name}.weight"), dtype, [k, n_rows, N_EXPERTS, 1]);
        let ne = [n_rows, N_USED, self.s.n_tokens, 1];
        self.b
            .node(name, Op::MulMatId, DType::F32, ne, &[Some(w), Some(x), Some(ids)])
    }

    /// The sum of the experts' results, weighted.
    fn experts(&mut self, il: usize, normed: TensorId) -> TensorId {
        let (s, [.., t_ffn, t_out]) = (self.s, self.s.types);
        // As many as there are experts, sorted: the first of them are taken.
        let sorted = self
            .b
            .input(&format!("experts-{il}"), DType::I32, [N_EXPERTS, s.n_tokens, 1, 1]);
        let nb = self.b.tensor_mut(sorted).nb;
        let ids = self.b.view_node(
            &format!("ffn_moe_topk-{il}"),
            Op::View,
            sorted,
            [N_USED, s.n_tokens, 1, 1],
            0,
            &[Some(sorted)],
        );
        self.b.tensor_mut(ids).nb = nb;
        let weights = self
            .b
            .input(&format!("ffn_moe_weights-{il}"), DType::F32, [1, N_USED, s.n_tokens, 1]);
        let ne = [s.n_embd, 1, s.n_tokens, 1];
        let x = self.b.view_node(
            &format!("ffn_norm-{il} (reshaped)"),
            Op::Reshape,
            normed,
            ne,
            0,
            &[Some(normed)],
        );
        let gate = self.experts_product(&format!("ffn_moe_gate-{il}"), t_ffn, x, ids, s.n_ff);
        let up = self.experts_product(&format!("ffn_moe_up-{il}"), t_ffn, x, ids, s.n_ff);
        let ne = [s.n_ff, N_USED, s.n_tokens, 1];
        let glu = self.b.node(
            &format!("ffn_moe_swiglu-{il}"),
            Op::Glu,
            DType::F32,
            ne,
            &[Some(gate), Some(up)],
        );
        self.b.tensor_mut(glu).params = vec![2];
        let down = self.experts_product(&format!("ffn_moe_down-{il}"), t_out, glu, ids, s.n_embd);
        let ne = [s.n_embd, N_USED, s.n_tokens, 1];
        let weighted = self.b.node(
            &format!("ffn_moe_weighted-{il}"),
            Op::Mul,
            DType::F32,
            ne,
            &[Some(down), Some(weights)],
        );
        let nb = self.b.tensor_mut(weighted).nb;
        let ne = self.tokens(s.n_embd);
        let slots: Vec<TensorId> = (0..N_USED as usize)
            .map(|slot| {
                let view = self.b.view_node(
                    &format!("ffn_moe_weighted-{il} (view)"),
                    Op::View,
                    weighted,
                    ne,
                    slot * nb[1],
                    &[Some(weighted)],
                );
                self.b.tensor_mut(view).nb = [nb[0], nb[2], nb[3], nb[3]];
                view
            })
            .collect();
        self.add(&format!("ffn_moe_out-{il}"), slots[0], slots[1])
    }
}
