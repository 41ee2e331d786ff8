"""Out of memory: whether the kernel killed a rank, from the counters of its memory cgroup.

A killed process leaves no message, so the counters are sampled while it lives and compared afterwards: with a sample
of some time ago, since a large process takes seconds to die, in which its death is counted already.
"""

import os
import signal
from collections.abc import Sequence

import msgspec

from argosy.core import ProcessId, WaitStatus
from argosy.supervise.evidence.proc_sample import read_small

_ROOT = "/sys/fs/cgroup"
_UNLIMITED = 1 << 60
PRESSURE_SHARE = 0.9
FRESH_S = 0.1
SAMPLES_KEPT = 5


class OomCounter(msgspec.Struct, frozen=True):
    """One memory cgroup: kills so far, its limit and use in bytes (limit 0: none)."""

    cgroup: str
    directory: str
    kills: int
    limit: int
    used: int


class OomSample(msgspec.Struct, frozen=True):
    """The memory cgroups of a process, innermost first, and the share of the host's memory in use."""

    counters: tuple[OomCounter, ...] = ()
    host_share: float = 0.0


def oom_counters(pid: int, *, root: str = _ROOT) -> OomSample:
    """Sample the memory cgroups of a living process and their ancestors; empty where there are none."""
    return OomSample(_counters(_directories(pid, root)), _host_share())


def again(before: OomSample) -> OomSample:
    """Sample the same cgroups after the process has gone."""
    return OomSample(_counters([(c.cgroup, c.directory) for c in before.counters]), _host_share())


class OomWatch:
    """Samples of the memory of many processes; those of one cgroup, taken at nearly one time, are read once."""

    def __init__(self) -> None:
        self._samples: dict[ProcessId, list[OomSample]] = {}
        self._read: dict[tuple[str, ...], tuple[float, OomSample]] = {}

    def start(self, process: ProcessId, now: float) -> None:
        """Sample a process from now on."""
        self._samples[process] = [self._sample(_directories(process.pid, _ROOT), now)]

    def sample(self, now: float) -> None:
        """Sample the cgroups of all processes again."""
        for samples in self._samples.values():
            samples.append(self._sample([(c.cgroup, c.directory) for c in samples[-1].counters], now))
            del samples[:-SAMPLES_KEPT]

    def explain(self, process: ProcessId, status: WaitStatus, *, asked: bool) -> str:
        """The process has ended: say that it died of memory and how that is known, or ""."""
        before = self._samples.pop(process, None)
        if before is None or status.signal != signal.SIGKILL:
            return ""
        return explain_oom(before, again(before[-1]), status, asked=asked)

    def _sample(self, directories: list[tuple[str, str]], now: float) -> OomSample:
        key = tuple(directory for _, directory in directories)
        read = self._read.get(key)
        if read is None or now - read[0] >= FRESH_S:
            read = self._read[key] = (now, OomSample(_counters(directories), _host_share()))
        return read[1]


def explain_oom(before: Sequence[OomSample], after: OomSample, status: WaitStatus, *, asked: bool) -> str:
    """Say that the process died of memory and how that is known, or ""; `asked` if Argosy killed it.

    `before` is oldest first. Memory is asked of the newest sample under pressure: with the process its memory goes.
    """
    if asked or status.signal != signal.SIGKILL or not before:
        return ""
    kills = {counter.directory: counter.kills for counter in before[0].counters}
    for counter in after.counters:
        if counter.kills > kills.get(counter.directory, counter.kills):
            limit = f" (limit {_size(counter.limit)})" if counter.limit else ""
            return f"the memory cgroup {counter.cgroup} counted an oom kill{limit}"
    for sample in reversed(before):
        for counter in sample.counters:
            if counter.limit and counter.used >= PRESSURE_SHARE * counter.limit:
                share = f"{counter.used / counter.limit:.0%}"
                return f"probably: SIGKILL that was not ours while {counter.cgroup} was at {share} of its memory"
        if sample.host_share >= PRESSURE_SHARE:
            return f"probably: SIGKILL that was not ours while memory was at {sample.host_share:.0%}"
    return ""


def _directories(pid: int, root: str) -> list[tuple[str, str]]:
    """(cgroup, directory) of the process, innermost first; v1's memory controller before the unified one."""
    unified = ""
    for line in read_small(f"/proc/{pid}/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return _upwards(f"{root}/memory", path)
        if not controllers:
            unified = path
    return _upwards(root, unified) if unified else []


def _upwards(mount: str, path: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    while path not in ("", "/"):
        if os.path.isdir(mount + path):  # a namespace may hide the inner ones
            found.append((path, mount + path))
        path = os.path.dirname(path)
    return [*found, ("/", mount)]


def _counters(directories: list[tuple[str, str]]) -> tuple[OomCounter, ...]:
    found = (_counter(cgroup, directory) for cgroup, directory in directories)
    return tuple(counter for counter in found if counter is not None)


def _counter(cgroup: str, directory: str) -> OomCounter | None:
    for events, limit, used in (
        # `local` counts this cgroup alone; `memory.events` also its descendants, who are other ranks.
        ("memory.events.local", "memory.max", "memory.current"),
        ("memory.events", "memory.max", "memory.current"),
        ("memory.oom_control", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        kills = _oom_kills(f"{directory}/{events}")
        if kills is not None:
            bound = _number(f"{directory}/{limit}")
            bound = 0 if bound >= _UNLIMITED else bound
            return OomCounter(cgroup, directory, kills, bound, _number(f"{directory}/{used}"))
    return None


def _oom_kills(path: str) -> int | None:
    words = (line.split() for line in read_small(path).splitlines())
    return next((int(pair[1]) for pair in words if pair[0] == "oom_kill"), None)


def _number(path: str) -> int:
    text = read_small(path)
    return int(text) if text.isdecimal() else 0  # "max"


def _host_share() -> float:
    sizes = dict(line.split()[:2] for line in read_small("/proc/meminfo").splitlines()[:3])  # Total, free, available.
    available, total = sizes.get("MemAvailable:"), sizes.get("MemTotal:")
    return 1.0 - int(available) / int(total) if available and total else 0.0


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} bytes"
