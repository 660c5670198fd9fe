//! No panic and no error leaves the library otherwise than as a status and a text.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{c_char, CString};
use std::panic::{catch_unwind, AssertUnwindSafe};

thread_local! {
    static LAST_ERROR: RefCell<CString> = RefCell::default();
}

/// What went wrong in the last call on this thread that did not return `FLASHRT_STATUS_OK`; empty when none did.
/// Valid until the next call on this thread.
#[no_mangle]
pub extern "C" fn flashrt_last_error() -> *const c_char {
    LAST_ERROR
        .try_with(|text| text.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// Keeps `text` for [`flashrt_last_error`].
pub(super) fn set_last_error(text: &str) {
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // A thread that is already tearing down its locals has nobody left to read the text.
    let _ = LAST_ERROR.try_with(|last| *last.borrow_mut() = text);
}

/// Runs `body`; a panic in it is reported to `on_panic` as text and answered with what that returns.
pub(super) fn guarded<T>(entry: &str, on_panic: impl FnOnce(&str) -> T, body: impl FnOnce() -> T) -> T {
    catch_unwind(AssertUnwindSafe(body)).unwrap_or_else(|payload| {
        let text = format!("{entry}: internal error: {}", panic_text(payload.as_ref()));
        // The payload is foreign code whose destructor may panic again.
        std::mem::forget(payload);
        set_last_error(&text);
        on_panic(&text)
    })
}

fn panic_text(payload: &(dyn Any + Send)) -> &str {
    payload
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("panic without a message")
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last_error() -> String {
        // SAFETY: the string is valid until the next call on this thread.
        unsafe { CStr::from_ptr(flashrt_last_error()) }
            .to_string_lossy()
            .into_owned()
    }

    #[test]
    fn a_panic_becomes_the_fallback_and_a_text() {
        let answer = guarded("flashrt_test", |_| -1, || panic!("lost {}", 7));
        assert_eq!(answer, -1);
        assert_eq!(last_error(), "flashrt_test: internal error: lost 7");
    }

    #[test]
    fn a_nul_in_the_text_does_not_cut_it() {
        set_last_error("a\0b");
        assert_eq!(last_error(), "a b");
    }
}
