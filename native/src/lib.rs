//! Python bindings: argument translation and the GIL, nothing else.
//!
//! Each function has a Python reference of the same signature in `argosy._reference`.

mod syscalls;

use pyo3::exceptions::PyOSError;
use pyo3::prelude::*;

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

#[pymodule]
fn _native(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(punch_hole, module)?)?;
    module.add_function(wrap_pyfunction!(pidfd_exit_status, module)?)?;
    Ok(())
}
