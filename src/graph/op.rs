//! Names of the ggml operations and types that matching looks at.
//!
//! `ggml_op` numbers move between llama.cpp versions, so the host hands over a table from its numbers to these codes. Type
//! numbers are part of the GGUF format and never move.

macro_rules! ops {
    ($($(#[$doc:meta])* $variant:ident = $code:literal, $name:literal;)*) => {
        /// An operation of a graph node, in our own numbering (stable: it is part of the C ABI and of recorded graphs).
        #[repr(u8)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum Op { $($(#[$doc])* $variant = $code,)* }

        impl Op {
            /// Every operation with a code of its own.
            pub const ALL: &'static [Op] = &[$(Op::$variant,)*];

            /// The operation with this code; codes of later versions read as [`Op::Other`].
            pub fn from_code(code: u8) -> Op {
                match code { $($code => Op::$variant,)* _ => Op::Other }
            }

            /// Name as `ggml_op_name` spells it.
            pub fn name(self) -> &'static str {
                match self { $(Op::$variant => $name,)* }
            }
        }
    };
}

ops! {
    /// Any operation that no window mentions.
    Other = 0, "OTHER";
    /// A leaf: weights or an input.
    None = 1, "NONE";
    /// A view of another tensor.
    View = 2, "VIEW";
    /// The same elements in another shape.
    Reshape = 3, "RESHAPE";
    /// Dimensions exchanged.
    Permute = 4, "PERMUTE";
    /// First two dimensions exchanged.
    Transpose = 5, "TRANSPOSE";
    /// Sum, the second operand broadcast.
    Add = 6, "ADD";
    /// Product, the second operand broadcast.
    Mul = 7, "MUL";
    /// x * scale + bias.
    Scale = 8, "SCALE";
    /// Root mean square normalisation of rows.
    RmsNorm = 9, "RMS_NORM";
    /// Mean and variance normalisation of rows.
    Norm = 10, "NORM";
    /// Matrix product with a weight.
    MulMat = 11, "MUL_MAT";
    /// Matrix product with selected experts.
    MulMatId = 12, "MUL_MAT_ID";
    /// Rotary position embedding.
    Rope = 13, "ROPE";
    /// Gated linear unit.
    Glu = 14, "GLU";
    /// Elementwise function.
    Unary = 15, "UNARY";
    /// Scatter of rows by index.
    SetRows = 16, "SET_ROWS";
    /// Gather of rows by index.
    GetRows = 17, "GET_ROWS";
    /// Copy with conversion.
    Cpy = 18, "CPY";
    /// Copy to contiguous memory.
    Cont = 19, "CONT";
    /// Attention in one operation.
    FlashAttnExt = 20, "FLASH_ATTN_EXT";
    /// Softmax with mask and ALiBi.
    SoftMax = 21, "SOFT_MAX";
    /// Limits to a range.
    Clamp = 22, "CLAMP";
    /// Bias of the selected experts.
    AddId = 23, "ADD_ID";
}

impl Op {
    /// Moves no data: the host skips such nodes, and so does a run of a window.
    pub fn is_view(self) -> bool {
        matches!(self, Op::None | Op::View | Op::Reshape | Op::Permute | Op::Transpose)
    }
}

macro_rules! dtypes {
    ($($variant:ident = $number:literal, $name:literal, $block:literal, $bytes:literal;)*) => {
        /// Element type of a tensor, by its number in the GGUF format. Variants are spelt as users know the types.
        #[allow(non_camel_case_types)]
        #[repr(i32)]
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        pub enum DType { $(#[doc = concat!("`", $name, "`: blocks of ", $block, " values in ", $bytes, " bytes.")] $variant = $number,)* }

        impl DType {
            /// Every known type.
            pub const ALL: &'static [DType] = &[$(DType::$variant,)*];

            /// The type with this GGUF number.
            pub fn from_number(number: i32) -> Option<DType> {
                match number { $($number => Some(DType::$variant),)* _ => None }
            }
            /// Name as ggml spells it.
            pub fn name(self) -> &'static str { match self { $(DType::$variant => $name,)* } }
            /// Values in a block.
            pub fn block_len(self) -> usize { match self { $(DType::$variant => $block,)* } }
            /// Bytes of a block.
            pub fn block_bytes(self) -> usize { match self { $(DType::$variant => $bytes,)* } }
        }
    };
}

dtypes! {
    F32 = 0, "f32", 1, 4;
    F16 = 1, "f16", 1, 2;
    Q4_0 = 2, "q4_0", 32, 18;
    Q4_1 = 3, "q4_1", 32, 20;
    Q5_0 = 6, "q5_0", 32, 22;
    Q5_1 = 7, "q5_1", 32, 24;
    Q8_0 = 8, "q8_0", 32, 34;
    Q8_1 = 9, "q8_1", 32, 36;
    Q2_K = 10, "q2_K", 256, 84;
    Q3_K = 11, "q3_K", 256, 110;
    Q4_K = 12, "q4_K", 256, 144;
    Q5_K = 13, "q5_K", 256, 176;
    Q6_K = 14, "q6_K", 256, 210;
    Q8_K = 15, "q8_K", 256, 292;
    IQ2_XXS = 16, "iq2_xxs", 256, 66;
    IQ2_XS = 17, "iq2_xs", 256, 74;
    IQ3_XXS = 18, "iq3_xxs", 256, 98;
    IQ1_S = 19, "iq1_s", 256, 50;
    IQ4_NL = 20, "iq4_nl", 32, 18;
    IQ3_S = 21, "iq3_s", 256, 110;
    IQ2_S = 22, "iq2_s", 256, 82;
    IQ4_XS = 23, "iq4_xs", 256, 136;
    I8 = 24, "i8", 1, 1;
    I16 = 25, "i16", 1, 2;
    I32 = 26, "i32", 1, 4;
    I64 = 27, "i64", 1, 8;
    F64 = 28, "f64", 1, 8;
    IQ1_M = 29, "iq1_m", 256, 56;
    BF16 = 30, "bf16", 1, 2;
    TQ1_0 = 34, "tq1_0", 256, 54;
    TQ2_0 = 35, "tq2_0", 256, 66;
    MXFP4 = 39, "mxfp4", 32, 17;
    NVFP4 = 40, "nvfp4", 64, 36;
    Q1_0 = 41, "q1_0", 128, 18;
    Q2_0 = 42, "q2_0", 64, 18;
}

impl DType {
    /// The type that ggml calls `name`, in any case.
    pub fn from_name(name: &str) -> Option<DType> {
        Self::ALL.iter().copied().find(|t| t.name().eq_ignore_ascii_case(name))
    }

    /// Bytes of a row of `n` values; `None` when they are no whole number of blocks or the size overflows.
    pub fn row_bytes(self, n: u64) -> Option<u64> {
        let (len, bytes) = (self.block_len() as u64, self.block_bytes() as u64);
        (n % len == 0).then(|| n / len)?.checked_mul(bytes)
    }
}
