//! Python bindings: argument translation and the GIL, nothing else.
//!
//! Each function has a Python reference of the same signature in `argosy._reference`.

mod copies;
mod digest;
mod exchange;
mod files;
mod finite;
mod reduce;
mod segment;
mod spans;
mod syscalls;

use std::sync::atomic::AtomicU64;
use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// PyO3's own translation loses `errno`, which callers need.
fn os_error(error: std::io::Error) -> PyErr {
    let text = error.to_string();
    let message = text.split(" (os error").next().unwrap_or_default().to_owned();
    PyOSError::new_err((error.raw_os_error(), message))
}

/// Free the disk blocks of `length` bytes at `offset`; they read as zeros, and the file's size stays.
#[pyfunction]
fn punch_hole(py: Python<'_>, fd: i32, offset: i64, length: i64) -> PyResult<()> {
    py.detach(|| syscalls::punch_hole(fd, offset, length)).map_err(os_error)
}

/// Return the wait status of the process behind `pidfd`, even if it was reaped; None if unknown.
#[pyfunction]
fn pidfd_exit_status(py: Python<'_>, pidfd: i32) -> PyResult<Option<i32>> {
    py.detach(|| syscalls::pidfd_exit_status(pidfd)).map_err(os_error)
}

/// Copy strided boxes between addresses and return the digest sums of each: 16 bytes per record of `table`.
///
/// A record is 16 little-endian int64: source, destination (0: only sum), logical byte, bytes per run, three counts,
/// then three strides each of source, destination and logical position. The caller keeps the memory alive.
/// If `progress` is an address, the number of complete records is stored there (uint64); one thread keeps their order.
#[pyfunction]
fn copy_digest<'py>(
    py: Python<'py>,
    table: &[u8],
    threads: usize,
    progress: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    if table.len() % digest::JOB_BYTES != 0 {
        return Err(PyValueError::new_err("a record has 128 bytes"));
    }
    let jobs: Vec<_> = table.chunks_exact(digest::JOB_BYTES).map(digest::Job::parse).collect();
    let nowhere = AtomicU64::new(0);
    // SAFETY: the caller names a word that it keeps alive and only reads.
    let done = if progress == 0 { &nowhere } else { unsafe { AtomicU64::from_ptr(progress as *mut u64) } };
    // SAFETY: the caller names memory that it keeps alive and that no two jobs write.
    let sums = py.detach(|| unsafe { digest::perform_all(&jobs, threads, done) });
    let bytes: Vec<u8> = sums.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Little-endian int64 fields of a table of records.
fn fields<const N: usize>(table: &[u8]) -> PyResult<Vec<[i64; N]>> {
    if table.len() % (8 * N) != 0 {
        return Err(PyValueError::new_err(format!("a record has {} bytes", 8 * N)));
    }
    let field = |bytes: &[u8]| i64::from_le_bytes(bytes.try_into().unwrap_or_default());
    let record = |bytes: &[u8]| std::array::from_fn(|i| field(&bytes[8 * i..8 * i + 8]));
    Ok(table.chunks_exact(8 * N).map(record).collect())
}

/// Write memory to files from several threads: records of 4 int64, (descriptor, address, offset, length).
#[pyfunction]
fn write_files(py: Python<'_>, table: &[u8], threads: usize) -> PyResult<()> {
    let writes: Vec<_> = fields::<4>(table)?
        .iter()
        .map(|f| files::Write {
            fd: f[0] as i32,
            address: f[1] as usize,
            offset: f[2],
            length: f[3] as usize,
        })
        .collect();
    // SAFETY: the caller names memory that it keeps alive.
    py.detach(|| unsafe { files::write_all(&writes, threads) }).map_err(os_error)
}

/// Read files from several threads, and copy and sum the bytes: `reads` has records of 6 int64, (descriptor, offset,
/// length, bytes needed, first job, jobs); `jobs` has those of `copy_digest`, with sources as offsets into the bytes
/// read.
///
/// Returns 8 bytes for each read, the number of bytes read, then 16 for each job: zeros if too little was read.
#[pyfunction]
fn read_files<'py>(
    py: Python<'py>,
    reads: &[u8],
    jobs: &[u8],
    threads: usize,
) -> PyResult<Bound<'py, PyBytes>> {
    if jobs.len() % digest::JOB_BYTES != 0 {
        return Err(PyValueError::new_err("a job has 128 bytes"));
    }
    let jobs: Vec<_> = jobs.chunks_exact(digest::JOB_BYTES).map(digest::Job::parse).collect();
    let mut wanted = Vec::new();
    for f in fields::<6>(reads)? {
        let [length, needed, first_job, jobs_of] = [2, 3, 4, 5].map(|i| f[i] as usize);
        if first_job.checked_add(jobs_of).is_none_or(|last| last > jobs.len()) {
            return Err(PyValueError::new_err("a read names jobs that do not exist"));
        }
        wanted.push(files::Read { fd: f[0] as i32, offset: f[1], length, needed, first_job, jobs: jobs_of });
    }
    // SAFETY: the caller names memory that it keeps alive and that no two jobs write.
    let (counts, sums) =
        py.detach(|| unsafe { files::read_all(&wanted, &jobs, threads) }).map_err(os_error)?;
    let bytes: Vec<u8> = counts.iter().chain(sums.iter().flatten()).flat_map(|n| n.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Run the collective that `head` describes; returns 0 or why it failed: 1 abort, 2 mismatch, 3 deadline.
#[pyfunction]
fn run_collective(
    py: Python<'_>,
    segment: usize,
    rank: usize,
    head: &[u8],
    sends: Vec<(usize, usize)>,
    receives: Vec<(usize, usize)>,
    timeout_s: f64,
) -> PyResult<i32> {
    let deadline =
        Duration::try_from_secs_f64(timeout_s).ok().and_then(|time| Instant::now().checked_add(time));
    let mut failure: Option<PyErr> = None;
    let outcome = py.detach(|| {
        // Only the main thread handles signals; no other may wait for the GIL while peers wait for its rank.
        let is_main = syscalls::is_main_thread();
        let interrupted = || {
            failure = if is_main { Python::attach(|py| py.check_signals()).err() } else { None };
            failure.is_some()
        };
        let patience = segment::Patience { deadline, interrupted };
        // SAFETY: the caller holds the mapping and the tensors until the call returns.
        let mapped = unsafe { segment::Segment::at(segment, rank) };
        let exchange = exchange::Exchange::new(mapped, head, (&sends, &receives), patience);
        // SAFETY: as above.
        exchange.map(|mut exchange| unsafe { exchange.run(head) })
    });
    match outcome {
        None => Err(PyValueError::new_err("no such collective operation")),
        Some(Err(segment::Broken::Interrupted)) => {
            Err(failure.unwrap_or_else(|| PyOSError::new_err("interrupted")))
        }
        Some(Err(broken)) => Ok(broken as i32),
        Some(Ok(())) => Ok(0),
    }
}

/// End every wait in a segment, now and later, for the reason `code`; False if it was aborted before.
#[pyfunction]
fn abort_segment(segment: usize, code: u32) -> bool {
    // SAFETY: the caller holds the mapping.
    unsafe { segment::Segment::at(segment, 0) }.abort(code)
}

/// Return whether no number in these pieces of memory, of addresses and bytes, is infinite or not a number.
///
/// Elements are 0 float32, 1 float64, 2 float16, 3 bfloat16. The caller keeps the memory alive.
#[pyfunction]
fn are_finite(py: Python<'_>, parts: Vec<(usize, usize)>, element: u8) -> PyResult<bool> {
    let width =
        finite::width(element).ok_or_else(|| PyValueError::new_err("no such floating point element"))?;
    if parts.iter().any(|part| part.1 % width != 0) {
        return Err(PyValueError::new_err("a piece has a part of an element"));
    }
    // SAFETY: the caller names memory that it keeps alive.
    Ok(py.detach(|| parts.iter().all(|&part| unsafe { finite::are_finite(element, part) })))
}

/// Write a record to the ring of spans at address `ring`: `what` is name and kind; see `argosy.observe.spans`.
#[pyfunction]
fn record_span(ring: usize, what: u64, argument: u64, step: u64) {
    // SAFETY: the caller keeps the ring mapped, and holds the GIL.
    unsafe { spans::record(ring, what, argument, step) }
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(punch_hole, module)?)?;
    module.add_function(wrap_pyfunction!(pidfd_exit_status, module)?)?;
    module.add_function(wrap_pyfunction!(copy_digest, module)?)?;
    module.add_function(wrap_pyfunction!(write_files, module)?)?;
    module.add_function(wrap_pyfunction!(read_files, module)?)?;
    module.add_function(wrap_pyfunction!(run_collective, module)?)?;
    module.add_function(wrap_pyfunction!(abort_segment, module)?)?;
    module.add_function(wrap_pyfunction!(are_finite, module)?)?;
    module.add_function(wrap_pyfunction!(record_span, module)?)?;
    Ok(())
}
