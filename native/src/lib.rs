//! Python bindings: argument translation and the GIL, nothing else.
//!
//! Each function has a Python reference of the same signature in `argosy._reference`.

mod copies;
mod digest;
mod exchange;
mod reduce;
mod segment;
mod syscalls;

use std::time::{Duration, Instant};

use pyo3::exceptions::{PyOSError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

/// PyO3's own translation loses `errno`, by which callers decide.
fn os_error(error: std::io::Error) -> PyErr {
    let text = error.to_string();
    let message = text.split(" (os error").next().unwrap_or_default().to_owned();
    PyOSError::new_err((error.raw_os_error(), message))
}

/// Give back the disk blocks of `length` bytes at `offset`; they read as zeros, the file's size stays.
#[pyfunction]
fn punch_hole(py: Python<'_>, fd: i32, offset: i64, length: i64) -> PyResult<()> {
    py.detach(|| syscalls::punch_hole(fd, offset, length)).map_err(os_error)
}

/// The wait status of the process behind `pidfd`, whoever reaped it; None if the kernel cannot tell.
#[pyfunction]
fn pidfd_exit_status(py: Python<'_>, pidfd: i32) -> PyResult<Option<i32>> {
    py.detach(|| syscalls::pidfd_exit_status(pidfd)).map_err(os_error)
}

/// Copy strided boxes between addresses and return the digest sums of each: 16 bytes per record of `table`.
///
/// A record is 16 little-endian int64: source, destination (0: only sum), logical byte, bytes per run, three counts,
/// then three strides each of source, destination and logical position. The caller keeps the memory alive.
#[pyfunction]
fn copy_digest<'py>(py: Python<'py>, table: &[u8], threads: usize) -> PyResult<Bound<'py, PyBytes>> {
    if table.len() % digest::JOB_BYTES != 0 {
        return Err(PyValueError::new_err("a record has 128 bytes"));
    }
    let jobs: Vec<_> = table.chunks_exact(digest::JOB_BYTES).map(digest::Job::parse).collect();
    // SAFETY: the caller names memory that it keeps alive and that no two jobs write.
    let sums = py.detach(|| unsafe { digest::perform_all(&jobs, threads) });
    let bytes: Vec<u8> = sums.iter().flatten().flat_map(|sum| sum.to_le_bytes()).collect();
    Ok(PyBytes::new(py, &bytes))
}

/// Take part in the collective that `head` describes; 0, or how it broke: 1 abort, 2 mismatch, 3 deadline.
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
        // Signals are the main thread's, and no other may wait for the GIL while its peers wait for it.
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

/// Break every wait in a segment, now and later, for the reason `code`; false if it was broken before.
#[pyfunction]
fn abort_segment(segment: usize, code: u32) -> bool {
    // SAFETY: the caller holds the mapping.
    unsafe { segment::Segment::at(segment, 0) }.abort(code)
}

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(punch_hole, module)?)?;
    module.add_function(wrap_pyfunction!(pidfd_exit_status, module)?)?;
    module.add_function(wrap_pyfunction!(copy_digest, module)?)?;
    module.add_function(wrap_pyfunction!(run_collective, module)?)?;
    module.add_function(wrap_pyfunction!(abort_segment, module)?)?;
    Ok(())
}
