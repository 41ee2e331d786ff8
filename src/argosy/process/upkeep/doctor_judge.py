"""Judge a machine and an installation by what was measured on them.

Pure: `doctor_measure.py` measures. Each judgement is one line, and what to do if there is something to do.
"""

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from argosy.process.upkeep.clean_plan import format_bytes

TORCH: tuple[int, int] = (2, 15)
"""The one that `Run` and the collectives need, and the newest that was tried."""
NETWORK_FILE_SYSTEMS = re.compile(r"nfs\d?|cifs|smb\d?|lustre|gpfs|beegfs|ceph|afs|9p|glusterfs|fuse\.(sshfs|s3fs)")
LOCAL_HINT = "set ARGOSY_RUNTIME_DIR to a short path on a local disk"
SLOW_LOOKUP_S = 0.5
MB, GB = 1 << 20, 1 << 30

State = Literal["ok", "warn", "fail"]


class Check(msgspec.Struct, frozen=True):
    """One line of the report; `hint` says what to do."""

    name: str
    state: State
    says: str
    hint: str = ""


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """What there is here. Sizes in bytes; None where it could not be told or does not exist."""

    python: str
    native: Literal["compiled", "reference", "left out"]
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
    loopback: bool
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
    return [
        *_judge_installation(seen),
        *_judge_kernel(seen),
        *_judge_room(seen),
        *_judge_network(seen),
        _judge_cores(seen),
        _judge_leftovers(seen),
    ]


def _judge_installation(seen: Measured) -> Iterator[Check]:
    yield Check("Python", "ok", seen.python)
    if seen.native_error:
        yield Check("native code", "fail", f"does not load: {seen.native_error}", "reinstall argosy")
    elif seen.native == "compiled":
        yield Check("native code", "ok", "compiled")
    else:
        cost = "the Python reference serves: same results, some microseconds more per exit"
        left_out = "; ARGOSY_NATIVE=0 says so" if seen.native == "left out" else ""
        hint = "" if left_out else "install cargo (https://rustup.rs), then reinstall argosy"
        yield Check("native code", "ok" if left_out else "warn", cost + left_out, hint)
    yield _judge_torch(seen)
    if seen.py_spy:
        yield Check("py-spy", "ok", seen.py_spy)
    else:
        says = "not found: no stacks of ranks that do not answer"
        yield Check("py-spy", "warn", says, "pip install py-spy")


def _judge_torch(seen: Measured) -> Check:
    if seen.torch_error:
        return Check("torch", "fail", f"cannot be imported: {seen.torch_error}", "reinstall torch")
    if seen.torch is None:
        says = "not found: scripts that need it will fail"
        return Check("torch", "warn", says, "pip install 'argosy[torch]'")
    seconds = seen.torch_import_s
    took = "" if seconds is None else f", imported in {seconds:.1f} s (once, not per rank)"
    match = re.match(r"(\d+)\.(\d+)", seen.torch)
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    if version < TORCH:
        says = f"{seen.torch} is too old for argosy.Run and the collectives{took}"
        return Check("torch", "warn", says, f"install torch {_dotted(TORCH)}; `argosy run` starts scripts of any torch")
    if version > TORCH:
        return Check("torch", "warn", f"{seen.torch} is newer than what was tried{took}", f"tried: {_dotted(TORCH)}")
    return Check("torch", "ok", f"{seen.torch}{took}")


def _dotted(version: tuple[int, int]) -> str:
    return f"{version[0]}.{version[1]}"


def _judge_kernel(seen: Measured) -> Iterator[Check]:
    if seen.cgroup:
        yield Check("cgroups", "ok", "a leaf per rank: whatever a rank starts ends with it")
    else:
        says = "not writable: ranks end by process group and by a mark in their environment"
        yield Check("cgroups", "warn", says, "systemd-run --user --scope -p Delegate=yes argosy run …")
    if seen.pidfd_exit:
        yield Check("exit codes", "ok", "kept by the kernel, even if the warden is killed")
    else:
        says = "lost for ranks that end while the warden is dead: the kernel keeps none"
        yield Check("exit codes", "warn", says, "Linux 6.15 or later keeps them")
    if seen.ptrace_scope in (None, 0) or seen.may_trace:
        yield Check("ptrace", "ok", "py-spy may look into ranks")
    else:
        says = f"scope {seen.ptrace_scope}: py-spy may not look into ranks that do not answer"
        yield Check("ptrace", "warn", says, "sudo sysctl kernel.yama.ptrace_scope=0")
    if seen.descriptors < 1024:
        state: State = "fail" if seen.descriptors < 128 else "warn"
        hint = f"ulimit -n {min(65536, seen.descriptors_hard)}"
        yield Check("open files", state, f"at most {seen.descriptors}: few ranks fit", hint)
    else:
        yield Check("open files", "ok", f"at most {seen.descriptors}")
    says = "not limited" if seen.pids is None else f"at most {seen.pids}, threads included"
    if seen.pids is not None and seen.pids < 1000:
        state = "fail" if seen.pids < 64 else "warn"
        yield Check("processes", state, f"{says}: few ranks fit", "ulimit -u, or pids.max of the cgroup")
    else:
        yield Check("processes", "ok", says)


def _judge_room(seen: Measured) -> Iterator[Check]:
    if seen.runtime_error:
        yield Check("runtime dir", "fail", seen.runtime_error, LOCAL_HINT)
    elif NETWORK_FILE_SYSTEMS.fullmatch(seen.runtime_file_system):
        says = f"on a network file system ({seen.runtime_file_system}): {seen.runtime}"
        yield Check("runtime dir", "fail", says, LOCAL_HINT)
    else:
        disk = seen.runtime_file_system or "a local disk"
        yield Check("runtime dir", "ok", f"private, on {disk}: {seen.runtime}")
    room = f"{format_bytes(seen.shm_free)} free of {format_bytes(seen.shm_bytes)}"
    if seen.shm_free < 256 * MB:
        hint = "docker run --shm-size=8g, or: sudo mount -o remount,size=8G /dev/shm"
        state: State = "fail" if seen.shm_free < 16 * MB else "warn"
        yield Check("/dev/shm", state, f"{room}; DataLoaders need more", hint)
    else:
        yield Check("/dev/shm", "ok", room)
    room = f"{format_bytes(seen.disk_free)} free of {format_bytes(seen.disk_bytes)} in {seen.runs}"
    if seen.disk_free < 2 * GB:
        hint = "argosy clean, or another disk with --dir"
        yield Check("disk", "fail" if seen.disk_free < 100 * MB else "warn", room, hint)
    else:
        yield Check("disk", "ok", room)


def _judge_network(seen: Measured) -> Iterator[Check]:
    if seen.loopback:
        yield Check("loopback", "ok", "up, with IPv4")
    else:
        says = f"ranks cannot meet on 127.0.0.1: {seen.loopback_error}"
        yield Check("loopback", "fail", says, "sudo ip link set lo up")
    hint = f"echo '127.0.1.1 {seen.host}' | sudo tee -a /etc/hosts"
    if seen.lookup_s is None:
        says = f"no answer about {seen.host}: torch may wait seconds for each connection"
        yield Check("name lookup", "warn", says, hint)
    elif seen.lookup_s > SLOW_LOOKUP_S:
        says = f"{seen.lookup_s:.1f} s for {seen.host}: torch looks names up at each connection"
        yield Check("name lookup", "warn", says, hint)
    else:
        yield Check("name lookup", "ok", f"{seen.lookup_s * 1000:.0f} ms for {seen.host}")


def _judge_cores(seen: Measured) -> Check:
    cores = f"{seen.cores} core{'' if seen.cores == 1 else 's'}"
    if seen.omp_threads is None:
        return Check("cores", "ok", f"{cores}; one thread per rank, or --threads auto")
    if seen.omp_threads.isdecimal() and int(seen.omp_threads) > seen.cores:
        says = f"{cores}, but OMP_NUM_THREADS={seen.omp_threads} for each rank"
        return Check("cores", "warn", says, "unset OMP_NUM_THREADS, and use --threads auto")
    return Check("cores", "ok", f"{cores}; OMP_NUM_THREADS={seen.omp_threads} for each rank")


def _judge_leftovers(seen: Measured) -> Check:
    if not seen.leftovers:
        return Check("leftovers", "ok", "none")
    says = f"{seen.leftovers} of daemons that were killed, {format_bytes(seen.leftover_bytes)}"
    return Check("leftovers", "warn", says, "argosy clean leftovers")
