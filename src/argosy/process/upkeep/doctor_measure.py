"""Measure this machine and this installation for `argosy doctor`; leaves nothing behind."""

import contextlib
import fcntl
import os
import platform
import resource
import shutil
import socket
import struct
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from argosy.core import ConfigError
from argosy.fabric import runtime_dir
from argosy.process.evidence.stacks import find_py_spy
from argosy.process.rank.cgroup import find_parent
from argosy.process.upkeep.clean_find import find_leftovers
from argosy.process.upkeep.doctor_judge import Measured

LOOKUP_S = 2.0
IMPORT_S = 120.0
_TIMED_IMPORT = "from time import time; t = time(); import torch; print(torch.__version__, time() - t)"
_SIOCGIFFLAGS = 0x8913
_IFF_UP = 1
_CAP_SYS_PTRACE = 19


def measure_machine() -> Measured:
    """Look at everything; the import of torch takes longest and goes on beside the rest."""
    importing = _begin_import()
    lookup = _begin_lookup()
    runtime, runtime_error = _try_runtime()
    shm = shutil.disk_usage(os.environ.get("ARGOSY_SHM_DIR", "/dev/shm"))
    runs = _nearest(Path("runs").absolute())
    disk = shutil.disk_usage(runs)
    native, native_error = _find_native()
    loopback_error = _try_loopback()
    left = find_leftovers()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lookup.join(max(0.0, LOOKUP_S - (time.monotonic() - lookup.began)))
    torch, torch_import_s, torch_error = _end_import(importing)
    return Measured(
        python=f"{platform.python_version()} at {sys.executable}",
        native=native,
        native_error=native_error,
        torch=torch,
        torch_import_s=torch_import_s,
        torch_error=torch_error,
        py_spy=find_py_spy(),
        cgroup=_try_cgroup(runtime),
        shm_bytes=shm.total,
        shm_free=shm.free,
        runtime=runtime,
        runtime_error=runtime_error,
        runtime_file_system=_file_system(_nearest(Path(runtime or "/tmp"))),
        descriptors=_unlimited(soft),
        descriptors_hard=_unlimited(hard),
        pids=_pids_limit(),
        pidfd_exit=_try_pidfd_exit(),
        ptrace_scope=_read_int(Path("/proc/sys/kernel/yama/ptrace_scope")),
        may_trace=_has_capability(_CAP_SYS_PTRACE),
        loopback=not loopback_error,
        loopback_error=loopback_error,
        host=socket.gethostname(),
        lookup_s=lookup.took_s,
        cores=len(os.sched_getaffinity(0)),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        runs=str(runs),
        disk_bytes=disk.total,
        disk_free=disk.free,
        leftovers=len(left),
        leftover_bytes=sum(each.bytes for each in left),
    )


# --- the installation


def _find_native() -> tuple[Literal["compiled", "reference", "left out"], str]:
    try:
        from argosy._select import native_is_compiled
    except ImportError as error:
        return "compiled", str(error)
    if native_is_compiled:
        return "compiled", ""
    return ("left out" if os.environ.get("ARGOSY_NATIVE") == "0" else "reference"), ""


def _begin_import() -> "subprocess.Popen[str] | None":
    try:
        version("torch")
    except PackageNotFoundError:
        return None
    return subprocess.Popen(
        [sys.executable, "-c", _TIMED_IMPORT],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _end_import(process: "subprocess.Popen[str] | None") -> tuple[str | None, float | None, str]:
    """Version, seconds, and what went wrong."""
    if process is None:
        return None, None, ""
    try:
        out, err = process.communicate(timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return version("torch"), None, f"not within {IMPORT_S:.0f} s"
    words = out.split()
    if process.returncode or len(words) < 2:
        lines = err.strip().splitlines()
        return version("torch"), None, lines[-1] if lines else f"exit code {process.returncode}"
    return words[-2], float(words[-1]), ""


# --- the kernel


def _try_cgroup(runtime: str) -> bool:
    parent = find_parent(Path(runtime))
    if parent is None:
        return False
    with contextlib.suppress(OSError):
        parent.rmdir()
    return True


def _try_pidfd_exit() -> bool:
    """Whether a pidfd still tells the exit code of a child that somebody else reaped."""
    from argosy._select import native

    with subprocess.Popen(["/bin/sh", "-c", "exit 7"], stdin=subprocess.DEVNULL) as child:
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError:
            return False
        child.wait()
    try:
        return native.pidfd_exit_status(pidfd) is not None
    except OSError:
        return False
    finally:
        os.close(pidfd)


def _pids_limit() -> int | None:
    """The lowest of the user's, the cgroup's and the machine's limits."""
    own = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    limits: list[int | None] = [] if own == resource.RLIM_INFINITY or os.getuid() == 0 else [own]
    groups = [line.split(":", 2) for line in _read(Path("/proc/self/cgroup")).splitlines()]
    for _, controllers, path in groups:
        if controllers in ("", "pids"):
            mount = Path("/sys/fs/cgroup", controllers)
            limits.append(_read_int(mount / path.lstrip("/") / "pids.max"))
    limits.append(_read_int(Path("/proc/sys/kernel/pid_max")))
    return min((limit for limit in limits if limit is not None), default=None)


def _has_capability(number: int) -> bool:
    for line in _read(Path("/proc/self/status")).splitlines():
        if line.startswith("CapEff:"):
            return bool(int(line.split()[1], 16) >> number & 1)
    return False


def _unlimited(limit: int) -> int:
    return 1 << 30 if limit == resource.RLIM_INFINITY else limit


# --- room


def _try_runtime() -> tuple[str, str]:
    """Make the runtime directory as a run would, and remove it again if it was not in use."""
    try:
        path = runtime_dir()
    except (ConfigError, OSError) as error:
        return "", str(error)
    for folder in [path] if os.environ.get("ARGOSY_RUNTIME_DIR") else [path, path.parent]:
        with contextlib.suppress(OSError):
            folder.rmdir()
    return str(path), ""


def _nearest(path: Path) -> Path:
    """The path, or what it would be made in."""
    while not path.exists():
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    """The type of the file system that holds the path."""
    best, kind = "", ""
    real = str(path.resolve())
    for line in _read(Path("/proc/self/mountinfo")).splitlines():
        left, _, right = line.partition(" - ")
        mount = left.split()[4].replace("\\040", " ")
        if (real == mount or real.startswith(mount.rstrip("/") + "/")) and len(mount) >= len(best):
            best, kind = mount, right.split()[0]
    return kind


# --- the network


def _try_loopback() -> str:
    """Why two processes could not meet on 127.0.0.1; "" if they can."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            answer = fcntl.ioctl(probe, _SIOCGIFFLAGS, struct.pack("16sH14x", b"lo", 0))
        if not struct.unpack("16sH14x", answer)[1] & _IFF_UP:
            return "the interface lo is down"
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
    except OSError as error:
        return error.strerror or str(error)
    return ""


class _Lookup(threading.Thread):
    """Looks this host up as torch's store does; a resolver that does not answer must not hold us up."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.began = time.monotonic()
        self.took_s: float | None = None

    def run(self) -> None:
        for ask in (lambda: socket.getfqdn(), lambda: socket.gethostbyaddr("127.0.0.1")):
            with contextlib.suppress(OSError):  # "Unknown" is an answer too: only the wait matters.
                ask()
        self.took_s = time.monotonic() - self.began


def _begin_lookup() -> _Lookup:
    lookup = _Lookup()
    lookup.start()
    return lookup


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None
