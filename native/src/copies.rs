//! Copy memory through or past the caches. No Python in here.

/// # Safety
/// Both are good for `bytes` bytes; they may overlap.
pub unsafe fn copy(from: *const u8, to: *mut u8, bytes: usize) {
    std::ptr::copy(from, to, bytes);
}

/// Copy without filling the caches, for a destination that will not be read soon.
///
/// # Safety
/// Both are good for `bytes` bytes and do not overlap.
#[cfg(target_arch = "x86_64")]
pub unsafe fn copy_past_cache(from: *const u8, to: *mut u8, bytes: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_sfence, _mm_stream_si128};
    let head = to.align_offset(64).min(bytes);
    copy(from, to, head);
    let lines = (bytes - head) / 64;
    let (mut source, mut target) = (from.add(head).cast::<__m128i>(), to.add(head).cast::<__m128i>());
    for _ in 0..lines {
        let line = [0, 1, 2, 3].map(|i| _mm_loadu_si128(source.add(i)));
        for (i, part) in line.into_iter().enumerate() {
            _mm_stream_si128(target.add(i), part);
        }
        (source, target) = (source.add(4), target.add(4));
    }
    _mm_sfence();
    let done = head + lines * 64;
    copy(from.add(done), to.add(done), bytes - done);
}

/// # Safety
/// As above.
#[cfg(not(target_arch = "x86_64"))]
pub unsafe fn copy_past_cache(from: *const u8, to: *mut u8, bytes: usize) {
    copy(from, to, bytes);
}
