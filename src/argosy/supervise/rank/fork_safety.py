"""Tell what an import did to a process that a fork would lose, share or repeat."""

import os
import signal
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass

_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband", "/dev/hl")
_THREAD_END_S = 0.1


@dataclass(frozen=True)
class ProcessState:
    """What a fork passes on, or loses, of a process."""

    threads: Mapping[int, str]
    descriptors: Mapping[int, str]
    signals: Mapping[str, object]
    has_child: bool
    has_cuda: bool
    cwd: str
    streams: tuple[object, ...]
    random: Mapping[str, object]
    environ: Mapping[str, str]


def look(threads_before: Collection[int] | None = None) -> ProcessState:
    threads = _threads()
    give_up_at = time.monotonic() + _THREAD_END_S
    while threads_before is not None and len(threads) > len(threads_before) and time.monotonic() < give_up_at:
        time.sleep(0.005)  # A thread that was joined is gone from /proc a little later.
        threads = _threads()
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return ProcessState(
        threads=threads,
        descriptors=_descriptors(),
        signals=_signals(),
        has_child=_has_child(),
        has_cuda=cuda is not None and bool(cuda.is_initialized()),
        cwd=os.getcwd(),
        streams=(sys.stdin, sys.stdout, sys.stderr),
        random=_random(),
        environ=dict(os.environ),
    )


def compare(before: ProcessState, after: ProcessState) -> list[str]:
    """Return the reasons why what happened between two looks forbids forking ranks."""
    threads = sorted(after.threads.keys() - before.threads.keys())
    reasons = [f"starts a thread ({after.threads[tid]})" for tid in threads]
    for descriptor, target in after.descriptors.items():
        if before.descriptors.get(descriptor) != target:
            kind = "an accelerator" if target.startswith(_ACCELERATORS) else "a descriptor"
            reasons.append(f"opens {kind} ({target})")
    changed = [name for name, value in after.signals.items() if before.signals.get(name) != value]
    if changed:
        reasons.append(f"changes signals ({', '.join(changed)})")
    if after.has_child and not before.has_child:
        reasons.append("starts a process")
    if after.has_cuda and not before.has_cuda:
        reasons.append("initialises CUDA")
    if after.cwd != before.cwd:
        reasons.append(f"changes the working directory to {after.cwd}")
    if any(new is not old for new, old in zip(after.streams, before.streams, strict=True)):
        reasons.append("replaces sys.stdin, sys.stdout or sys.stderr")
    used = [name for name, state in before.random.items() if after.random.get(name) != state]
    return reasons + [f"uses the random numbers of {name}" for name in used]


def changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    names = sorted(before.keys() | after.keys())
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _threads() -> dict[int, str]:
    threads: dict[int, str] = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{tid}/comm") as comm:
                threads[int(tid)] = comm.read().strip()
        except OSError:
            continue
    return threads


def _descriptors() -> dict[int, str]:
    targets: dict[int, str] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # The one that listed the directory.
        targets[int(descriptor)] = target
    return targets


def _signals() -> dict[str, object]:
    """Return Python's handlers and the kernel's masks, which also show handlers set by C code."""
    numbers = signal.valid_signals()
    mask = sum(1 << (number - 1) for number in numbers)  # Without the two that glibc takes for its threads.
    signals: dict[str, object] = {str(number): signal.getsignal(number) for number in numbers}
    with open("/proc/self/status") as status:
        for line in status:
            if line.startswith(("SigBlk", "SigIgn", "SigCgt")):
                name, _, value = line.partition(":")
                signals[name] = int(value, 16) & mask
    return signals


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _random() -> dict[str, object]:
    """Return the states of the loaded global generators: ranks are reseeded, so a seed would be lost."""
    states: dict[str, object] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    numpy_random = getattr(sys.modules.get("numpy.random"), "mtrand", None)
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    seed = getattr(sys.modules.get("torch"), "initial_seed", None)
    if seed is not None:
        states["torch"] = seed()
    return states
