//! The shared segment of a process group: where its words are, and how ranks wait for each other in it.
//!
//! `argosy._exchange` has the same layout in Python. No Python in here.

use std::sync::atomic::{fence, AtomicU32, Ordering::SeqCst};
use std::time::{Duration, Instant};

const ABORT_AT: usize = 64;
const BELL_AT: usize = 128;
const FIRST_AT: usize = 4096;
const LAST_HEAD_AT: usize = 192;
const HEADS_AT: usize = 256;
pub const HEAD_BYTES: usize = 128;
/// A waiter sleeps no longer than this before it reads the abort word again.
const SLEEP: Duration = Duration::from_millis(20);
const YIELDS: usize = 12;

/// How a wait ended other than by everybody's arrival.
#[derive(Clone, Copy, PartialEq, Debug)]
pub enum Broken {
    Aborted = 1,
    Mismatch = 2,
    Deadline = 3,
    Interrupted = 4,
}

/// One rank's view of a mapped segment.
pub struct Segment {
    address: usize,
    pub size: usize,
    pub rank: usize,
    /// Bytes of each of the three buffers of a rank.
    pub chunk: usize,
    stride: usize,
    head_stride: usize,
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
            chunk: word(12),
            stride: *((address + 16) as *const u64) as usize,
            head_stride: word(24),
        }
    }

    fn word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: the mapping outlives `self`, offsets of words are multiples of 4 inside it.
        unsafe { &*((self.address + offset) as *const AtomicU32) }
    }

    fn region(&self, rank: usize) -> usize {
        FIRST_AT + rank * self.stride
    }

    /// How many times `rank` has arrived, modulo 2^32.
    pub fn stage(&self, rank: usize) -> u32 {
        self.word(self.region(rank)).load(SeqCst)
    }

    /// The buffer of `rank` that is filled in `stage`.
    pub fn buffer(&self, rank: usize, stage: u32) -> *mut u8 {
        let heads = (HEADS_AT + 3 * self.head_stride).next_multiple_of(4096);
        (self.address + self.region(rank) + heads + (stage % 3) as usize * self.chunk) as *mut u8
    }

    /// The description of what `rank` wants in `stage`: head, then lengths of what it sends and receives.
    pub fn head(&self, rank: usize, stage: u32) -> *mut u8 {
        (self.address + self.region(rank) + HEADS_AT + (stage % 3) as usize * self.head_stride) as *mut u8
    }

    /// Say which head is the newest, for those who explain a hang.
    pub fn note_head(&self, stage: u32) {
        self.word(self.region(self.rank) + LAST_HEAD_AT).store(stage % 3, SeqCst);
    }

    pub fn is_aborted(&self) -> bool {
        self.word(ABORT_AT).load(SeqCst) != 0
    }

    fn all_arrived(&self, stage: u32) -> bool {
        (0..self.size).all(|rank| self.stage(rank).wrapping_sub(stage) as i32 >= 0)
    }

    /// Arrive at the end of `stage` and wait until all ranks did.
    ///
    /// An arrival of all counts more than an abort: so all survivors see the same end of an operation.
    pub fn arrive(
        &self,
        stage: u32,
        deadline: Option<Instant>,
        mut interrupted: impl FnMut() -> bool,
    ) -> Result<(), Broken> {
        let next = stage.wrapping_add(1);
        self.word(self.region(self.rank)).store(next, SeqCst);
        fence(SeqCst);
        let bell = self.word(BELL_AT);
        if self.all_arrived(next) {
            bell.store(next, SeqCst);
            wake_all(bell);
            return Ok(());
        }
        for _ in 0..YIELDS {
            // SAFETY: takes nothing, only gives up the core.
            unsafe { libc::sched_yield() };
            if self.all_arrived(next) {
                return Ok(());
            }
        }
        let mut sleeps = 0;
        loop {
            let heard = bell.load(SeqCst);
            if self.all_arrived(next) {
                return Ok(());
            }
            if self.is_aborted() {
                return if self.all_arrived(next) { Ok(()) } else { Err(Broken::Aborted) };
            }
            let mut sleep = SLEEP;
            if let Some(deadline) = deadline {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Err(Broken::Deadline);
                }
                sleep = sleep.min(left);
            }
            wait_on(bell, heard, sleep);
            sleeps += 1;
            if sleeps % 8 == 0 && interrupted() {
                return Err(Broken::Interrupted);
            }
        }
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
