//! The shared segment of a process group: its layout, and how ranks wait for each other in it.
//!
//! `argosy.collective.segment` and `argosy._exchange` have the same layout in Python. No Python in here.
//!
//! S1  One word holds the arrivals and the abort: after an abort no rank arrives, so all survivors see the same end
//!     of a stage.

use std::sync::atomic::{fence, AtomicU32, AtomicU64, Ordering::SeqCst};
use std::time::{Duration, Instant};

const STATE_AT: usize = 64;
const BELL_AT: usize = 128;
const SLEEPERS_AT: usize = 192;
const FIRST_AT: usize = 4096;
const COUNTERS_AT: usize = 128;
const LAST_HEAD_AT: usize = 192;
const HEADS_AT: usize = 256;
pub const HEAD_BYTES: usize = 128;
pub const ABORT_DEADLINE: u32 = 0xFFFF_FFFE;
/// A waiter sleeps no longer than this before it reads the abort again.
const SLEEP: Duration = Duration::from_millis(20);
const YIELDS: usize = 12;

/// Why a wait ended without success.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Broken {
    Aborted = 1,
    Mismatch = 2,
    Deadline = 3,
    Interrupted = 4,
}

/// The counters of a rank: the pieces that it moved since the segment was made, modulo 2^32.
#[derive(Clone, Copy)]
pub enum Counter {
    Filled,
    Made,
    Taken,
}

/// Until when to wait, and a callback that can end the wait.
pub struct Patience<I: FnMut() -> bool> {
    pub deadline: Option<Instant>,
    pub interrupted: I,
}

/// One rank's view of a mapped segment.
pub struct Segment {
    address: usize,
    pub size: usize,
    pub rank: usize,
    /// Bytes of a slot, and how many slots a rank has for one operation; the next operation uses the other window.
    pub slot: usize,
    pub window: usize,
    stride: usize,
    head_stride: usize,
}

/// Whether the count `value` has reached `target`, modulo 2^32.
pub fn reached(value: u32, target: u32) -> bool {
    value.wrapping_sub(target) as i32 >= 0
}

impl Segment {
    /// # Safety
    /// `address` is the start of a mapping that `argosy.collective` laid out and that outlives the value.
    pub unsafe fn at(address: usize, rank: usize) -> Self {
        let word = |offset: usize| *((address + offset) as *const u32) as usize;
        Segment {
            address,
            size: word(8),
            rank,
            slot: word(12),
            window: word(32),
            stride: *((address + 16) as *const u64) as usize,
            head_stride: word(24),
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the mapping outlives `self`, offsets of words are multiples of 4 inside it.
        unsafe { &*((self.address + offset) as *const AtomicU32) }
    }

    /// Arrivals of all ranks in the low half, the reason of the abort in the high one.
    fn state(&self) -> &AtomicU64 {
        // SAFETY: as above; a multiple of 8.
        unsafe { &*((self.address + STATE_AT) as *const AtomicU64) }
    }

    fn region(&self, rank: usize) -> usize {
        FIRST_AT + rank * self.stride
    }

    /// How many times `rank` has arrived, modulo 2^32.
    pub fn stage(&self, rank: usize) -> u32 {
        self.word(self.region(rank)).load(SeqCst)
    }

    /// Slot `index` of `rank` for the operation of `stage`. Two operations in a row share none.
    pub fn slot_of(&self, rank: usize, stage: u32, index: usize) -> *mut u8 {
        let heads = (HEADS_AT + 2 * self.head_stride).next_multiple_of(4096);
        let place = (stage % 2) as usize * self.window + index % self.window;
        (self.address + self.region(rank) + heads + place * self.slot) as *mut u8
    }

    /// The request of `rank` in `stage`: the head, then the sizes that it sends and receives.
    pub fn head(&self, rank: usize, stage: u32) -> *mut u8 {
        (self.address + self.region(rank) + HEADS_AT + (stage % 2) as usize * self.head_stride) as *mut u8
    }

    /// Record which head is the newest, to explain a hang.
    pub fn note_head(&self, stage: u32) {
        self.word(self.region(self.rank) + LAST_HEAD_AT).store(stage % 2, SeqCst);
    }

    pub fn count(&self, rank: usize, counter: Counter) -> u32 {
        self.word(self.region(rank) + COUNTERS_AT + 4 * counter as usize).load(SeqCst)
    }

    pub fn set_count(&self, counter: Counter, value: u32) {
        self.word(self.region(self.rank) + COUNTERS_AT + 4 * counter as usize).store(value, SeqCst);
    }

    pub fn is_aborted(&self) -> bool {
        self.state().load(SeqCst) >> 32 != 0
    }

    /// End every wait in the segment, now and later. The first reason stays; true if it is this one.
    pub fn abort(&self, code: u32) -> bool {
        let put = |state: u64| (state >> 32 == 0).then_some(state | (code as u64) << 32);
        let won = self.state().fetch_update(SeqCst, SeqCst, put).is_ok();
        self.word(BELL_AT).fetch_add(1, SeqCst);
        wake_all(self.word(BELL_AT));
        won
    }

    /// Wake the sleeping ranks.
    pub fn ring(&self) {
        fence(SeqCst);
        if self.word(SLEEPERS_AT).load(SeqCst) != 0 {
            self.word(BELL_AT).fetch_add(1, SeqCst);
            wake_all(self.word(BELL_AT));
        }
    }

    /// Arrive at the end of `stage` and wait until all ranks have.
    pub fn arrive<I: FnMut() -> bool>(&self, stage: u32, patience: &mut Patience<I>) -> Result<(), Broken> {
        let next = stage.wrapping_add(1);
        let all = next.wrapping_mul(self.size as u32);
        let add = |state: u64| (state >> 32 == 0).then(|| (state as u32).wrapping_add(1) as u64);
        self.state().fetch_update(SeqCst, SeqCst, add).map_err(|_| Broken::Aborted)?;
        self.word(self.region(self.rank)).store(next, SeqCst);
        let complete = || reached(self.state().load(SeqCst) as u32, all);
        if complete() {
            self.ring();
            return Ok(());
        }
        self.wait(complete, patience)
    }

    /// Wait until `done`, even if the segment is aborted meanwhile.
    pub fn wait<I: FnMut() -> bool>(
        &self,
        done: impl Fn() -> bool,
        patience: &mut Patience<I>,
    ) -> Result<(), Broken> {
        for _ in 0..YIELDS {
            // SAFETY: takes nothing, only gives up the core.
            unsafe { libc::sched_yield() };
            if done() {
                return Ok(());
            }
        }
        self.word(SLEEPERS_AT).fetch_add(1, SeqCst);
        let end = self.sleep_until(done, patience);
        self.word(SLEEPERS_AT).fetch_sub(1, SeqCst);
        end
    }

    fn sleep_until<I: FnMut() -> bool>(
        &self,
        done: impl Fn() -> bool,
        patience: &mut Patience<I>,
    ) -> Result<(), Broken> {
        let bell = self.word(BELL_AT);
        for sleeps in 1.. {
            let heard = bell.load(SeqCst);
            if done() {
                return Ok(());
            }
            if self.is_aborted() {
                return if done() { Ok(()) } else { Err(Broken::Aborted) };
            }
            let left = patience.deadline.map(|at| at.saturating_duration_since(Instant::now()));
            // A rank that gives up ends the stage for all, also for ranks that arrive later.
            let gives_up = match left {
                Some(left) if left.is_zero() => Some((ABORT_DEADLINE, Broken::Deadline)),
                _ if sleeps % 8 == 0 && (patience.interrupted)() => {
                    Some((self.rank as u32 + 1, Broken::Interrupted))
                }
                _ => None,
            };
            if let Some((code, broken)) = gives_up {
                let won = self.abort(code);
                return match broken {
                    Broken::Deadline if done() => Ok(()),
                    Broken::Deadline if !won => Err(Broken::Aborted),
                    _ => Err(broken),
                };
            }
            wait_on(bell, heard, SLEEP.min(left.unwrap_or(SLEEP)));
        }
        unreachable!()
    }
}

fn wait_on(word: &AtomicU32, expected: u32, most: Duration) {
    let time = libc::timespec { tv_sec: 0, tv_nsec: most.as_nanos().min(999_999_999) as libc::c_long };
    // SAFETY: word and time outlive the call; the kernel only reads them.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAIT, expected, &time, 0, 0) };
}

fn wake_all(word: &AtomicU32) {
    // SAFETY: the kernel uses the address as a name only.
    unsafe { libc::syscall(libc::SYS_futex, word, libc::FUTEX_WAKE, i32::MAX, 0, 0, 0) };
}
