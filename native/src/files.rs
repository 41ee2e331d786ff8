//! Read and write files at many offsets from several threads; the bytes read are copied and summed. No Python in here.

use std::alloc::{alloc, dealloc, Layout};
use std::io::{Error, ErrorKind, Result};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::Mutex;

use crate::digest::{on_threads, perform_moved, Job, Sums};

const ALIGNMENT: usize = 4096;
/// The alignment of buffers to large pages, which a disk fills in fewer pieces: up to three times as fast.
const LARGE: usize = 2 << 20;

/// Write `length` bytes at `address` to `offset` of a file.
#[derive(Clone, Copy)]
pub struct Write {
    pub fd: i32,
    pub address: usize,
    pub offset: i64,
    pub length: usize,
}

/// Read `length` bytes at `offset` of a file; if at least `needed` were read, perform `jobs` on them.
#[derive(Clone, Copy)]
pub struct Read {
    pub fd: i32,
    pub offset: i64,
    pub length: usize,
    pub needed: usize,
    pub first_job: usize,
    pub jobs: usize,
}

/// Call `work` for 0..count on up to `threads` threads; the first error ends it.
fn spread(count: usize, threads: usize, work: impl Fn(usize) -> Result<()> + Sync) -> Result<()> {
    let next = AtomicUsize::new(0);
    let failure: Mutex<Option<Error>> = Mutex::new(None);
    let run = || loop {
        let i = next.fetch_add(1, Ordering::Relaxed);
        if i >= count {
            break;
        }
        if let Err(error) = work(i) {
            next.store(count, Ordering::Relaxed);
            let mut first = failure.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            first.get_or_insert(error);
        }
    };
    on_threads(threads.min(count).saturating_sub(1), &run);
    failure.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner).map_or(Ok(()), Err)
}

/// # Safety
/// Every address must be valid for its length until this returns.
pub unsafe fn write_all(writes: &[Write], threads: usize) -> Result<()> {
    spread(writes.len(), threads, |i| {
        let write = writes[i];
        let mut done = 0;
        while done < write.length {
            // SAFETY: the caller's promise.
            let count = unsafe {
                libc::pwrite(
                    write.fd,
                    (write.address + done) as *const libc::c_void,
                    write.length - done,
                    write.offset + done as i64,
                )
            };
            match count {
                0 => return Err(Error::from(ErrorKind::WriteZero)),
                n if n < 0 => {
                    let error = Error::last_os_error();
                    if error.kind() != ErrorKind::Interrupted {
                        return Err(error);
                    }
                }
                n => done += n as usize,
            }
        }
        Ok(())
    })
}

/// A buffer that O_DIRECT takes, one per thread.
struct Buffer {
    start: *mut u8,
    layout: Layout,
}

impl Buffer {
    fn new(size: usize) -> Result<Self> {
        let alignment = if size >= LARGE { LARGE } else { ALIGNMENT };
        let layout = Layout::from_size_align(size.max(ALIGNMENT).next_multiple_of(alignment), alignment)
            .map_err(|_| Error::from(ErrorKind::InvalidInput))?;
        // SAFETY: the size is not zero.
        let start = unsafe { alloc(layout) };
        if start.is_null() {
            return Err(Error::from(ErrorKind::OutOfMemory));
        }
        #[cfg(target_os = "linux")]
        if alignment == LARGE {
            // SAFETY: advice about memory that was just allocated; a system without large pages refuses it.
            unsafe { libc::madvise(start.cast(), layout.size(), libc::MADV_HUGEPAGE) };
        }
        Ok(Buffer { start, layout })
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: it was allocated with this layout.
        unsafe { dealloc(self.start, self.layout) };
    }
}

// SAFETY: the memory belongs to the holder of the buffer.
unsafe impl Send for Buffer {}

/// Perform the reads; returns the bytes of each, and the sums of every job (zeros if it was not performed).
///
/// # Safety
/// The destinations of all jobs must be valid and not overlap; sources are offsets into the bytes read.
pub unsafe fn read_all(reads: &[Read], jobs: &[Job], threads: usize) -> Result<(Vec<u64>, Vec<Sums>)> {
    let largest = reads.iter().map(|read| read.length).max().unwrap_or(0);
    let buffers: Mutex<Vec<Buffer>> = Mutex::new(Vec::new());
    let counts: Vec<AtomicUsize> = reads.iter().map(|_| AtomicUsize::new(0)).collect();
    let sums: Mutex<Vec<Sums>> = Mutex::new(vec![[0; 2]; jobs.len()]);
    spread(reads.len(), threads, |i| {
        let read = reads[i];
        let lock = |buffers: &Mutex<Vec<Buffer>>| {
            buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).pop()
        };
        let buffer = match lock(&buffers) {
            Some(buffer) => buffer,
            None => Buffer::new(largest)?,
        };
        let count = fill(&read, buffer.start)?;
        counts[i].store(count, Ordering::Relaxed);
        if count >= read.needed {
            let mine = &jobs[read.first_job..read.first_job + read.jobs];
            // SAFETY: the caller's promise; sources are moved into the buffer, which holds the bytes read.
            let found: Vec<Sums> =
                mine.iter().map(|job| unsafe { perform_moved(job, buffer.start as usize) }).collect();
            let mut all = sums.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            all[read.first_job..read.first_job + read.jobs].copy_from_slice(&found);
        }
        buffers.lock().unwrap_or_else(std::sync::PoisonError::into_inner).push(buffer);
        Ok(())
    })?;
    let counts = counts.iter().map(|count| count.load(Ordering::Relaxed) as u64).collect();
    Ok((counts, sums.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)))
}

/// Read up to the wanted length or the file's end.
fn fill(read: &Read, start: *mut u8) -> Result<usize> {
    let mut done = 0;
    while done < read.length {
        // SAFETY: the buffer has room for the longest read.
        let count = unsafe {
            libc::pread(read.fd, start.add(done).cast(), read.length - done, read.offset + done as i64)
        };
        match count {
            0 => break,
            n if n < 0 => {
                let error = Error::last_os_error();
                if error.kind() != ErrorKind::Interrupted {
                    return Err(error);
                }
            }
            n => {
                done += n as usize;
                if n as usize % ALIGNMENT != 0 {
                    break; // The end of the file.
                }
            }
        }
    }
    Ok(done)
}
