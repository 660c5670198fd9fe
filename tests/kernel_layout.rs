//! The mirrors in src/kernel have the layout that a C compiler gives csrc/flashrt_kernels.h.

use std::collections::BTreeMap;
use std::mem::{offset_of, size_of};
use std::path::Path;
use std::process::Command;

use ggml_flashrt::kernel::{
    moe_max_rows, DecAttnArgs, GemvArgs, GemvSeg, H16Args, Launch, MaskTilesArgs, MmArgs, MoeH16Args, MoeMmArgs,
    MoeRouteArgs, MoeRows, NormArgs, PrefillFa4Args, QkvPart, QkvTailArgs, Rope, Tiles, H16, MOE_MAX_EXPERTS, Q8,
};

/// Adds size and offsets of a mirror under their C expressions. `field = c_name` where the names differ.
macro_rules! layout {
    ($map:ident, $rust:ty, $c:literal, $($field:ident $(= $c_field:literal)?),*) => {
        $map.insert(format!("sizeof({})", $c), size_of::<$rust>());
        $(
            #[allow(unused_variables)]
            let name = stringify!($field);
            $(let name = $c_field;)?
            $map.insert(format!("offsetof({}, {name})", $c), offset_of!($rust, $field));
        )*
    };
}

#[test]
fn mirrors_match_the_header() {
    let mut mirrors = BTreeMap::new();
    layout!(mirrors, Launch, "frt_launch", stream, pdl, sm_count, cc);
    layout!(mirrors, Q8, "frt_q8", qs, ds);
    layout!(mirrors, H16, "frt_h16", x, scale);
    layout!(
        mirrors,
        NormArgs,
        "frt_norm_args",
        h,
        h_stride,
        x,
        x_stride,
        w1,
        w2,
        y,
        y_stride,
        z,
        z_stride,
        zq,
        zh,
        n_rows,
        n_cols,
        eps1,
        eps2
    );
    layout!(
        mirrors,
        GemvSeg,
        "frt_gemv_seg",
        w,
        row_bytes,
        dst,
        dst_stride,
        bias,
        res,
        res_stride,
        n_rows
    );
    layout!(
        mirrors,
        GemvArgs,
        "frt_gemv_args",
        ty = "type",
        n_seg,
        seg,
        k,
        n_tokens,
        x,
        x_stride,
        xq,
        glu
    );
    layout!(
        mirrors,
        QkvPart,
        "frt_qkv_part",
        src,
        src_stride,
        dst,
        row_bytes,
        head_bytes,
        rows,
        rows_i64,
        dst_type,
        n_heads,
        head_dim,
        norm_w,
        eps,
        rope,
        scale
    );
    layout!(
        mirrors,
        Rope,
        "frt_rope",
        pos,
        freq_factors,
        n_dims,
        freq_base,
        freq_scale,
        ext_factor,
        attn_factor,
        corr_low,
        corr_high
    );
    layout!(mirrors, QkvTailArgs, "frt_qkv_tail_args", part, n_parts, n_tokens, rope);
    layout!(
        mirrors,
        Tiles,
        "frt_tiles",
        kind,
        partial_count,
        partial_index,
        full_count,
        full_index
    );
    layout!(
        mirrors,
        MaskTilesArgs,
        "frt_mask_tiles_args",
        mask,
        token_bytes,
        plane_bytes,
        n_planes,
        n_tokens,
        n_kv,
        tile_m,
        tile_n,
        tiles
    );
    layout!(
        mirrors,
        PrefillFa4Args,
        "frt_prefill_fa4_args",
        q,
        q_token_bytes,
        q_head_bytes,
        q_stream_bytes,
        k,
        k_row_bytes,
        k_head_bytes,
        k_stream_bytes,
        v,
        v_row_bytes,
        v_head_bytes,
        v_stream_bytes,
        mask,
        mask_token_bytes,
        mask_stream_bytes,
        tiles,
        dst,
        scratch,
        head_dim,
        head_dim_v,
        n_heads,
        n_heads_kv,
        n_tokens,
        n_kv,
        n_streams,
        mask_tokens,
        tile_m,
        tile_n,
        scale
    );

    layout!(
        mirrors,
        DecAttnArgs,
        "frt_dec_attn_args",
        q,
        q_token_bytes,
        q_head_bytes,
        q_stream_bytes,
        k,
        k_row_bytes,
        k_head_bytes,
        k_stream_bytes,
        v,
        v_row_bytes,
        v_head_bytes,
        v_stream_bytes,
        mask,
        mask_token_bytes,
        mask_stream_bytes,
        dst,
        scratch,
        tickets,
        head_dim,
        n_heads,
        n_heads_kv,
        n_tokens,
        n_kv,
        n_streams,
        max_splits,
        scale,
        softcap
    );

    layout!(
        mirrors,
        MmArgs,
        "frt_mm_args",
        ty = "type",
        glu,
        w,
        w2,
        row_bytes,
        n_rows,
        k,
        n_tokens,
        x,
        dst,
        dst_stride,
        bias,
        res,
        res_stride
    );
    layout!(mirrors, H16Args, "frt_h16_args", x, x_stride, y, k, n_tokens);
    layout!(mirrors, MoeRows, "frt_moe_rows", rows, begin, count);
    layout!(
        mirrors,
        MoeRouteArgs,
        "frt_moe_route_args",
        ids,
        ids_stride,
        n_tokens,
        n_used,
        n_experts,
        out
    );
    layout!(
        mirrors,
        MoeH16Args,
        "frt_moe_h16_args",
        x,
        x_stride,
        y,
        route,
        k,
        n_pairs,
        n_used,
        n_experts,
        per_slot
    );
    layout!(
        mirrors,
        MoeMmArgs,
        "frt_moe_mm_args",
        ty = "type",
        glu,
        w,
        w2,
        row_bytes,
        expert_bytes,
        n_rows,
        k,
        n_pairs,
        n_experts,
        x,
        route,
        dst,
        dst_stride
    );
    mirrors.insert("(size_t) FRT_MOE_MAX_EXPERTS".into(), MOE_MAX_EXPERTS);

    let c = c_layout(mirrors.keys());
    assert_eq!(mirrors, c);
}

/// The same with kernels and without, and enough however the pairs are spread: the worst is one pair for each expert.
#[test]
fn routed_pairs_have_places_for_every_spread() {
    for n_experts in [1usize, 3, 8, 37, 128, 1024] {
        for n_pairs in [1usize, 7, 8, 9, 40, 4095, 16384] {
            let places = moe_max_rows(n_pairs as i32, n_experts as i32) as usize;
            assert_eq!(
                places,
                (n_pairs + 7 * n_experts).next_multiple_of(8),
                "{n_pairs}, {n_experts}"
            );
            let alone = n_pairs.min(n_experts) - 1;
            assert!(places >= 8 * alone + (n_pairs - alone).next_multiple_of(8));
            assert!(places >= n_pairs.next_multiple_of(8));
        }
    }
}

/// Evaluates C expressions over the header.
fn c_layout<'a>(expressions: impl Iterator<Item = &'a String>) -> BTreeMap<String, usize> {
    let prints: String = expressions
        .map(|e| format!("    printf(\"%s=%zu\\n\", \"{e}\", {e});\n"))
        .collect();
    let program = format!(
        "#include <stddef.h>\n#include <stdio.h>\n#include \"flashrt_kernels.h\"\nint main(void) {{\n{prints}    return 0;\n}}\n"
    );
    let dir = tempfile::tempdir().unwrap();
    let (source, binary) = (dir.path().join("layout.c"), dir.path().join("layout"));
    std::fs::write(&source, program).unwrap();
    let compiler = std::env::var("CC").unwrap_or_else(|_| "cc".into());
    let csrc = Path::new(env!("CARGO_MANIFEST_DIR")).join("csrc");
    let status = Command::new(compiler)
        .arg("-I")
        .arg(csrc)
        .arg(&source)
        .arg("-o")
        .arg(&binary)
        .status()
        .unwrap();
    assert!(status.success(), "the header compiles as C");
    let output = Command::new(&binary).output().unwrap();
    let lines = String::from_utf8(output.stdout).unwrap();
    let value = |line: &str| {
        line.split_once('=')
            .map(|(e, n)| (e.to_string(), n.parse().unwrap()))
            .unwrap()
    };
    lines.lines().map(value).collect()
}
