//! CUDA devices, through the driver library where there is one. Nothing is linked: a machine without a driver is a finding.

use super::root::{Reading, Root};
use serde::Serialize;
use std::ffi::{c_char, c_int, c_uint, c_void, CStr};
use std::mem::transmute_copy;

/// Driver and devices.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Cuda {
    /// Version of the kernel driver.
    pub driver: Reading<String>,
    /// Newest CUDA that the driver library offers.
    pub cuda_version: Reading<String>,
    /// Devices that this process may use.
    pub devices: Reading<Vec<Device>>,
}

/// A device.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Device {
    /// Number, as `CUDA_VISIBLE_DEVICES` leaves it.
    pub ordinal: i32,
    /// Name.
    pub name: String,
    /// Compute capability times 10.
    pub cc: i32,
    /// Does it share the machine's memory?
    pub integrated: bool,
    /// Multiprocessors.
    pub sm_count: i32,
    /// Its memory; that of the machine where it is integrated.
    pub memory_bytes: u64,
    /// What of it is free.
    pub free_bytes: Reading<u64>,
    /// Highest clock by the driver.
    pub clock_khz: Reading<i32>,
    /// Did every kernel of this build run there and give the right result?
    pub kernels: Reading<bool>,
}

impl Cuda {
    /// `check` runs the kernels of this build on a device.
    pub(super) fn read(root: &Root, check: impl Fn(i32) -> Result<(), String>) -> Cuda {
        const KERNEL: &str = "/sys/module/nvidia/version";
        let driver = Reading::new(KERNEL, root.text(KERNEL));
        if !root.is_live() {
            let why = "not asked about a copy of another machine's files";
            return Cuda {
                driver,
                cuda_version: Reading::unknown(why),
                devices: Reading::unknown(why),
            };
        }
        let library = match Library::open() {
            Ok(library) => library,
            Err(why) => {
                return Cuda {
                    driver,
                    cuda_version: Reading::unknown(why.clone()),
                    devices: Reading::unknown(why),
                }
            }
        };
        let devices = library.devices(check);
        Cuda {
            driver,
            cuda_version: Reading::new(Library::NAME, library.version()),
            devices: Reading::new(Library::NAME, devices),
        }
    }
}

/// `CUresult`
type Code = c_int;
type Context = *mut c_void;

const ATTRIBUTE_CLOCK: c_int = 13;
const ATTRIBUTE_SM_COUNT: c_int = 16;
const ATTRIBUTE_INTEGRATED: c_int = 18;
const ATTRIBUTE_CC_MAJOR: c_int = 75;
const ATTRIBUTE_CC_MINOR: c_int = 76;

/// The driver library's functions, by the names of cuda.h.
struct Library {
    driver_version: unsafe extern "C" fn(*mut c_int) -> Code,
    init: unsafe extern "C" fn(c_uint) -> Code,
    count: unsafe extern "C" fn(*mut c_int) -> Code,
    get: unsafe extern "C" fn(*mut c_int, c_int) -> Code,
    name: unsafe extern "C" fn(*mut c_char, c_int, c_int) -> Code,
    attribute: unsafe extern "C" fn(*mut c_int, c_int, c_int) -> Code,
    total: unsafe extern "C" fn(*mut usize, c_int) -> Code,
    retain: unsafe extern "C" fn(*mut Context, c_int) -> Code,
    release: unsafe extern "C" fn(c_int) -> Code,
    push: unsafe extern "C" fn(Context) -> Code,
    pop: unsafe extern "C" fn(*mut Context) -> Code,
    free: unsafe extern "C" fn(*mut usize, *mut usize) -> Code,
    error_name: unsafe extern "C" fn(Code, *mut *const c_char) -> Code,
}

impl Library {
    const NAME: &str = "libcuda.so.1";

    fn open() -> Result<Library, String> {
        // SAFETY: a library of the system; what its initialisers do is the driver's business. It is never closed, because the
        // functions below must stay.
        let handle = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        if handle.is_null() {
            // SAFETY: dlopen has just failed, so there is a message, valid until the next call on this thread.
            let why = unsafe { CStr::from_ptr(libc::dlerror()) }.to_string_lossy();
            return Err(format!("no CUDA driver library: {why}"));
        }
        Ok(Library {
            driver_version: symbol(handle, c"cuDriverGetVersion")?,
            init: symbol(handle, c"cuInit")?,
            count: symbol(handle, c"cuDeviceGetCount")?,
            get: symbol(handle, c"cuDeviceGet")?,
            name: symbol(handle, c"cuDeviceGetName")?,
            attribute: symbol(handle, c"cuDeviceGetAttribute")?,
            total: symbol(handle, c"cuDeviceTotalMem_v2")?,
            retain: symbol(handle, c"cuDevicePrimaryCtxRetain")?,
            release: symbol(handle, c"cuDevicePrimaryCtxRelease_v2")?,
            push: symbol(handle, c"cuCtxPushCurrent_v2")?,
            pop: symbol(handle, c"cuCtxPopCurrent_v2")?,
            free: symbol(handle, c"cuMemGetInfo_v2")?,
            error_name: symbol(handle, c"cuGetErrorName")?,
        })
    }

    fn check(&self, what: &str, code: Code) -> Result<(), String> {
        if code == 0 {
            return Ok(());
        }
        let mut name = std::ptr::null();
        // SAFETY: writes `name`, a literal of the library or null.
        let known = unsafe { (self.error_name)(code, &mut name) } == 0 && !name.is_null();
        let name = if known {
            // SAFETY: see above.
            unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
        } else {
            "error".to_owned()
        };
        Err(format!("{what}: {name} ({code})"))
    }

    fn version(&self) -> Result<String, String> {
        let mut version = 0;
        // SAFETY: writes `version`.
        self.check("cuDriverGetVersion", unsafe { (self.driver_version)(&mut version) })?;
        Ok(format!("{}.{}", version / 1000, version % 1000 / 10))
    }

    fn devices(&self, check: impl Fn(i32) -> Result<(), String>) -> Result<Vec<Device>, String> {
        // SAFETY: no pointers.
        self.check("cuInit", unsafe { (self.init)(0) })?;
        let mut count = 0;
        // SAFETY: writes `count`.
        self.check("cuDeviceGetCount", unsafe { (self.count)(&mut count) })?;
        (0..count).map(|ordinal| self.device(ordinal, &check)).collect()
    }

    fn device(&self, ordinal: i32, check: impl Fn(i32) -> Result<(), String>) -> Result<Device, String> {
        let mut device = 0;
        // SAFETY: writes `device`.
        self.check("cuDeviceGet", unsafe { (self.get)(&mut device, ordinal) })?;
        let mut name = [0 as c_char; 256];
        // SAFETY: writes at most the given length, the terminating zero included.
        self.check("cuDeviceGetName", unsafe {
            (self.name)(name.as_mut_ptr(), name.len() as c_int, device)
        })?;
        let mut total = 0;
        // SAFETY: writes `total`.
        self.check("cuDeviceTotalMem", unsafe { (self.total)(&mut total, device) })?;
        let attribute = |number| self.attribute(number, device);
        Ok(Device {
            ordinal,
            // SAFETY: zero-terminated by the call above, or still all zero.
            name: unsafe { CStr::from_ptr(name.as_ptr()) }.to_string_lossy().into_owned(),
            cc: attribute(ATTRIBUTE_CC_MAJOR)? * 10 + attribute(ATTRIBUTE_CC_MINOR)?,
            integrated: attribute(ATTRIBUTE_INTEGRATED)? != 0,
            sm_count: attribute(ATTRIBUTE_SM_COUNT)?,
            memory_bytes: total as u64,
            free_bytes: Reading::new("cuMemGetInfo", self.free(device)),
            clock_khz: Reading::new("cuDeviceGetAttribute", attribute(ATTRIBUTE_CLOCK)),
            kernels: Reading::new("the kernels of this build", check(ordinal).map(|()| true)),
        })
    }

    fn attribute(&self, number: c_int, device: c_int) -> Result<i32, String> {
        let mut value = 0;
        // SAFETY: writes `value`.
        self.check("cuDeviceGetAttribute", unsafe {
            (self.attribute)(&mut value, number, device)
        })?;
        Ok(value)
    }

    /// Free memory can only be asked for in a context; the primary one is the one that ggml will use.
    fn free(&self, device: c_int) -> Result<u64, String> {
        let mut context = std::ptr::null_mut();
        // SAFETY: writes `context`; given back below.
        self.check("cuDevicePrimaryCtxRetain", unsafe {
            (self.retain)(&mut context, device)
        })?;
        let (mut free, mut total) = (0, 0);
        // SAFETY: the context lives until the release; push and pop pair up on this thread.
        let asked = unsafe {
            self.check("cuCtxPushCurrent", (self.push)(context)).and_then(|()| {
                let asked = self.check("cuMemGetInfo", (self.free)(&mut free, &mut total));
                (self.pop)(&mut context);
                asked
            })
        };
        // SAFETY: retained above.
        let released = self.check("cuDevicePrimaryCtxRelease", unsafe { (self.release)(device) });
        asked.and(released).map(|()| free as u64)
    }
}

/// A function of the library. The caller names its type.
fn symbol<F: Copy>(handle: *mut c_void, name: &CStr) -> Result<F, String> {
    assert_eq!(size_of::<F>(), size_of::<*mut c_void>(), "a function pointer");
    // SAFETY: `handle` is open.
    let address = unsafe { libc::dlsym(handle, name.as_ptr()) };
    if address.is_null() {
        return Err(format!("{} has no {}", Library::NAME, name.to_string_lossy()));
    }
    // SAFETY: of the same size, not null, and the field's type is that of cuda.h.
    Ok(unsafe { transmute_copy(&address) })
}
