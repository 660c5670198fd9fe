//! What the GPU tests share: a device or a reason to skip, and output buffers that notice what a kernel must not do.

#![allow(dead_code)] // each test file uses its part

use ggml_flashrt::kernel::cudart::{current_device, device_count, Buffer, Plain, Stream};
use ggml_flashrt::kernel::{archs, mm_supports, Glu, Launch, H16, Q8};
use ggml_flashrt::reference::h16::{lay_out, H16Row};
use ggml_flashrt::reference::quant::{DType, Q8Row};
use ggml_flashrt::reference::{compare, Bounded};

/// A device to run on.
pub struct Gpu {
    pub stream: Stream,
    device: i32,
}

impl Gpu {
    /// `None`, with the reason printed, where kernels cannot run; a failure if `FLASHRT_REQUIRE_CUDA` is set.
    pub fn open() -> Option<Gpu> {
        let open = || {
            if device_count()? == 0 {
                return Ok(None);
            }
            Ok(Some(Gpu {
                stream: Stream::new()?,
                device: current_device()?,
            }))
        };
        let why = match open() {
            Ok(Some(gpu)) => return Some(gpu),
            Ok(None) => "no CUDA device".to_string(),
            Err::<_, ggml_flashrt::kernel::CudaError>(e) => format!("no CUDA device: {e}"),
        };
        let required = std::env::var("FLASHRT_REQUIRE_CUDA").is_ok_and(|v| v != "0");
        assert!(!required, "FLASHRT_REQUIRE_CUDA is set: {why}");
        println!("skipped: {why}");
        None
    }

    /// The same for kernels that exist on sm_90a alone; a failure if this is such a device and they do not run.
    pub fn with_mat_muls() -> Option<Gpu> {
        let gpu = Gpu::open()?;
        let expected = archs().contains("sm_90a") && gpu.launch(false).cc == 90;
        assert_eq!(
            mm_supports(DType::F16 as i32, 64, Glu::None),
            expected,
            "tensor-core kernels"
        );
        if !expected {
            println!("skipped: no tensor-core kernels for this device");
        }
        expected.then_some(gpu)
    }

    pub fn launch(&self, pdl: bool) -> Launch {
        self.stream.launch(self.device, pdl).unwrap()
    }

    pub fn input<T: Plain>(&self, values: &[T]) -> Buffer<T> {
        Buffer::from_slice(values, &self.stream).unwrap()
    }

    /// An output of `len` values, poisoned.
    pub fn output<T: Plain>(&self, len: usize) -> Output<T> {
        self.output_over(&vec![None; len])
    }

    /// An output that lies over an input: `Some` values are there before, the others are poisoned.
    pub fn output_over<T: Plain>(&self, values: &[Option<T>]) -> Output<T> {
        let guard = GUARD_BYTES / size_of::<T>();
        let buffer = Buffer::new(values.len() + 2 * guard).unwrap();
        let output = Output {
            buffer,
            guard,
            before: values.to_vec(),
        };
        output.reset(&self.stream);
        output
    }
}

/// Keeps the payload on 256 bytes, and notices writes of any vector width beyond it.
const GUARD_BYTES: usize = 256;
/// Room to bring the payload of f16 rows onto their alignment.
const H16_GUARD: usize = 2 * H16::ALIGN;
/// Also NaN as f32, f16 and bf16.
const POISON: u8 = 0xff;

/// Device memory with guard words around it.
pub struct Output<T: Plain> {
    buffer: Buffer<T>,
    guard: usize,
    before: Vec<Option<T>>,
}

impl<T: Plain> Output<T> {
    /// Puts the values from before and the poison back.
    pub fn reset(&self, stream: &Stream) {
        self.buffer.fill(POISON, stream).unwrap();
        if self.before.iter().any(Option::is_some) {
            let poison: T = self.buffer.to_vec(stream).unwrap()[0];
            let mut all = vec![poison; self.before.len() + 2 * self.guard];
            for (value, before) in all[self.guard..].iter_mut().zip(&self.before) {
                *value = before.unwrap_or(poison);
            }
            self.buffer.upload(&all, stream).unwrap();
        }
    }

    pub fn raw(&self) -> *mut T {
        self.buffer.at(self.guard)
    }

    /// The payload; fails if a guard word was touched.
    pub fn read(&self, stream: &Stream) -> Vec<T> {
        let all = self.buffer.to_vec(stream).unwrap();
        let (head, rest) = all.split_at(self.guard);
        let (payload, tail) = rest.split_at(self.before.len());
        for (name, guard) in [("before", head), ("behind", tail)] {
            assert!(guard.iter().all(is_poison), "the kernel wrote {name} its output");
        }
        payload.to_vec()
    }

    /// `n_rows` rows of `n_cols` values, `stride` apart; fails if anything in between was touched.
    pub fn read_rows(&self, stream: &Stream, n_rows: usize, n_cols: usize, stride: usize) -> Vec<T> {
        let payload = self.read(stream);
        let mut rows = Vec::with_capacity(n_rows * n_cols);
        for (i, value) in payload.iter().enumerate() {
            if i / stride < n_rows && i % stride < n_cols {
                rows.push(*value);
            } else {
                let kept = self.before[i].map_or(is_poison(value), |before| bytes(&[before]) == bytes(&[*value]));
                assert!(kept, "the kernel wrote between its rows, at {i}");
            }
        }
        rows
    }
}

fn is_poison<T: Plain>(value: &T) -> bool {
    bytes(std::slice::from_ref(value)).iter().all(|&b| b == POISON)
}

/// The bytes of plain values, for comparisons that NaN cannot evade.
pub fn bytes<T: Plain>(values: &[T]) -> Vec<u8> {
    // SAFETY: plain values have no padding, and the slice covers exactly them.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast::<u8>(), size_of_val(values)) }.to_vec()
}

/// q8 blocks of `n_tokens` rows of `k` values, poisoned.
pub struct Q8Output {
    pub qs: Output<i8>,
    pub ds: Output<f32>,
}

impl Q8Output {
    pub fn new(gpu: &Gpu, n_tokens: usize, k: usize) -> Q8Output {
        Q8Output {
            qs: gpu.output(n_tokens * k),
            ds: gpu.output(n_tokens * k / 16),
        }
    }

    pub fn raw(&self) -> Q8 {
        Q8 {
            qs: self.qs.raw(),
            ds: self.ds.raw(),
        }
    }

    pub fn reset(&self, stream: &Stream) {
        self.qs.reset(stream);
        self.ds.reset(stream);
    }

    /// The blocks must be, bit by bit, what quantising `values` gives.
    pub fn expect(&self, stream: &Stream, values: &[f32], case: &str) {
        let want = Q8Row::quantize(values);
        assert_eq!(self.qs.read(stream), want.qs, "{case}: quants");
        assert_eq!(
            bytes(&self.ds.read(stream)),
            bytes(want.ds.as_flattened()),
            "{case}: scales and sums"
        );
    }
}

/// f16 rows of `n_tokens` rows of `k` values, poisoned.
pub struct H16Output {
    x: Buffer<u8>,
    scale: Output<f32>,
    k: usize,
    n_tokens: usize,
}

impl H16Output {
    pub fn new(gpu: &Gpu, n_tokens: usize, k: usize) -> H16Output {
        let output = H16Output {
            x: Buffer::new(H16::bytes(k, n_tokens) + 2 * H16_GUARD).unwrap(),
            scale: gpu.output(n_tokens),
            k,
            n_tokens,
        };
        output.reset(&gpu.stream);
        output
    }

    /// The payload lies on [`H16::ALIGN`], with at least that much poison on both sides.
    fn first(&self) -> usize {
        let start = self.x.raw() as usize;
        (start + H16::ALIGN).next_multiple_of(H16::ALIGN) - start
    }

    pub fn raw(&self) -> H16 {
        H16 {
            x: self.x.at(self.first()).cast(),
            scale: self.scale.raw(),
        }
    }

    pub fn reset(&self, stream: &Stream) {
        self.x.fill(POISON, stream).unwrap();
        self.scale.reset(stream);
    }

    /// Rows and scales as they lie.
    pub fn read(&self, stream: &Stream) -> (Vec<u8>, Vec<u8>) {
        let all = self.x.to_vec(stream).unwrap();
        let rows = all[self.first()..][..H16::bytes(self.k, self.n_tokens)].to_vec();
        (rows, bytes(&self.scale.read(stream)))
    }

    /// The rows must be, bit by bit, what converting `values` gives, and nothing else may have been written.
    pub fn expect(&self, stream: &Stream, values: &[f32], case: &str) {
        let rows: Vec<H16Row> = values.chunks(self.k).map(H16Row::new).collect();
        assert_eq!(rows.len(), self.n_tokens);
        let (want, scale) = lay_out(&rows);
        assert_eq!(bytes(&self.scale.read(stream)), bytes(&scale), "{case}: scales");
        let all = self.x.to_vec(stream).unwrap();
        let payload = self.first()..self.first() + want.len();
        for (i, (want, got)) in want.chunks(2).zip(all[payload.clone()].chunks(2)).enumerate() {
            let nan = |b: &[u8]| b[1] & 0x7c == 0x7c && b != [0, b[1] & 0xfc];
            // Which NaN it is does not matter, but where nothing is to be written the poison stays.
            let same = want == got || (nan(want) && nan(got) && want != [POISON; 2]);
            assert!(same, "{case}: f16 number {i} is {got:x?}, expected {want:x?}");
        }
        let outside = all[..payload.start].iter().chain(&all[payload.end..]);
        assert!(
            outside.clone().all(|b| *b == POISON),
            "{case}: the kernel wrote beside its f16 rows"
        );
    }
}

/// Uploads rows as q8 blocks, and says which values they stand for.
pub fn q8_input(gpu: &Gpu, rows: &[Vec<f32>]) -> (Buffer<i8>, Buffer<f32>, Vec<Bounded>) {
    let rows: Vec<Q8Row> = rows.iter().map(|row| Q8Row::quantize(row)).collect();
    let qs: Vec<i8> = rows.iter().flat_map(|row| row.qs.clone()).collect();
    let ds: Vec<f32> = rows.iter().flat_map(|row| row.ds.as_flattened().to_vec()).collect();
    let values = rows.iter().map(|row| Bounded::exact(&row.dequantize())).collect();
    (gpu.input(&qs), gpu.input(&ds), values)
}

/// Holds a result against the oracle.
pub fn expect(case: &str, what: &str, got: &[f32], want: &Bounded) {
    if let Err(mismatch) = compare(got, want) {
        panic!("{case}: {what}: {mismatch}");
    }
}

/// Rows padded to `stride` with what no kernel may read into a result.
pub fn strided(rows: &[Vec<f32>], stride: usize) -> Vec<f32> {
    let pad = |row: &Vec<f32>| {
        let mut row = row.clone();
        row.resize(stride, f32::NAN);
        row
    };
    rows.iter().flat_map(pad).collect()
}

pub fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().map(|&v| v.into()).collect()
}
