#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Compiles FlashAttention-4's forward kernel ahead of time, to C headers and objects. Needs no GPU and no torch.

    generate.py --arch sm_90a --out DIR NAME...      names of build/fa4/modules.json

`cargo xtask fa4` runs it with the packages pinned in third_party/pins.toml. A module computes, for each stream and head,

    o[t][h] = softmax(scale * q[t][h] . k[j][h / r] + mask[t][j]) . v[j][h / r],    r = n_heads / n_heads_kv

over the tiles that two lists name for each tile of queries: in the tiles of the first list the f16 mask is added, those of the second
are taken as they are, all others are left out. Lists ascend. A query without any visible key gives 0.

What differs from the package's own kernel:
- the mask is added, in pairs of f16, where the package would ask a function whether a score stays. So one kernel is right for every
  mask, and costs no more for those of 0 and -inf;
- tiles of queries run from last to first: in a causal mask the last are the longest.
"""
import argparse
import importlib
import importlib.abc
import importlib.machinery
import json
import os
import sys
import types
from pathlib import Path

HERE = Path(__file__).resolve().parent


class StandIn(types.ModuleType):
    """Any module of torch. Importing the kernels names types of it and runs nothing."""

    __path__ = []

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {"__class_getitem__": classmethod(lambda cls, item: cls)})
        setattr(self, name, made)
        return made


class TorchFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return StandIn(spec.name)

    def exec_module(self, module):
        module.__version__ = "2.10.0"
        if module.__name__ == "torch":
            module.cuda = importlib.import_module("torch.cuda")
            module.cuda.is_available = lambda: False


def without_init(package):
    """Makes a package importable without its __init__, which wants torch's operators."""
    relative = Path(*package.split("."))
    base = next(str(Path(p) / relative) for p in sys.path if (Path(p) / relative).is_dir())
    module = types.ModuleType(package)
    module.__path__ = [base]
    module.__spec__ = importlib.machinery.ModuleSpec(package, None, is_package=True)
    module.__spec__.submodule_search_locations = [base]
    sys.modules[package] = module


parser = argparse.ArgumentParser(description="Compiles attention modules")
parser.add_argument("--arch", default="sm_90a")
parser.add_argument("--out", required=True, type=Path)
parser.add_argument("--table", type=Path, default=HERE / "modules.json")
parser.add_argument("name", nargs="+")
options = parser.parse_args()

# Read by the compiler when it is imported.
os.environ["CUTE_DSL_ARCH"] = os.environ["FLASH_ATTENTION_ARCH"] = options.arch
os.environ["CUTE_DSL_NO_CACHE"] = "1"
os.environ["TVM_FFI_DISABLE_TORCH_C_DLPACK"] = "1"
sys.meta_path.insert(0, TorchFinder())
for package in ("quack", "flash_attn.cute"):
    without_init(package)

import cuda.bindings.driver as cuda  # noqa: E402
import cutlass  # noqa: E402
import cutlass.cute as cute  # noqa: E402
import quack.dsl  # noqa: E402,F401  indexing of tensors
from cutlass import Float16, Float32, Int32, Int64, const_expr  # noqa: E402
from flash_attn.cute import mask as fa_mask  # noqa: E402
from flash_attn.cute import utils as fa_utils  # noqa: E402
from flash_attn.cute.block_sparsity import BlockSparseTensors  # noqa: E402
from flash_attn.cute.utils import AuxData  # noqa: E402
from quack import layout_utils  # noqa: E402

HOPPER = options.arch.startswith("sm_90")
if HOPPER:
    from flash_attn.cute import flash_fwd_sm90 as fa_kernel  # noqa: E402
else:
    from flash_attn.cute import flash_fwd_sm100 as fa_kernel  # noqa: E402

# A batch entry is a stream and a head of K: the heads of Q that share it have numbers below this, so all of them find head 0.
ONE_KV_HEAD = 1 << 20


def never_asked(*_):
    raise AssertionError("the mask is added, not asked")


class AddedMask(fa_mask.AttentionMask):
    """In tiles of the first list: adds aux_data.tensors[0][query, key] * aux_data.scalars[0] to a score."""

    @cute.jit
    def apply_mask(
        self,
        acc_S: cute.Tensor,
        batch_idx: Int32,
        head_idx: Int32,
        m_block: Int32,
        n_block: Int32,
        thr_mma: cute.TiledMma,
        mask_seqlen: cutlass.Constexpr[bool],
        mask_causal: cutlass.Constexpr[bool],
        mask_local: cutlass.Constexpr[bool] = False,
        mask_mod: cutlass.Constexpr = None,
        aux_data: AuxData = AuxData(),
        fastdiv_mods=(None, None),
    ) -> None:
        if const_expr(mask_mod is None):
            fa_mask.AttentionMask.apply_mask(
                self, acc_S, batch_idx, head_idx, m_block, n_block, thr_mma, mask_seqlen, mask_causal, mask_local
            )
        else:
            scores = layout_utils.reshape_acc_to_mn(acc_S)
            tile = cute.make_identity_tensor((self.tile_m, self.tile_n))
            mine = layout_utils.reshape_acc_to_mn(thr_mma.partition_C(tile))
            # Of thread 0, whose columns are known when this is compiled.
            first = layout_utils.reshape_acc_to_mn(thr_mma.get_slice(0).partition_C(tile))
            mask = aux_data.tensors[0]
            factor = aux_data.scalars[0]
            column = mine[0][1] + n_block * self.tile_n
            for r in cutlass.range_constexpr(cute.size(scores.shape[0])):
                # Rows behind the last query have no mask; what they give is not stored.
                query = cutlass.min(mine[r, 0][0] + m_block * self.tile_m, self.seqlen_q - 1)
                row = mask[batch_idx, query, None].iterator
                for c in cutlass.range_constexpr(0, cute.size(scores.shape[1]), 2):
                    key = column + first[0, c][1]
                    at = key
                    if const_expr(mask_seqlen):
                        # The even key at or before the last: its pair lies within the row's stride.
                        at = cutlass.min(key, (self.seqlen_k - 1) & Int32(-2))
                    source = cute.make_tensor(
                        cute.make_ptr(Float16, (row + at).toint(), cute.AddressSpace.gmem, assumed_align=4),
                        cute.make_layout(2),
                    )
                    pair = cute.make_rmem_tensor(2, Float16)
                    cute.autovec_copy(source, pair)
                    for i in cutlass.range_constexpr(2):
                        score = scores[r, c + i] + pair[i].to(Float32) * factor
                        if const_expr(mask_seqlen):
                            score = -Float32.inf if key + i >= self.seqlen_k else score
                        scores[r, c + i] = score


def longest_first():
    """Makes the kernel order its tiles as it does for a causal mask."""
    arguments = fa_kernel.TileSchedulerArguments
    fa_kernel.TileSchedulerArguments = lambda *a, **k: arguments(*a, **{**k, "lpt": True})
    fa_kernel.SingleTileScheduler = fa_kernel.SingleTileLPTScheduler


fa_kernel.AttentionMask = AddedMask
# Knows no nested strides; the entry assumes what it would.
fa_kernel.assume_tensor_aligned = lambda tensor: tensor
# Keys are clamped above, so nothing has to be divided.
fa_utils.compute_fastdiv_mods = lambda *_, **__: None
if HOPPER:
    longest_first()


def kernel_of(module):
    head_dim, head_dim_v = module["head_dim"], module["head_dim_v"]
    tile_m, tile_n = module["tile_m"], module["tile_n"]
    if HOPPER:
        return fa_kernel.FlashAttentionForwardSm90(
            Float16,
            head_dim,
            head_dim_v,
            ONE_KV_HEAD,
            is_causal=False,
            is_local=False,
            pack_gqa=False,
            tile_m=tile_m,
            tile_n=tile_n,
            num_stages=2,
            num_threads=(tile_m // 64 + 1) * 128,
            Q_in_regs=False,
            intra_wg_overlap=True,
            mma_pv_is_rs=module["pv_in_registers"],
            mask_mod=never_asked,
            has_aux_tensors=True,
            q_subtile_factor=1,
        )
    raise SystemExit(f"no modules for {options.arch}")


def entry_of(module):
    kernel = kernel_of(module)
    d, dv = module["head_dim"], module["head_dim_v"]

    @cute.jit
    def entry(
        q: cute.Pointer,
        k: cute.Pointer,
        v: cute.Pointer,
        o: cute.Pointer,
        mask: cute.Pointer,
        partial_count: cute.Pointer,
        partial_index: cute.Pointer,
        full_count: cute.Pointer,
        full_index: cute.Pointer,
        n_tokens: Int32,
        n_kv: Int32,
        n_heads: Int32,
        n_heads_kv: Int32,
        n_streams: Int32,
        n_token_tiles: Int32,
        n_key_tiles: Int32,
        q_stream: Int64,
        q_token: Int64,
        q_head: Int64,
        k_stream: Int64,
        k_row: Int64,
        k_head: Int64,
        v_stream: Int64,
        v_row: Int64,
        v_head: Int64,
        o_stream: Int64,
        o_token: Int64,
        o_head: Int64,
        mask_stream: Int64,
        mask_token: Int64,
        scale: Float32,
        mask_factor: Float32,
        stream: cuda.CUstream,
    ):
        layout = cute.make_layout
        group = n_heads // n_heads_kv
        batch = (n_heads_kv, n_streams)

        def operand(pointer, rows, heads, values, strides):
            stream, row, shared, head = [cute.assume(s, divby=8) for s in strides]
            return cute.make_tensor(pointer, layout((batch, rows, heads, values), stride=((shared, stream), row, head, 1)))

        tq = operand(q, n_tokens, group, d, (q_stream, q_token, q_head * group, q_head))
        to = operand(o, n_tokens, group, dv, (o_stream, o_token, o_head * group, o_head))
        tk = operand(k, n_kv, 1, d, (k_stream, k_row, k_head, k_head))
        tv = operand(v, n_kv, 1, dv, (v_stream, v_row, v_head, v_head))
        # Streams may share a mask, and with it its tiles.
        plane = n_token_tiles
        if mask_stream == 0:
            plane = Int32(0)
        counts = layout((batch, 1, n_token_tiles), stride=((0, plane), 0, 1))
        indices = layout((batch, 1, n_token_tiles, n_key_tiles), stride=((0, plane * n_key_tiles), 0, n_key_tiles, 1))
        lists = BlockSparseTensors(
            cute.make_tensor(partial_count, counts),
            cute.make_tensor(partial_index, indices),
            cute.make_tensor(full_count, counts),
            cute.make_tensor(full_index, indices),
        )
        tm = cute.make_tensor(mask, layout((batch, n_tokens, n_kv), stride=((0, mask_stream), mask_token, 1)))
        kernel(
            tq, tk, tv, to, None, scale,
            blocksparse_tensors=lists, aux_data=AuxData([tm], (mask_factor,)), stream=stream,
        )  # fmt: skip

    return entry


def arguments():
    def pointer(dtype, align):
        return cute.runtime.nullptr(dtype, cute.AddressSpace.gmem, assumed_align=align)

    rows = [pointer(Float16, 16) for _ in "qkvo"]
    lists = [pointer(Int32, 4) for _ in range(4)]
    return [*rows, pointer(Float16, 4), *lists, *[Int32(1)] * 7, *[Int64(8)] * 14, Float32(1), Float32(1), cuda.CUstream(0)]


# The host part is x86-64 without extensions: it must run where it was not compiled.
BASELINE = '--host-target "llvm -mtriple=x86_64-unknown-linux-gnu -mcpu=x86-64"'

table = {m["name"]: m for m in json.loads(options.table.read_text())["modules"]}
options.out.mkdir(parents=True, exist_ok=True)
for name in options.name:
    if name not in table:
        raise SystemExit(f"{options.table} has no module {name}")
    # "lists" of 2^31 entries would overflow in the kernel; the window keeps far below.
    compiled = cute.compile(entry_of(table[name]), *arguments(), options=BASELINE)
    compiled.export_to_c(str(options.out), f"fa4_{name}", f"fa4_{name}")
    print(f"fa4_{name}", flush=True)
