"""What a process shows from outside and leaves behind: /proc, the end of its log, its last traceback.

Reads only. Environments are never read: their values may be secrets.
"""

import os
import re
from collections.abc import Sequence
from pathlib import Path

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


def log_tail(path: str | Path, *, bytes_max: int = 65536) -> str:
    """The end of a log, from the start of a line; "" if there is none. Punched holes read as nothing."""
    try:
        with open(path, "rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - bytes_max))
            data = log.read(bytes_max)
    except OSError:
        return ""
    if size > bytes_max:
        data = data.partition(b"\n")[2] or data
    text = data.replace(b"\0", b"").decode(errors="replace")
    return text.replace("\r\n", "\n")


def last_lines(text: str, count: int) -> list[str]:
    """The last `count` lines that are not blank; of a line rewritten with \\r what was last to be seen."""
    seen = (line.rstrip("\r").rpartition("\r")[2].rstrip() for line in text.split("\n"))
    return [line for line in seen if line][-count:]


_START = re.compile(r"^(?P<margin>\s*\+ )?(?:Exception Group )?Traceback \(most recent call last\):\s*$")
_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
_LINKS = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
_ASIDE = ("Exception ignored in", "Exception in thread", "--- Logging error")
_SYNTAX = re.compile(r"^(?:SyntaxError|IndentationError|TabError)\b")
_FILE = re.compile(r'^\s+File "')
_MESSAGE_LINES_MAX = 40


def last_traceback(text: str) -> str:
    """The last traceback of a log, whole: its causes, its group, its notes; or the last syntax error."""
    lines = [line.rstrip("\r") for line in without_prefix(text).split("\n")]
    starts = [number for number, line in enumerate(lines) if _START.match(line)]
    if not starts:
        return _last_syntax_error(lines)
    # What a destructor or a side thread raised did not end the process, if something else was raised.
    fatal = [number for number in starts if not (number and lines[number - 1].startswith(_ASIDE))] or starts
    first = last = fatal[-1]
    for earlier in reversed(starts[: starts.index(last)]):  # a chain is one, joined by a sentence of Python's
        if not any(line.strip("| ") in _LINKS for line in lines[earlier:first]):
            break
        first = earlier
    return "\n".join(lines[first : _end(lines, last)]).rstrip()


def without_prefix(text: str) -> str:
    """The text without `[rank3]: `, which torch's excepthook puts before each line."""
    return _PREFIX.sub("", text)


def exception_line(traceback: str) -> str:
    """`ValueError: bad batch` of a traceback: the line that names what was raised last."""
    lines = traceback.split("\n")
    start = max((number for number, line in enumerate(lines) if _START.match(line)), default=-1)
    if start >= 0 and _is_group(lines[start]):
        named = (line.strip()[2:] for line in lines[start + 1 :] if re.match(r"^\s*\| \S", line))
        return next(named, "").strip()
    return next((line.strip() for line in lines[start + 1 :] if line[:1].strip()), "")


def error_file_text(path: str | Path) -> str:
    """The exception that torch's elastic `record` wrote (TORCHELASTIC_ERROR_FILE), "" if there is none."""
    try:
        message = msgspec.json.decode(Path(path).read_bytes(), type=_ErrorFile).message
    except (OSError, msgspec.DecodeError):
        return ""
    if isinstance(message, str):
        return message.rstrip()
    return (message.extraInfo.py_callstack or message.message).rstrip()


class _ErrorExtra(msgspec.Struct):
    py_callstack: str = ""


class _ErrorMessage(msgspec.Struct):
    message: str = ""
    extraInfo: _ErrorExtra = msgspec.field(default_factory=_ErrorExtra)


class _ErrorFile(msgspec.Struct):
    message: str | _ErrorMessage


def _is_group(start: str) -> bool:
    return start.lstrip().startswith("+ Exception Group")


def _end(lines: Sequence[str], start: int) -> int:
    """The line after the traceback that starts at `start`: the exception, its further lines, its notes."""
    number = start + 1
    if _is_group(lines[start]):
        while number < len(lines) and re.match(r"^\s+[|+]", lines[number]):
            number += 1
        return number
    while number < len(lines) and (lines[number].startswith((" ", "\t")) or not lines[number]):
        number += 1
    number += 1  # the line that names the exception
    limit = min(len(lines), number + _MESSAGE_LINES_MAX)
    while number < limit and lines[number].strip() and not lines[number].startswith(_ASIDE):
        number += 1  # messages of several lines and notes; a log line glued to them does no harm
    return number


def _last_syntax_error(lines: Sequence[str]) -> str:
    """Python prints a syntax error of the script itself without the traceback's heading."""
    for number in range(len(lines) - 1, -1, -1):
        if _SYNTAX.match(lines[number]):
            first = number
            while first > 0 and lines[first - 1].startswith(" "):
                first -= 1
                if _FILE.match(lines[first]):
                    break
            return "\n".join(lines[first : number + 1])
    return ""


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
