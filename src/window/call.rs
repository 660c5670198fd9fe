//! A kernel call with all its arguments: what a plan is made of.

use crate::kernel::{
    self, CudaError, DecAttnArgs, GemvArgs, H16Args, Launch, MaskTilesArgs, MmArgs, MoeH16Args, MoeMmArgs,
    MoeRouteArgs, NormArgs, PrefillFa4Args, QkvTailArgs,
};

/// One launch.
#[derive(Debug, Clone, Copy)]
pub enum KernelCall {
    /// [`kernel::norm`]
    Norm(NormArgs),
    /// [`kernel::gemv`]
    Gemv(GemvArgs),
    /// [`kernel::qkv_tail`]
    QkvTail(QkvTailArgs),
    /// [`kernel::dec_attn`]
    DecAttn(DecAttnArgs),
    /// [`kernel::mask_tiles`]
    MaskTiles(MaskTilesArgs),
    /// [`kernel::prefill_fa4`]
    PrefillFa4(PrefillFa4Args),
    /// [`kernel::mm`]
    Mm(MmArgs),
    /// [`kernel::to_h16`]
    ToH16(H16Args),
    /// [`kernel::moe_route`]
    MoeRoute(MoeRouteArgs),
    /// [`kernel::moe_to_h16`]
    MoeToH16(MoeH16Args),
    /// [`kernel::moe_mm`]
    MoeMm(MoeMmArgs),
}

// SAFETY: the pointers are device addresses, which the host side never follows.
unsafe impl Send for KernelCall {}
// SAFETY: as above.
unsafe impl Sync for KernelCall {}

impl KernelCall {
    /// Launches the kernel.
    pub fn launch(&self, launch: Launch) -> Result<(), CudaError> {
        match self {
            KernelCall::Norm(args) => kernel::norm(args, launch),
            KernelCall::Gemv(args) => kernel::gemv(args, launch),
            KernelCall::QkvTail(args) => kernel::qkv_tail(args, launch),
            KernelCall::DecAttn(args) => kernel::dec_attn(args, launch),
            KernelCall::MaskTiles(args) => kernel::mask_tiles(args, launch),
            KernelCall::PrefillFa4(args) => kernel::prefill_fa4(args, launch),
            KernelCall::Mm(args) => kernel::mm(args, launch),
            KernelCall::ToH16(args) => kernel::to_h16(args, launch),
            KernelCall::MoeRoute(args) => kernel::moe_route(args, launch),
            KernelCall::MoeToH16(args) => kernel::moe_to_h16(args, launch),
            KernelCall::MoeMm(args) => kernel::moe_mm(args, launch),
        }
    }
}
