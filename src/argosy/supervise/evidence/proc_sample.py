"""What a process shows from outside, in /proc. Environments are never read: their values may be secrets."""

import os

import msgspec

THREADS_MAX = 32


class ThreadSample(msgspec.Struct, frozen=True):
    """One thread as the kernel sees it."""

    tid: int
    state: str
    wchan: str = ""


class ProcSample(msgspec.Struct, frozen=True):
    """A process as the kernel sees it: state letter, CPU ticks since its start, start time in ticks."""

    state: str
    ticks: int
    threads: int
    start: int
    wchan: str = ""
    syscall: str = ""
    each: tuple[ThreadSample, ...] = ()

    def __str__(self) -> str:
        where = f", in {self.wchan}" if self.wchan else ""
        call = f", syscall {self.syscall.split()[0]}" if self.syscall else ""
        count = f"{self.threads} thread{'s' * (self.threads > 1)}"
        return f"state {self.state}{where}{call}, {count}, {self.ticks} CPU ticks"


def read_proc(pid: int, *, deep: bool = False) -> ProcSample | None:
    """Sample a process, None if it is gone; `deep` adds what its threads wait for."""
    stat = read_small(f"/proc/{pid}/stat")
    if not stat:
        return None
    fields = stat.rpartition(")")[2].split()  # the command's name may hold spaces and parentheses
    shallow = ProcSample(fields[0], int(fields[11]) + int(fields[12]), int(fields[17]), int(fields[19]))
    if not deep:
        return shallow
    return msgspec.structs.replace(
        shallow, wchan=_wchan(f"/proc/{pid}"), syscall=read_small(f"/proc/{pid}/syscall"), each=_threads(pid)
    )


def catches(pid: int, signal_number: int) -> bool:
    """Whether the process handles the signal now; after an exec it no longer does, and would die of it."""
    return _has_signal(pid, "SigCgt:", signal_number)


def blocks(pid: int, signal_number: int) -> bool:
    """Whether its main thread lets the signal wait, as it does while it handles that very signal."""
    return _has_signal(pid, "SigBlk:", signal_number)


def _has_signal(pid: int, field: str, signal_number: int) -> bool:
    for line in read_small(f"/proc/{pid}/status").splitlines():
        if line.startswith(field):
            return bool(int(line.split()[1], 16) >> (signal_number - 1) & 1)
    return False


def _threads(pid: int) -> tuple[ThreadSample, ...]:
    try:
        found = [int(name) for name in os.listdir(f"/proc/{pid}/task")]
    except OSError:
        return ()
    tids = sorted(found, key=lambda tid: (tid != pid, tid))[:THREADS_MAX]  # The main thread first, if pids wrapped too.
    samples: list[ThreadSample] = []
    for tid in tids:
        stat = read_small(f"/proc/{pid}/task/{tid}/stat")
        if stat:
            state = stat.rpartition(")")[2].split()[0]
            samples.append(ThreadSample(tid, state, _wchan(f"/proc/{pid}/task/{tid}")))
    return tuple(samples)


def _wchan(directory: str) -> str:
    name = read_small(f"{directory}/wchan")
    return "" if name == "0" else name  # 0: running, or the kernel does not tell this user


def read_small(path: str) -> str:
    """What a file of the kernel says, "" if there is none; half the calls of a file object: it is asked often."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        return os.read(fd, 65536).decode(errors="replace").strip()
    except OSError:
        return ""
    finally:
        os.close(fd)
