"""Judge a machine and an installation by what was measured on them.

Pure: `doctor_measure.py` measures. Each check is one line, with a hint if there is something to do.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from argosy.cli.clean_plan import count, format_bytes

TORCH: tuple[int, int] = (2, 15)
"""The version that `argosy.Run` and the collectives need, and the newest that was tried."""
NETWORK_FILE_SYSTEMS = re.compile(r"nfs\d?|cifs|smb\d?|lustre|gpfs|beegfs|ceph|afs|9p|glusterfs|fuse\.(sshfs|s3fs)")
LOOKUP_S, SLOW_LOOKUP_S = 2.0, 0.5
"""How long to wait for an answer, and how long an answer may take."""
MB, GB = 1 << 20, 1 << 30

State = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """One line of the report; `hint` says what to do."""

    name: str
    state: State
    says: str
    hint: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What there is here. Sizes in bytes; None where it could not be measured or does not exist."""

    python: str
    native: Literal["compiled", "reference", "skipped"]
    native_error: str = ""
    torch: str | None
    torch_import_s: float | None = None
    torch_error: str = ""
    py_spy: str | None
    cgroup: bool
    shm_bytes: int
    shm_free: int
    runtime: str
    runtime_error: str = ""
    runtime_file_system: str = ""
    descriptors: int
    descriptors_hard: int
    pids: int | None
    pidfd_exit: bool
    ptrace_scope: int | None
    may_trace: bool
    loopback_error: str = ""
    host: str
    lookup_s: float | None
    cores: int
    omp_threads: str | None
    runs: str
    disk_bytes: int
    disk_free: int
    leftovers: int
    leftover_bytes: int = 0


def judge_machine(seen: Measured) -> list[Check]:
    """Say what is well and what is not, in a fixed order."""
    return [*_judge_installation(seen), *_judge_kernel(seen), *_judge_room(seen), *_judge_network(seen)]


def _check(name: str, state: State, well: str, trouble: str, hint: str) -> Check:
    return Check(name, "ok", well) if state == "ok" else Check(name, state, trouble or well, hint)


def _grade(value: int, *, fail: int, warn: int) -> State:
    """How good a value is of which more is better."""
    return "fail" if value < fail else "warn" if value < warn else "ok"


def _judge_installation(seen: Measured) -> Iterator[Check]:
    yield Check("Python", "ok", seen.python)
    slower = "not compiled: its Python reference is used, with the same results; collectives and checkpoints are slower"
    if seen.native_error:
        yield Check("native code", "fail", f"does not load: {seen.native_error}", "reinstall argosy")
    else:
        well = "compiled" if seen.native == "compiled" else f"{slower} (ARGOSY_NATIVE=0)"
        hint = "install cargo (https://rustup.rs), then reinstall argosy"
        yield _check("native code", "warn" if seen.native == "reference" else "ok", well, slower, hint)
    yield _judge_torch(seen)
    lost = "not found: no stacks of ranks that do not answer"
    yield _check("py-spy", "ok" if seen.py_spy else "warn", seen.py_spy or "", lost, "pip install py-spy")


def _judge_torch(seen: Measured) -> Check:
    floor = ".".join(map(str, TORCH))
    install = f"pip install 'torch>={floor}'"
    if seen.torch_error:
        return Check("torch", "fail", f"cannot be imported: {seen.torch_error}", "reinstall torch")
    if seen.torch is None:
        return Check("torch", "warn", "not installed: scripts that need it will fail", install)
    took = "" if seen.torch_import_s is None else f"; its import takes {seen.torch_import_s:.1f} s, once for all ranks"
    match = re.match(r"(\d+)\.(\d+)", seen.torch)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < TORCH:
        says = f"{seen.torch} is too old for argosy.Run and the collectives; `argosy run` starts any script"
        return Check("torch", "warn", f"{says}{took}", install)
    newer = f"{seen.torch} is newer than any that was tried{took}"
    return _check("torch", "warn" if version > TORCH else "ok", f"{seen.torch}{took}", newer, f"{floor} was tried")


def _judge_kernel(seen: Measured) -> Iterator[Check]:
    well = "one per rank: all processes that a rank starts end with it"
    trouble = "not writable: processes of a rank are found by their group and a mark in their environment"
    hint = "systemd-run --user --scope -p Delegate=yes argosy run …"
    yield _check("cgroups", "ok" if seen.cgroup else "warn", well, trouble, hint)
    well = "kept by the kernel, even if the warden is killed"
    trouble = "lost for ranks that end while the warden is dead"
    yield _check("exit codes", "ok" if seen.pidfd_exit else "warn", well, trouble, "Linux 6.15 or later keeps them")
    may_trace = seen.ptrace_scope in (None, 0) or seen.may_trace
    trouble = f"scope {seen.ptrace_scope}: py-spy cannot look into ranks that do not answer"
    hint = "sudo sysctl kernel.yama.ptrace_scope=0"
    yield _check("ptrace", "ok" if may_trace else "warn", "py-spy may look into ranks", trouble, hint)
    well = f"at most {seen.descriptors}"
    hint = f"ulimit -n {min(65536, seen.descriptors_hard)}"
    state = _grade(seen.descriptors, fail=128, warn=1024)
    yield _check("open files", state, well, f"{well}: enough for few ranks", hint)
    well = "not limited" if seen.pids is None else f"at most {seen.pids}, with threads"
    state = "ok" if seen.pids is None else _grade(seen.pids, fail=64, warn=1000)
    yield _check("processes", state, well, f"{well}: enough for few ranks", "ulimit -u, or pids.max of the cgroup")


def _judge_room(seen: Measured) -> Iterator[Check]:
    remote = NETWORK_FILE_SYSTEMS.fullmatch(seen.runtime_file_system)
    well = f"private, on {seen.runtime_file_system or 'a local disk'}: {seen.runtime}"
    trouble = seen.runtime_error or f"on a network file system ({seen.runtime_file_system}): {seen.runtime}"
    hint = "set ARGOSY_RUNTIME_DIR to a short path on a local disk"
    yield _check("runtime dir", "fail" if seen.runtime_error or remote else "ok", well, trouble, hint)
    well = f"{format_bytes(seen.shm_free)} free of {format_bytes(seen.shm_bytes)}"
    hint = "docker run --shm-size=8g, or: sudo mount -o remount,size=8G /dev/shm"
    state = _grade(seen.shm_free, fail=16 * MB, warn=256 * MB)
    yield _check("/dev/shm", state, well, f"{well}; DataLoaders need more", hint)
    well = f"{format_bytes(seen.disk_free)} free of {format_bytes(seen.disk_bytes)} in {seen.runs}"
    state = _grade(seen.disk_free, fail=100 * MB, warn=2 * GB)
    yield _check("disk", state, well, "", "argosy clean, or another disk with --dir")
    left = f"{count(seen.leftovers, 'item')} that killed daemons left, {format_bytes(seen.leftover_bytes)}"
    yield _check("leftovers", "warn" if seen.leftovers else "ok", "none", left, "argosy clean leftovers")


def _judge_network(seen: Measured) -> Iterator[Check]:
    trouble = f"ranks cannot meet on 127.0.0.1: {seen.loopback_error}"
    yield _check(
        "loopback", "fail" if seen.loopback_error else "ok", "up, with IPv4", trouble, "sudo ip link set lo up"
    )
    took_s = LOOKUP_S if seen.lookup_s is None else seen.lookup_s
    well = f"{took_s * 1000:.0f} ms for {seen.host}"
    trouble = f"more than {took_s:.1f} s for {seen.host}: torch looks names up for each connection"
    hint = f"echo '127.0.1.1 {seen.host}' | sudo tee -a /etc/hosts"
    yield _check("name lookup", "warn" if took_s > SLOW_LOOKUP_S else "ok", well, trouble, hint)
    threads = f"OMP_NUM_THREADS={seen.omp_threads} for each rank" if seen.omp_threads else "1 thread per rank with -n"
    well = f"{count(seen.cores, 'core')}; {threads}"
    many = (seen.omp_threads or "").isdecimal() and int(seen.omp_threads or 0) > seen.cores
    yield _check("cores", "warn" if many else "ok", well, "", "unset OMP_NUM_THREADS, and use --threads auto")
