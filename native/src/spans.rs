//! The writer of a ring of spans. `argosy.observe.spans` describes the layout. No Python in here.
//!
//! The caller holds the GIL, so that a ring has one writer at a time; readers are other processes.

use std::cell::Cell;
use std::sync::atomic::{
    fence, AtomicU32, AtomicU64,
    Ordering::{Relaxed, Release},
};

const HEADER_BYTES: usize = 4096;
const CAPACITY_AT: usize = 16;
const HEAD_AT: usize = 24;
const LANES_MAX: u32 = 0xFFFF;

static LANES: AtomicU32 = AtomicU32::new(0);

thread_local! {
    static LANE: Cell<u32> = const { Cell::new(u32::MAX) };
}

/// The number of this thread, in the order in which threads of the process record for the first time.
fn lane() -> u64 {
    LANE.with(|lane| {
        if lane.get() == u32::MAX {
            lane.set(LANES.fetch_add(1, Relaxed).min(LANES_MAX));
        }
        u64::from(lane.get())
    })
}

fn monotonic_ns() -> u64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a local that lives until the call returns.
    unsafe { libc::clock_gettime(libc::CLOCK_MONOTONIC, &raw mut time) };
    time.tv_sec as u64 * 1_000_000_000 + time.tv_nsec as u64
}

/// Write one record: word 3 is 0 while the others are written, so that no reader takes a torn one.
///
/// # Safety
/// `ring` is the address of a mapped ring that nobody unmaps meanwhile.
pub unsafe fn record(ring: usize, what: u64, argument: u64, step: u64) {
    // SAFETY: the header and the records that its capacity counts are mapped, and aligned to 8 bytes.
    unsafe {
        let word = |at: usize| AtomicU64::from_ptr((ring + at) as *mut u64);
        let (capacity, head) = (word(CAPACITY_AT).load(Relaxed), word(HEAD_AT).load(Relaxed));
        let at = HEADER_BYTES + (head % capacity.max(1)) as usize * 32;
        word(at + 24).store(0, Relaxed);
        fence(Release);
        word(at).store(monotonic_ns(), Relaxed);
        word(at + 8).store(what | lane() << 40, Relaxed);
        word(at + 16).store(argument, Relaxed);
        word(at + 24).store((head + 1) & 0xFFFF_FFFF | step << 32, Release);
        word(HEAD_AT).store(head + 1, Release);
    }
}
