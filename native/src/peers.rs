//! Write into the memory of other processes. No Python in here.

use std::io::{Error, Result};
use std::sync::atomic::{fence, AtomicU64, Ordering};

use crate::digest::{Job, JOB_BYTES};

/// How many runs are passed to the kernel at a time; it accepts 1,024.
const RUNS: usize = 512;
pub const SEND_BYTES: usize = 32 + JOB_BYTES;
/// The value of a process's gate while others may write to its memory.
const OPEN: u64 = 1;

/// A copy into the memory of process `pid`, which `pidfd` refers to.
pub struct Send {
    pid: i32,
    pidfd: i32,
    /// The address of the gate in that process.
    gate: usize,
    /// The address in this process of the number of threads that are writing.
    busy: usize,
    job: Job,
}

impl Send {
    /// A record: process, its descriptor, its gate, our count, then those of a job.
    pub fn parse(record: &[u8]) -> Send {
        let word = |at: usize| i64::from_le_bytes(std::array::from_fn(|i| record[at + i]));
        Send {
            pid: word(0) as i32,
            pidfd: word(8) as i32,
            gate: word(16) as usize,
            busy: word(24) as usize,
            job: Job::parse(&record[32..]),
        }
    }

    /// Perform it, with its source taken as an offset from `base`.
    ///
    /// # Safety
    /// Every address of the source that the job's strides reach must be valid, and `busy` a word of ours.
    pub unsafe fn perform(&self, base: usize) -> Result<()> {
        let (mut own, mut others) = (Vec::with_capacity(RUNS), Vec::with_capacity(RUNS));
        let mut outcome = Ok(());
        self.job.each_run(|source, destination, _| {
            if outcome.is_ok() {
                join(&mut own, base + source, self.job.run);
                join(&mut others, destination, self.job.run);
                if own.len().max(others.len()) == RUNS {
                    outcome = self.write(&own, &others);
                    own.clear();
                    others.clear();
                }
            }
        });
        outcome.and_then(|()| self.write(&own, &others))
    }

    fn write(&self, own: &[libc::iovec], others: &[libc::iovec]) -> Result<()> {
        let wanted: usize = own.iter().map(|span| span.iov_len).sum();
        if wanted == 0 {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        let busy = unsafe { AtomicU64::from_ptr(self.busy as *mut u64) };
        // A process that closes its gate then reads this count: it sees the write, or this thread sees the closed gate.
        busy.fetch_add(1, Ordering::SeqCst);
        fence(Ordering::SeqCst);
        let outcome = self.write_if_open(own, others, wanted);
        busy.fetch_sub(1, Ordering::SeqCst);
        outcome
    }

    fn write_if_open(&self, own: &[libc::iovec], others: &[libc::iovec], wanted: usize) -> Result<()> {
        if has_ended(self.pidfd) {
            return Err(Error::from_raw_os_error(libc::ESRCH));
        }
        let gate: [u8; 8] = read(self.pid, self.gate, 8)?.try_into().unwrap_or_default();
        if u64::from_le_bytes(gate) != OPEN {
            return Err(Error::from_raw_os_error(libc::ECANCELED));
        }
        // The kernel reuses a pid only after all others, so not between the check and the call.
        let [from, to] = [own, others].map(|spans| spans.len() as libc::c_ulong);
        // SAFETY: `own` is memory of ours; the kernel checks the addresses of the other process.
        let written =
            unsafe { libc::process_vm_writev(self.pid, own.as_ptr(), from, others.as_ptr(), to, 0) };
        match written {
            n if n < 0 => Err(Error::last_os_error()),
            n if n as usize == wanted => Ok(()),
            _ => Err(Error::from_raw_os_error(libc::EFAULT)),
        }
    }
}

fn span(address: usize, length: usize) -> libc::iovec {
    libc::iovec { iov_base: address as *mut libc::c_void, iov_len: length }
}

/// Add a span, or extend the last one if it follows directly, which the kernel copies faster.
fn join(spans: &mut Vec<libc::iovec>, address: usize, length: usize) {
    match spans.last_mut() {
        Some(last) if last.iov_base as usize + last.iov_len == address => last.iov_len += length,
        _ => spans.push(span(address, length)),
    }
}

/// Whether the process has ended: then its pidfd is readable.
fn has_ended(pidfd: i32) -> bool {
    let mut look = libc::pollfd { fd: pidfd, events: libc::POLLIN, revents: 0 };
    // SAFETY: one entry, on the stack.
    unsafe { libc::poll(&mut look, 1, 0) != 0 }
}

/// `length` bytes at `address` of process `pid`.
pub fn read(pid: i32, address: usize, length: usize) -> Result<Vec<u8>> {
    let mut found = vec![0u8; length];
    let (own, other) = (span(found.as_mut_ptr() as usize, length), span(address, length));
    // SAFETY: `own` is the vector's memory; the kernel checks the address of the other process.
    let count = unsafe { libc::process_vm_readv(pid, &own, 1, &other, 1, 0) };
    match count {
        n if n < 0 => Err(Error::last_os_error()),
        n if n as usize == length => Ok(found),
        _ => Err(Error::from_raw_os_error(libc::EFAULT)),
    }
}
