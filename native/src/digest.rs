//! Copy strided boxes and sum their keyed digest in the same pass. No Python in here.
//!
//! Word i (32 bits) of the row-major tensor contributes `x_i * k[i mod 1024] * r(i div 1024)` modulo 2^64, with two
//! sets of keys. Missing bytes of a word count as zero, so the sums of disjoint boxes add up.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};

const WORDS: usize = 1024;
const BLOCK: usize = 4 * WORDS;
/// How many bytes ahead memory is prefetched.
const AHEAD: usize = 2048;

pub struct Keys {
    /// One more than used: the odd keys of a vector are loaded from the next word on.
    words: [[u32; WORDS + 8]; 2],
}

const fn mix(seed: u64) -> u64 {
    let mut z = seed.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

impl Keys {
    const fn new() -> Self {
        let mut words = [[0; WORDS + 8]; 2];
        let mut set = 0;
        while set < 2 {
            let mut i = 0;
            while i < WORDS {
                words[set][i] = (mix(((set as u64) << 32) | i as u64) >> 32) as u32 | 1;
                i += 1;
            }
            set += 1;
        }
        Keys { words }
    }
}

static KEYS: Keys = Keys::new();

/// The factor of block `index`: odd, so that it loses nothing modulo 2^64.
fn block_key(set: u64, index: u64) -> u64 {
    mix(mix(index) ^ (set + 1)) | 1
}

/// One strided copy: `run` bytes at a time, in three loops around it.
#[derive(Clone, Copy)]
pub struct Job {
    source: usize,
    /// 0: only sum.
    destination: usize,
    logical: u64,
    pub run: usize,
    counts: [usize; 3],
    source_strides: [i64; 3],
    destination_strides: [i64; 3],
    logical_strides: [i64; 3],
}

pub const JOB_BYTES: usize = 16 * 8;
pub type Sums = [u64; 2];

impl Job {
    pub fn parse(record: &[u8]) -> Job {
        let field = |i: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&record[8 * i..8 * i + 8]);
            i64::from_le_bytes(word)
        };
        let three = |i: usize| [field(i), field(i + 1), field(i + 2)];
        Job {
            source: field(0) as usize,
            destination: field(1) as usize,
            logical: field(2) as u64,
            run: field(3) as usize,
            counts: three(4).map(|count| count as usize),
            source_strides: three(7),
            destination_strides: three(10),
            logical_strides: three(13),
        }
    }

    fn bytes(&self) -> usize {
        self.run * self.counts.iter().product::<usize>()
    }

    /// Call `each` with source, destination (0: none) and logical position of every contiguous run.
    pub fn each_run(&self, mut each: impl FnMut(usize, usize, u64)) {
        let at = |strides: &[i64; 3], index: [usize; 3]| -> i64 {
            (0..3).map(|d| strides[d] * index[d] as i64).sum()
        };
        for i in 0..self.counts[0] {
            for j in 0..self.counts[1] {
                for k in 0..self.counts[2] {
                    let index = [i, j, k];
                    let source = (self.source as i64 + at(&self.source_strides, index)) as usize;
                    let destination = match self.destination {
                        0 => 0,
                        address => (address as i64 + at(&self.destination_strides, index)) as usize,
                    };
                    each(
                        source,
                        destination,
                        (self.logical as i64 + at(&self.logical_strides, index)) as u64,
                    );
                }
            }
        }
    }
}

/// # Safety
/// `source` and, if not null, `destination` must be valid for `length` bytes and must not overlap.
unsafe fn words_plain(source: *const u8, destination: *mut u8, first: usize, count: usize) -> Sums {
    let mut sums = [0u64; 2];
    for i in 0..count {
        let word = source.add(4 * i).cast::<u32>().read_unaligned();
        if !destination.is_null() {
            destination.add(4 * i).cast::<u32>().write_unaligned(word);
        }
        for (sum, keys) in sums.iter_mut().zip(&KEYS.words) {
            *sum = sum.wrapping_add(u64::from(word) * u64::from(keys[first + i]));
        }
    }
    sums
}

/// As `words_plain`. Each word is loaded once, so what is summed is what is stored.
///
/// # Safety
/// As `words_plain`; the CPU must have AVX2.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2")]
unsafe fn words_avx2(source: *const u8, destination: *mut u8, first: usize, count: usize) -> Sums {
    use std::arch::x86_64::*;
    // Stores that bypass the cache need an aligned address: the words before it are stored one by one.
    let before = if destination.is_null() { 0 } else { destination.align_offset(32) };
    let streams = !destination.is_null() && before % 4 == 0;
    let head = if streams { (before / 4).min(count) } else { 0 };
    let mut sums = words_plain(source, destination, first, head);
    let to = |offset: usize| if destination.is_null() { destination } else { destination.add(4 * offset) };
    let (source, destination, first, count) = (source.add(4 * head), to(head), first + head, count - head);
    let zero = _mm256_setzero_si256();
    let (mut a0, mut a1, mut b0, mut b1) = (zero, zero, zero, zero);
    let (keys_a, keys_b) = (KEYS.words[0].as_ptr().add(first), KEYS.words[1].as_ptr().add(first));
    let whole = count / 8;
    for i in 0..whole {
        let at = source.add(32 * i);
        if i % 2 == 0 {
            // The hardware's own prefetching stops at the end of a page.
            _mm_prefetch::<_MM_HINT_T0>(at.wrapping_add(AHEAD).cast());
        }
        let words = _mm256_loadu_si256(at.cast());
        if streams {
            _mm256_stream_si256(destination.add(32 * i).cast(), words);
        } else if !destination.is_null() {
            _mm256_storeu_si256(destination.add(32 * i).cast(), words);
        }
        let odd = _mm256_srli_epi64::<32>(words);
        let key = |keys: *const u32| _mm256_loadu_si256(keys.add(8 * i).cast());
        a0 = _mm256_add_epi64(a0, _mm256_mul_epu32(words, key(keys_a)));
        a1 = _mm256_add_epi64(a1, _mm256_mul_epu32(odd, key(keys_a.add(1))));
        b0 = _mm256_add_epi64(b0, _mm256_mul_epu32(words, key(keys_b)));
        b1 = _mm256_add_epi64(b1, _mm256_mul_epu32(odd, key(keys_b.add(1))));
    }
    let found = [_mm256_add_epi64(a0, a1), _mm256_add_epi64(b0, b1)];
    let done = 8 * whole;
    let rest = if destination.is_null() { destination } else { destination.add(4 * done) };
    let tail = words_plain(source.add(4 * done), rest, first + done, count - done);
    for set in 0..2 {
        let mut lanes = [0u64; 4];
        _mm256_storeu_si256(lanes.as_mut_ptr().cast(), found[set]);
        sums[set] = lanes.iter().fold(sums[set].wrapping_add(tail[set]), |sum, lane| sum.wrapping_add(*lane));
    }
    sums
}

/// # Safety
/// As `words_plain`.
unsafe fn words(source: *const u8, destination: *mut u8, first: usize, count: usize) -> Sums {
    #[cfg(target_arch = "x86_64")]
    if std::arch::is_x86_feature_detected!("avx2") {
        return words_avx2(source, destination, first, count);
    }
    words_plain(source, destination, first, count)
}

/// Copy and sum one contiguous run whose first byte is byte `logical` of the tensor.
///
/// # Safety
/// As `words_plain`, for `length` bytes.
unsafe fn run(source: *const u8, destination: *mut u8, logical: u64, length: usize, sums: &mut Sums) {
    let mut at = 0;
    while at < length {
        let position = logical + at as u64;
        let block = position / BLOCK as u64;
        let inside = (position % BLOCK as u64) as usize;
        let size = (BLOCK - inside).min(length - at);
        let from = source.add(at);
        let to = if destination.is_null() { destination } else { destination.add(at) };
        let found = part(from, to, inside, size);
        for (set, sum) in sums.iter_mut().enumerate() {
            *sum = sum.wrapping_add(found[set].wrapping_mul(block_key(set as u64, block)));
        }
        at += size;
    }
}

/// `size` bytes within one block, from its byte `inside` on.
///
/// # Safety
/// As `words_plain`, for `size` bytes.
unsafe fn part(source: *const u8, destination: *mut u8, inside: usize, size: usize) -> Sums {
    let head = ((4 - inside % 4) % 4).min(size);
    let middle = (size - head) / 4 * 4;
    let mut sums = [0u64; 2];
    let mut loose = |first: usize, last: usize| {
        for i in first..last {
            let byte = source.add(i).read();
            if !destination.is_null() {
                destination.add(i).write(byte);
            }
            let place = inside + i;
            let value = u64::from(byte) << (8 * (place % 4));
            for (sum, keys) in sums.iter_mut().zip(&KEYS.words) {
                *sum = sum.wrapping_add(value * u64::from(keys[place / 4]));
            }
        }
    };
    loose(0, head);
    loose(head + middle, size);
    if middle > 0 {
        let to = if destination.is_null() { destination } else { destination.add(head) };
        let found = words(source.add(head), to, (inside + head) / 4, middle / 4);
        sums[0] = sums[0].wrapping_add(found[0]);
        sums[1] = sums[1].wrapping_add(found[1]);
    }
    sums
}

/// # Safety
/// Every address that the job's strides reach must be valid; source and destination must not overlap.
unsafe fn perform(job: &Job) -> Sums {
    let mut sums = [0u64; 2];
    job.each_run(|source, destination, logical| {
        // SAFETY: the caller's promise; a destination of 0 is none.
        unsafe { run(source as *const u8, destination as *mut u8, logical, job.run, &mut sums) };
    });
    sums
}

/// As `perform`, with the job's source taken as an offset from `base`.
///
/// # Safety
/// As `perform`.
pub unsafe fn perform_moved(job: &Job, base: usize) -> Sums {
    let sums = perform(&Job { source: base + job.source, ..*job });
    fence_streams();
    sums
}

/// Perform all jobs on up to `threads` threads; returns the sums in the order of the jobs. One thread counts complete
/// jobs in `done`, in their order; several threads set it at the end.
///
/// # Safety
/// As `perform`, for each job; no destination may overlap another job's memory.
pub unsafe fn perform_all(jobs: &[Job], threads: usize, done: &AtomicU64) -> Vec<Sums> {
    let mut sums = vec![[0u64; 2]; jobs.len()];
    let total: usize = jobs.iter().map(Job::bytes).sum();
    if threads <= 1 || total < 1 << 20 {
        for (number, (sum, job)) in sums.iter_mut().zip(jobs).enumerate() {
            *sum = perform(job);
            fence_streams();
            done.store(number as u64 + 1, Ordering::Release);
        }
        return sums;
    }
    let mut parts = Vec::with_capacity(threads);
    let (mut left, mut places) = (jobs, sums.as_mut_slice());
    while !left.is_empty() {
        let mut bytes = 0;
        let wanted = total.div_ceil(threads);
        let count = left.iter().take_while(|job| (bytes < wanted, bytes += job.bytes()).0).count();
        let (mine, rest) = left.split_at(count);
        let (out, others) = std::mem::take(&mut places).split_at_mut(count);
        (left, places) = (rest, others);
        parts.push((mine, out));
    }
    let (more, parts) = (parts.len() - 1, Mutex::new(parts));
    let run = || {
        let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).pop();
        while let Some((mine, out)) = next() {
            for (sum, job) in out.iter_mut().zip(mine) {
                // SAFETY: the caller's promise holds for every job.
                *sum = unsafe { perform(job) };
            }
            fence_streams();
        }
    };
    on_threads(more, &run);
    done.store(jobs.len() as u64, Ordering::Release);
    sums
}

/// Call `run` here and on up to `more` threads, fewer if the system refuses to start them.
pub fn on_threads(more: usize, run: &(dyn Fn() + Sync)) {
    std::thread::scope(|scope| {
        for _ in 0..more {
            if std::thread::Builder::new().spawn_scoped(scope, run).is_err() {
                break;
            }
        }
        run();
    });
}

/// Other threads see streamed stores only after a fence of the thread that made them.
fn fence_streams() {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}
