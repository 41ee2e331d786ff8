"""Measure this machine and this installation for `argosy doctor`; leaves nothing behind."""

import contextlib
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

import psutil

from argosy.cli.clean_find import find_leftovers
from argosy.cli.doctor_judge import LOOKUP_S, Measured
from argosy.core import ConfigError
from argosy.fabric import made_directories, runtime_dir
from argosy.supervise import find_parent, find_py_spy

IMPORT_S = 120.0
_TIMED_IMPORT = "from time import time; t = time(); import torch; print(torch.__version__, time() - t)"
_CAP_SYS_PTRACE = 19


def measure_machine() -> Measured:
    """Measure everything; the import of torch takes longest."""
    took_s: list[float] = []
    lookup = threading.Thread(target=_look_up, args=(took_s,), daemon=True)
    lookup.start()
    runtime, runtime_error = _try_runtime()
    shm = shutil.disk_usage(os.environ.get("ARGOSY_SHM_DIR", "/dev/shm"))
    runs = _nearest(Path("runs").absolute())
    disk = shutil.disk_usage(runs)
    native, native_error = _find_native()
    left = find_leftovers()
    soft, hard = (1 << 30 if n == resource.RLIM_INFINITY else n for n in resource.getrlimit(resource.RLIMIT_NOFILE))
    torch, torch_import_s, torch_error = _try_torch()
    lookup.join(LOOKUP_S)
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
        descriptors=soft,
        descriptors_hard=hard,
        pids=_pids_limit(),
        pidfd_exit=_try_pidfd_exit(),
        ptrace_scope=_read_int(Path("/proc/sys/kernel/yama/ptrace_scope")),
        may_trace=_may_trace(),
        loopback_error=_try_loopback(),
        host=socket.gethostname(),
        lookup_s=took_s[0] if took_s else None,
        cores=len(os.sched_getaffinity(0)),
        omp_threads=os.environ.get("OMP_NUM_THREADS"),
        runs=str(runs),
        disk_bytes=disk.total,
        disk_free=disk.free,
        leftovers=len(left),
        leftover_bytes=sum(each.bytes for each in left),
    )


# --- the installation


def _find_native() -> tuple[Literal["compiled", "reference", "skipped"], str]:
    try:
        from argosy._select import native_is_compiled
    except ImportError as error:
        return "compiled", str(error)
    if native_is_compiled:
        return "compiled", ""
    return ("skipped" if os.environ.get("ARGOSY_NATIVE") == "0" else "reference"), ""


def _try_torch() -> tuple[str | None, float | None, str]:
    """Version, seconds that its import takes, and what went wrong."""
    try:
        torch = version("torch")
    except PackageNotFoundError:
        return None, None, ""
    command = [sys.executable, "-P", "-c", _TIMED_IMPORT]  # A queue.py of the working directory is no fault of torch.
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=IMPORT_S)
    except subprocess.TimeoutExpired:
        return torch, None, f"not within {IMPORT_S:.0f} s"
    words = done.stdout.split()
    if done.returncode or len(words) < 2:
        return torch, None, (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
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
    """Whether a pidfd still tells the exit code of a child that was reaped."""
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
    for line in _read(Path("/proc/self/cgroup")).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "pids"):
            limits.append(_read_int(Path("/sys/fs/cgroup", controllers, path.lstrip("/"), "pids.max")))
    limits.append(_read_int(Path("/proc/sys/kernel/pid_max")))
    return min((limit for limit in limits if limit is not None), default=None)


def _may_trace() -> bool:
    lines = _read(Path("/proc/self/status")).splitlines()
    return any(int(line.split()[1], 16) >> _CAP_SYS_PTRACE & 1 for line in lines if line.startswith("CapEff:"))


# --- room


def _try_runtime() -> tuple[str, str]:
    """Make the runtime directory as a run would, and remove it again if it was not in use."""
    try:
        path = runtime_dir()
    except (ConfigError, OSError) as error:
        return "", str(error)
    made = made_directories(path)
    with contextlib.suppress(OSError):
        if os.listdir(path) == ["made"]:
            (path / "made").unlink()
        for folder in made:
            folder.rmdir()
    return str(path), ""


def _nearest(path: Path) -> Path:
    """The path, or what it would be made in."""
    while not path.exists():
        path = path.parent
    return path


def _file_system(path: Path) -> str:
    """The type of the file system that holds the path."""
    real = path.resolve()
    mounts = [each for each in psutil.disk_partitions(all=True) if real.is_relative_to(each.mountpoint)]
    return max(mounts, key=lambda each: len(each.mountpoint)).fstype if mounts else ""


# --- the network


def _try_loopback() -> str:
    """Why two processes could not meet on 127.0.0.1; "" if they can."""
    try:
        if not psutil.net_if_stats()["lo"].isup:
            return "the interface lo is down"
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=1.0).close()
    except (OSError, KeyError) as error:
        return str(error)
    return ""


def _look_up(took_s: list[float]) -> None:
    """Look this host up as torch's store does; a resolver that does not answer must not hold up the rest."""
    began = time.monotonic()
    for ask in (lambda: socket.getfqdn(), lambda: socket.gethostbyaddr("127.0.0.1")):
        with contextlib.suppress(OSError):  # "Unknown" is an answer too: only the wait matters.
            ask()
    took_s.append(time.monotonic() - began)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""


def _read_int(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdecimal() else None
