//! The dequantisers of the oracles against ggml's own, on random bytes. Needs llama.cpp's libraries (`cargo xtask host --backend
//! cpu`).
#![cfg(feature = "host")]

use ggml_flashrt::host::host_dir;
use ggml_flashrt::kernel::MM_WEIGHT_TYPES;
use ggml_flashrt::reference::quant::{dequantize_row, DType};
use ggml_flashrt::reference::sample::{f16_scales, Sample};
use libloading::Library;

type Dequantize = unsafe extern "C" fn(*const u8, *mut f32, i64);

/// Each value, rounded once, is ggml's. Every bit pattern but f16 scales that are no numbers.
#[test]
fn every_type_dequantises_as_ggml_does() {
    let path = host_dir(None).join("libggml-base.so");
    if !path.is_file() {
        println!("skipped: no {}", path.display());
        return;
    }
    // SAFETY: ggml's initialisers have no preconditions.
    let ggml = unsafe { Library::new(&path) }.unwrap();
    const BLOCKS: usize = 4096;
    for dtype in MM_WEIGHT_TYPES {
        let symbol = match dtype {
            DType::F16 => "ggml_fp16_to_fp32_row".to_owned(),
            DType::BF16 => "ggml_bf16_to_fp32_row".to_owned(),
            other => format!("dequantize_row_{}", other.name()),
        };
        let mut bytes = Sample::new(dtype as u64).bytes(BLOCKS * dtype.block_bytes());
        for block in bytes.chunks_exact_mut(dtype.block_bytes()) {
            for at in f16_scales(dtype).iter().filter(|_| dtype != DType::BF16) {
                if block[at + 1] & 0x7c == 0x7c {
                    block[at + 1] &= !0x40;
                }
            }
        }
        let k = BLOCKS * dtype.block_len();
        let mut want = vec![0f32; k];
        // SAFETY: the symbol has this signature in ggml-quants.h and ggml.h, the rows are whole blocks.
        unsafe {
            let dequantize = ggml.get::<Dequantize>(symbol.as_bytes()).unwrap();
            dequantize(bytes.as_ptr(), want.as_mut_ptr(), k as i64);
        }
        let got = dequantize_row(dtype as i32, &bytes, k).unwrap();
        for (i, (got, want)) in got.iter().zip(&want).enumerate() {
            let got = *got as f32;
            assert!(
                got == *want || (got.is_nan() && want.is_nan()),
                "{} value {i}: {got} is not {want}",
                dtype.name()
            );
        }
    }
}
