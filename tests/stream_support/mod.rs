//! Small models with routed experts, as files.
#![allow(dead_code, reason = "each test file uses its part")]

use ggml_flashrt::gguf::Writer;
use ggml_flashrt::graph::DType;
use std::path::{Path, PathBuf};

/// Tensors of a model to write.
pub type Tensors = Vec<(String, DType, Vec<u64>)>;

pub const EXPERTS: u64 = 6;
pub const USED: u32 = 2;

/// Two layouts: gate, up and down apart with mixed types in the even layers, gate and up in one tensor in the odd ones. The first
/// layer is dense. Expert matrices are not as long as a whole number of sectors.
pub fn tensors(layers: u32) -> Tensors {
    let mut all = vec![("token_embd.weight".to_owned(), DType::F16, vec![64, 100])];
    for l in 0..layers {
        let name = |what: &str| format!("blk.{l}.{what}");
        all.push((name("attn_norm.weight"), DType::F32, vec![64]));
        if l == 0 {
            all.push((name("ffn_up.weight"), DType::Q8_0, vec![64, 96]));
            continue;
        }
        all.push((name("ffn_gate_inp.weight"), DType::F32, vec![64, EXPERTS]));
        // Small, and named like the experts: resident.
        all.push((name("ffn_up_exps.bias"), DType::F32, vec![32, EXPERTS]));
        let down = if l % 4 == 2 { DType::Q8_0 } else { DType::Q4_0 };
        if l % 2 == 0 {
            all.push((name("ffn_gate_exps.weight"), DType::Q4_0, vec![64, 32, EXPERTS]));
            all.push((name("ffn_up_exps.weight"), DType::Q4_0, vec![64, 32, EXPERTS]));
            all.push((name("ffn_down_exps.weight"), down, vec![32, 64, EXPERTS]));
        } else {
            all.push((name("ffn_down_exps.weight"), DType::Q4_0, vec![32, 64, EXPERTS]));
            all.push((name("ffn_gate_up_exps.weight"), DType::Q4_0, vec![64, 64, EXPERTS]));
        }
    }
    all.push(("output.weight".to_owned(), DType::Q8_0, vec![64, 100]));
    all
}

/// Metadata of such a model.
pub fn writer(layers: u32) -> Writer {
    let mut w = Writer::new("qwen3moe");
    w.set("qwen3moe.block_count", layers);
    w.set("qwen3moe.embedding_length", 64u32);
    w.set("qwen3moe.attention.head_count", 4u32);
    w.set("qwen3moe.attention.head_count_kv", 2u32);
    w.set("qwen3moe.attention.key_length", 16u32);
    w.set("qwen3moe.attention.value_length", 16u32);
    w.set("qwen3moe.feed_forward_length", 96u32);
    w.set("qwen3moe.expert_feed_forward_length", 32u32);
    w.set("qwen3moe.expert_count", EXPERTS as u32);
    w.set("qwen3moe.expert_used_count", USED);
    w
}

/// Bytes in which no two places look alike.
pub fn noise(seed: u64, bytes: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut out = Vec::with_capacity(bytes + 8);
    while out.len() < bytes {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        out.extend(state.wrapping_mul(0x2545_f491_4f6c_dd1d).to_le_bytes());
    }
    out.truncate(bytes);
    out
}

/// Writes a file with these tensors, filled with noise.
pub fn write(path: &Path, mut writer: Writer, tensors: &[(String, DType, Vec<u64>)]) {
    for (name, ty, dims) in tensors {
        writer.declare(name, *ty, dims).unwrap();
    }
    let mut data = writer.header(Vec::new()).unwrap();
    for (n, (_, ty, dims)) in tensors.iter().enumerate() {
        let bytes = ty.row_bytes(dims[0]).unwrap() * dims[1..].iter().product::<u64>();
        data.tensor([noise(n as u64 + 1, bytes as usize).as_slice()]).unwrap();
    }
    std::fs::write(path, data.finish().unwrap()).unwrap();
}

/// A model in one file.
pub fn model(dir: &Path, layers: u32) -> PathBuf {
    let path = dir.join("model.gguf");
    write(&path, writer(layers), &tensors(layers));
    path
}

/// The same model in `count` shards; the path of the first.
pub fn shards(dir: &Path, layers: u32, count: usize) -> PathBuf {
    let all = tensors(layers);
    let per_shard = all.len().div_ceil(count);
    for (n, part) in all.chunks(per_shard).enumerate() {
        let mut w = if n == 0 {
            writer(layers)
        } else {
            Writer::new("qwen3moe")
        };
        w.set("split.no", n as u16);
        w.set("split.count", count as u16);
        w.set("split.tensors.count", all.len() as i32);
        write(&shard_path(dir, n, count), w, part);
    }
    shard_path(dir, 0, count)
}

pub fn shard_path(dir: &Path, n: usize, count: usize) -> PathBuf {
    dir.join(format!("model-{:05}-of-{count:05}.gguf", n + 1))
}
