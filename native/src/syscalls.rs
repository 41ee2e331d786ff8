//! System calls that Python's `os` lacks. No Python in here.

use std::io::{Error, Result};
use std::mem::size_of;

/// `struct pidfd_info` of linux/pidfd.h in its first published size, which every kernel accepts.
#[repr(C)]
#[derive(Default)]
struct PidfdInfo {
    mask: u64,
    cgroup_id: u64,
    ids: [u32; 3],
    credentials: [u32; 8],
    exit_code: i32,
}

const PIDFD_INFO_EXIT: u64 = 1 << 3;
const READ_WRITE: u64 = 3;
/// `_IOWR(0xFF, 11, struct pidfd_info)`.
const PIDFD_GET_INFO: u64 = (READ_WRITE << 30) | ((size_of::<PidfdInfo>() as u64) << 16) | (0xFF << 8) | 11;

pub fn punch_hole(fd: i32, offset: i64, length: i64) -> Result<()> {
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    loop {
        // SAFETY: takes integers only; the kernel checks the descriptor and the range.
        if unsafe { libc::fallocate64(fd, mode, offset, length) } == 0 {
            return Ok(());
        }
        let error = Error::last_os_error();
        if error.raw_os_error() != Some(libc::EINTR) {
            return Err(error);
        }
    }
}

/// `None` while the process is not reaped, and where the kernel is older than 6.15.
pub fn pidfd_exit_status(pidfd: i32) -> Result<Option<i32>> {
    let mut info = PidfdInfo { mask: PIDFD_INFO_EXIT, ..PidfdInfo::default() };
    // SAFETY: the request carries the size of `info`, so the kernel writes no further than its end.
    let failed = unsafe { libc::ioctl(pidfd, PIDFD_GET_INFO as libc::Ioctl, &mut info) } != 0;
    if !failed {
        return Ok((info.mask & PIDFD_INFO_EXIT != 0).then_some(info.exit_code));
    }
    let error = Error::last_os_error();
    match error.raw_os_error() {
        // Kernels before 6.13 have no such request; those before 6.15 forget a reaped process.
        Some(libc::ENOTTY | libc::EINVAL | libc::ESRCH) => Ok(None),
        _ => Err(error),
    }
}

pub fn is_main_thread() -> bool {
    // SAFETY: both take nothing and cannot fail.
    unsafe { libc::gettid() == libc::getpid() }
}
