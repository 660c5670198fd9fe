//! The few CUDA runtime calls that caches, the self-check and the GPU tests need. Work goes through a stream the caller
//! owns, never through the default stream, which would wait for the host's.

use std::ffi::{c_int, c_void};
use std::marker::PhantomData;
use std::ptr;

use super::{ffi, CudaError, Launch};

const HOST_TO_DEVICE: c_int = 1;
const DEVICE_TO_HOST: c_int = 2;
const STREAM_NON_BLOCKING: u32 = 1;
const ATTRIBUTE_SM_COUNT: c_int = 16;
const ATTRIBUTE_CC_MAJOR: c_int = 75;
const ATTRIBUTE_CC_MINOR: c_int = 76;

/// Number of CUDA devices; an error also when there is no driver.
pub fn device_count() -> Result<i32, CudaError> {
    let mut count = 0;
    // SAFETY: writes `count`.
    CudaError::check(unsafe { ffi::cudaGetDeviceCount(&mut count) })?;
    Ok(count)
}

/// Ordinal of the calling thread's current device.
pub fn current_device() -> Result<i32, CudaError> {
    let mut device = 0;
    // SAFETY: writes `device`.
    CudaError::check(unsafe { ffi::cudaGetDevice(&mut device) })?;
    Ok(device)
}

/// Makes `device` the calling thread's current one.
pub fn set_device(device: i32) -> Result<(), CudaError> {
    // SAFETY: plain value.
    CudaError::check(unsafe { ffi::cudaSetDevice(device) })
}

/// `bytes` bytes of the current device's memory, the first `zeroed` of them set to zero on `stream`; [`free`] gives them back.
pub fn allocate(bytes: usize, zeroed: usize, stream: usize) -> Result<usize, CudaError> {
    let mut address = ptr::null_mut();
    // SAFETY: writes `address`.
    CudaError::check(unsafe { ffi::cudaMalloc(&mut address, bytes) })?;
    // SAFETY: the block holds at least `zeroed` bytes and lives until `free`.
    let set = CudaError::check(unsafe { ffi::cudaMemsetAsync(address, 0, zeroed.min(bytes), stream as *mut c_void) });
    set.inspect_err(|_| free(address as usize)).map(|()| address as usize)
}

/// Gives memory of [`allocate`] back. A failure means that the device is lost, and with it the memory.
pub fn free(address: usize) {
    // SAFETY: allocated by `allocate`, and whoever used it is done.
    let _ = CudaError::check(unsafe { ffi::cudaFree(address as *mut c_void) });
}

fn attribute(attribute: c_int, device: i32) -> Result<i32, CudaError> {
    let mut value = 0;
    // SAFETY: writes `value`.
    CudaError::check(unsafe { ffi::cudaDeviceGetAttribute(&mut value, attribute, device) })?;
    Ok(value)
}

/// A stream of our own, which does not synchronise with the default stream.
#[derive(Debug)]
pub struct Stream(*mut c_void);

impl Stream {
    /// On the current device.
    pub fn new() -> Result<Stream, CudaError> {
        let mut stream = ptr::null_mut();
        // SAFETY: writes `stream`.
        CudaError::check(unsafe { ffi::cudaStreamCreateWithFlags(&mut stream, STREAM_NON_BLOCKING) })?;
        Ok(Stream(stream))
    }

    /// `cudaStream_t`
    pub fn raw(&self) -> *mut c_void {
        self.0
    }

    /// Waits for all work on the stream and reports its errors.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        // SAFETY: the stream lives.
        CudaError::check(unsafe { ffi::cudaStreamSynchronize(self.0) })
    }

    /// Launch parameters for kernels on this stream of `device`.
    pub fn launch(&self, device: i32, pdl: bool) -> Result<Launch, CudaError> {
        let cc = attribute(ATTRIBUTE_CC_MAJOR, device)? * 10 + attribute(ATTRIBUTE_CC_MINOR, device)?;
        Ok(Launch {
            stream: self.0,
            pdl: pdl.into(),
            sm_count: attribute(ATTRIBUTE_SM_COUNT, device)?,
            cc,
        })
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`, not destroyed before. A failure here was reported by an earlier call.
        let _ = CudaError::check(unsafe { ffi::cudaStreamDestroy(self.0) });
    }
}

/// Plain values that may be copied to the device and back byte by byte.
pub trait Plain: Copy + Default {}
impl Plain for u8 {}
impl Plain for i8 {}
impl Plain for u16 {}
impl Plain for i32 {}
impl Plain for i64 {}
impl Plain for f32 {}

/// Device memory for `len` values of `T`, freed on drop.
#[derive(Debug)]
pub struct Buffer<T: Plain> {
    ptr: *mut c_void,
    len: usize,
    of: PhantomData<T>,
}

impl<T: Plain> Buffer<T> {
    /// Uninitialised, on the current device. Not while a stream is being captured. Ends on a whole number of 16 bytes, as a
    /// tensor in a buffer of ggml does: mat-vecs copy weights in such pieces.
    pub fn new(len: usize) -> Result<Buffer<T>, CudaError> {
        let mut ptr = ptr::null_mut();
        let bytes = (len.max(1) * size_of::<T>()).next_multiple_of(16);
        // SAFETY: writes `ptr`.
        CudaError::check(unsafe { ffi::cudaMalloc(&mut ptr, bytes) })?;
        Ok(Buffer {
            ptr,
            len,
            of: PhantomData,
        })
    }

    /// With a copy of `values`, which may be dropped afterwards.
    pub fn from_slice(values: &[T], stream: &Stream) -> Result<Buffer<T>, CudaError> {
        let buffer = Buffer::new(values.len())?;
        buffer.upload(values, stream)?;
        Ok(buffer)
    }

    /// Overwrites all values, after all earlier work on `stream`.
    pub fn upload(&self, values: &[T], stream: &Stream) -> Result<(), CudaError> {
        assert_eq!(values.len(), self.len, "as many values as the buffer holds");
        let bytes = size_of_val(values);
        // SAFETY: both ranges hold `len` values, and `values` outlives the copy.
        CudaError::check(unsafe {
            ffi::cudaMemcpyAsync(self.ptr, values.as_ptr().cast(), bytes, HOST_TO_DEVICE, stream.0)
        })?;
        stream.synchronize()
    }

    /// The values, after all earlier work on `stream`.
    pub fn to_vec(&self, stream: &Stream) -> Result<Vec<T>, CudaError> {
        let mut values = vec![T::default(); self.len];
        let bytes = size_of_val(values.as_slice());
        // SAFETY: both ranges hold `len` values, and `values` outlives the copy.
        CudaError::check(unsafe {
            ffi::cudaMemcpyAsync(values.as_mut_ptr().cast(), self.ptr, bytes, DEVICE_TO_HOST, stream.0)
        })?;
        stream.synchronize()?;
        Ok(values)
    }

    /// Sets every byte, in stream order.
    pub fn fill(&self, byte: u8, stream: &Stream) -> Result<(), CudaError> {
        // SAFETY: the range is this buffer's.
        CudaError::check(unsafe { ffi::cudaMemsetAsync(self.ptr, byte.into(), self.len * size_of::<T>(), stream.0) })
    }

    /// Device address of value `index`.
    pub fn at(&self, index: usize) -> *mut T {
        assert!(index <= self.len, "index {index} of a buffer of {}", self.len);
        self.ptr.cast::<T>().wrapping_add(index)
    }

    /// Device address of the first value.
    pub fn raw(&self) -> *mut T {
        self.ptr.cast()
    }
}

impl<T: Plain> Drop for Buffer<T> {
    fn drop(&mut self) {
        // SAFETY: from `cudaMalloc`, not freed before. A failure here was reported by an earlier call.
        let _ = CudaError::check(unsafe { ffi::cudaFree(self.ptr) });
    }
}
