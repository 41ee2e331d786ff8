"""What a process left behind: the end of its log, its last traceback, the file with its error."""

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec


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
