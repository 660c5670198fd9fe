//! `flashrt synth`: a GGUF with random weights in the shapes of a known model, for speed and for graphs, never for quality.

mod blocks;
mod model;

use crate::output::NewFile;
use anyhow::{Context, Result};
use blocks::Filler;
use ggml_flashrt::gguf::Writer;
use ggml_flashrt::graph::DType;
use indicatif::{ProgressBar, ProgressStyle};
use model::{Kind, Tensor};
use std::io::BufWriter;
use std::path::PathBuf;

/// Arguments of `flashrt synth`.
#[derive(clap::Args)]
pub struct Args {
    /// Model whose shapes and vocabulary size to take.
    #[arg(value_enum)]
    kind: Kind,
    /// File to write; must not exist yet.
    out: PathBuf,
    /// Layers, instead of the model's own number.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..=1024))]
    layers: Option<u32>,
    /// q4_K_M (the mix that llama-quantize makes) or any ggml type, for all matrices alike.
    #[arg(long = "type", default_value = "q4_K_M", value_parser = Scheme::parse)]
    scheme: Scheme,
    /// The same seed gives the same file.
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Replace the file if it exists.
    #[arg(long)]
    force: bool,
}

/// How the matrices are quantised.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Scheme {
    Q4KM,
    Pure(DType),
}

impl Scheme {
    fn parse(name: &str) -> Result<Self, String> {
        if name.eq_ignore_ascii_case("q4_k_m") {
            return Ok(Scheme::Q4KM);
        }
        match DType::from_name(name) {
            Some(ty) if blocks::supports(ty) => Ok(Scheme::Pure(ty)),
            Some(ty) => Err(format!("weights are never stored as {}", ty.name())),
            None => Err(format!("unknown type; q4_K_M or one of {}", blocks::supported_names())),
        }
    }

    /// `general.file_type`: llama.cpp's number for the mix, for display only.
    fn file_type(self) -> u32 {
        use DType::*;
        match self {
            Scheme::Q4KM => 15,
            Scheme::Pure(ty) => match ty {
                F32 => 0,
                F16 => 1,
                Q4_0 => 2,
                Q4_1 => 3,
                Q8_0 => 7,
                Q5_0 => 8,
                Q5_1 => 9,
                Q4_K => 14,
                Q5_K => 16,
                Q6_K => 18,
                BF16 => 32,
                NVFP4 => 39,
                _ => 1024, // "guessed": there is no number for a file of only this type
            },
        }
    }

    /// Type of a tensor of the model: what llama-quantize would choose, its fallbacks for narrow rows included.
    fn type_of(self, tensor: &Tensor, layers: u32) -> DType {
        if tensor.dims.len() < 2 || tensor.keep_f32 {
            return DType::F32;
        }
        let wanted = match self {
            Scheme::Pure(ty) => ty,
            Scheme::Q4KM if tensor.is_output => DType::Q6_K,
            Scheme::Q4KM if tensor.more_bits && more_bits(tensor.layer, layers) => DType::Q6_K,
            Scheme::Q4KM => DType::Q4_K,
        };
        let width = tensor.dims[0];
        let fits = |ty: DType| width % ty.block_len() as u64 == 0;
        match wanted {
            ty if fits(ty) => ty,
            // The output matrix takes Q8_0 at once, not the fallback of its type.
            _ if tensor.is_output && fits(DType::Q8_0) => DType::Q8_0,
            ty => [fallback(ty), DType::F16]
                .into_iter()
                .find(|ty| fits(*ty))
                .unwrap_or(DType::F16),
        }
    }
}

/// Layers whose V and down matrices get six bits in a Q4_K_M file: the first and last eighth, and every third between.
fn more_bits(layer: u32, layers: u32) -> bool {
    let eighth = layers / 8;
    layer < eighth || layer >= 7 * layers / 8 || (layer - eighth) % 3 == 2
}

/// Type that replaces one whose blocks do not divide the row.
fn fallback(ty: DType) -> DType {
    use DType::*;
    match ty {
        IQ1_S | IQ1_M | IQ2_XXS | IQ2_XS | IQ2_S | IQ3_XXS | IQ3_S | IQ4_XS => IQ4_NL,
        Q2_0 | Q2_K | Q3_K | TQ1_0 | TQ2_0 => Q4_0,
        Q4_K => Q5_0,
        Q5_K => Q5_1,
        Q6_K => Q8_0,
        _ => F16,
    }
}

/// Writes the file, or leaves nothing.
pub fn run(args: Args) -> Result<()> {
    let model = args.kind.model();
    let layers = args.layers.unwrap_or(model.layers);
    let tensors = model.tensors(layers);
    let mut writer = Writer::new(model.arch);
    model.metadata(&mut writer, layers, args.scheme.file_type());
    for t in &tensors {
        writer.declare(&t.name, args.scheme.type_of(t, layers), &t.dims)?;
    }

    let total = writer.data_bytes();
    let file = NewFile::create(&args.out, args.force)?;
    let style = "{bar:40} {bytes}/{total_bytes} {bytes_per_sec} {eta}";
    let bar = ProgressBar::new(total).with_style(ProgressStyle::with_template(style).expect("a valid template"));
    let mut data = writer.header(bar.wrap_write(BufWriter::with_capacity(1 << 20, file.writer())))?;
    for t in &tensors {
        let filler = Filler::new(args.scheme.type_of(t, layers), t, args.seed);
        data.tensor_with(|out| filler.write(out))
            .with_context(|| format!("{}: {}", args.out.display(), t.name))?;
    }
    drop(data.finish()?);
    file.commit()?;
    bar.finish_and_clear();
    println!(
        "{}: {} layers, {} tensors, {total} bytes of weights",
        args.out.display(),
        layers,
        tensors.len()
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn type_in(kind: Kind, layers: u32, scheme: &str, name: &str) -> &'static str {
        let tensors = kind.model().tensors(layers);
        let tensor = tensors.iter().find(|t| t.name == name).unwrap();
        Scheme::parse(scheme).unwrap().type_of(tensor, layers).name()
    }

    #[test]
    fn q4_k_m_mixes_as_llama_quantize_does() {
        let eight = |name: &str| type_in(Kind::Llama8b, 32, "q4_k_m", name);
        assert_eq!(eight("output.weight"), "q6_K");
        assert_eq!(eight("token_embd.weight"), "q4_K");
        assert_eq!(eight("blk.0.attn_v.weight"), "q6_K");
        assert_eq!(eight("blk.4.attn_v.weight"), "q4_K");
        assert_eq!(eight("blk.6.ffn_down.weight"), "q6_K");
        assert_eq!(eight("blk.6.ffn_up.weight"), "q4_K");
        assert_eq!(eight("blk.0.attn_norm.weight"), "f32");
        let raised = (0..32)
            .filter(|i| eight(&format!("blk.{i}.ffn_down.weight")) == "q6_K")
            .count();
        assert_eq!(raised, 16);
    }

    #[test]
    fn narrow_rows_fall_back() {
        let gemma = |name: &str| type_in(Kind::Gemma3_270m, 18, "q4_K_M", name);
        assert_eq!(gemma("token_embd.weight"), "q8_0");
        assert_eq!(gemma("blk.0.attn_q.weight"), "q5_0");
        assert_eq!(gemma("blk.0.attn_v.weight"), "q8_0");
        assert_eq!(gemma("blk.2.attn_v.weight"), "q5_0");
        assert_eq!(gemma("blk.0.attn_output.weight"), "q4_K");
        assert_eq!(gemma("blk.0.ffn_down.weight"), "q6_K");
    }

    #[test]
    fn the_router_stays_in_f32() {
        assert_eq!(type_in(Kind::Qwen3Moe, 2, "q8_0", "blk.0.ffn_gate_inp.weight"), "f32");
        assert_eq!(type_in(Kind::Qwen3Moe, 2, "q8_0", "blk.0.ffn_down_exps.weight"), "q8_0");
    }
}
