"""Who works on a run's directory, and whether that runtime directory is in use at all. Asks no daemon."""

import contextlib
import errno
import fcntl
import os
from pathlib import Path

import msgspec


class Owner(msgspec.Struct, frozen=True):
    """Who works on the directory: the run of one runtime directory of one host."""

    host: str
    runtime: str
    run: str
    allocation: str = ""
    """`JOB.STARTS` of the Slurm job that it is part of."""

    @classmethod
    def of(cls, runtime: Path, run: str) -> "Owner":
        """A run of this host."""
        job, starts = os.environ.get("SLURM_JOB_ID", ""), os.environ.get("SLURM_RESTART_COUNT", "0")
        return cls(os.uname().nodename, str(runtime), run, f"{job}.{starts}" if job else "")

    def follows(self, other: "Owner") -> bool:
        """Whether `other` was an earlier start of the same job: Slurm has ended all of it."""
        same = bool(self.allocation) and self.allocation.partition(".")[0] == other.allocation.partition(".")[0]
        return same and self.allocation != other.allocation

    def command(self, words: str, runtime: Path) -> str:
        """How `argosy WORDS` reaches this run from `runtime`."""
        return (
            f"argosy {words}" if self.runtime == str(runtime) else f"ARGOSY_RUNTIME_DIR={self.runtime} argosy {words}"
        )


def read_owner(directory: Path) -> Owner | None:
    """Who works on the directory, or was killed while doing so; None if nobody does."""
    with contextlib.suppress(OSError, msgspec.MsgspecError):
        return msgspec.json.decode((directory / "owner.json").read_bytes(), type=Owner)
    return None


def is_elsewhere(owner: Owner, runtime: Path) -> bool:
    """Whether the owner is on another host, or under another runtime directory than `runtime`, which is in use."""
    if owner.host != os.uname().nodename:
        return True
    return owner.runtime != str(runtime) and is_inhabited(Path(owner.runtime))


def is_inhabited(runtime: Path) -> bool:
    """Whether a warden holds its lock, or any daemon or rank the lifeline.

    `argosy clean` names its own entry of /proc: it exists for as long as that works on the directory.
    """
    if runtime.is_relative_to("/proc"):
        return runtime.exists()
    try:
        os.close(os.open(runtime / "lifeline", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC))
        return True
    except OSError as error:
        if error.errno not in (errno.ENXIO, errno.ENOENT):
            return True  # Unknown, so it is not touched.
    lock = lock_runtime(runtime, fcntl.LOCK_SH)  # Shared: others may be looking at this moment.
    if lock is not None:
        os.close(lock)
    return lock is None and (runtime / "warden.lock").exists()


def lock_runtime(runtime: Path, kind: int = fcntl.LOCK_EX) -> int | None:
    """Take the warden's lock, so that no warden can start; None if there is one, or never was."""
    try:
        lock = os.open(runtime / "warden.lock", os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(lock, kind | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        return None
    return lock
