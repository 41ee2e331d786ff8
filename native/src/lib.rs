//! Python bindings: argument translation and the GIL, nothing else.
//!
//! Each function has a Python reference of the same signature in `argosy._reference`.

mod digest;
mod syscalls;

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

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(punch_hole, module)?)?;
    module.add_function(wrap_pyfunction!(pidfd_exit_status, module)?)?;
    module.add_function(wrap_pyfunction!(copy_digest, module)?)?;
    Ok(())
}
