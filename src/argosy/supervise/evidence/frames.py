"""Stacks as values: read what faulthandler and py-spy write, find the user's line, group ranks. Pure."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from argosy.core import format_ranks
from argosy.supervise.evidence.proc_sample import ProcSample

_OURS = str(Path(__file__).parents[2]) + "/"
_LIBRARY = re.compile(
    r"/lib(?:64)?/python3\.\d+/|/(?:site|dist)-packages/|/python3\d+\.zip/|\.so(?:\.\d+)*$"
    r"|/c[a-z0-9]{50,}\.py$"  # what torch.compile generated
    r"|^<(?!stdin>|string>)|^$|^\?\?\?$"
)
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x([0-9a-f]+)(?: \[([^\]]*)\])? ?(?:\(.*\))?:?")
_FRAME = re.compile(r'^  File "(.*)", line (\d+|\?\?\?) in (.*)$')


class Frame(msgspec.Struct, frozen=True):
    """One call; `line` 0 where none is known (native code)."""

    file: str
    line: int
    function: str

    @property
    def is_users(self) -> bool:
        """Not the standard library, an installed package, native code or Argosy."""
        return bool(self.line) and not (_LIBRARY.search(self.file) or self.file.startswith(_OURS))

    def __str__(self) -> str:
        return f"{self.file}:{self.line} in {self.function}" if self.line else f"{self.function} ({self.file})"


class Thread(msgspec.Struct, frozen=True):
    """One thread's calls, the most recent first."""

    name: str
    frames: tuple[Frame, ...]
    main: bool = False


class Stack(msgspec.Struct, frozen=True):
    """Where a rank is, as `faulthandler`, `py-spy` or only `proc` tell; `note` says why there is no more."""

    source: str
    threads: tuple[Thread, ...] = ()
    proc: ProcSample | None = None
    note: str = ""
    native: bool = False

    @property
    def frames(self) -> tuple[Frame, ...]:
        """The main thread's calls, most recent first, without those of Argosy that started the script."""
        main = next((thread for thread in self.threads if thread.main), None)
        frames = main.frames if main else self.threads[-1].frames if self.threads else ()
        return _without_boot(frames)


class _SpyFrame(msgspec.Struct):
    name: str
    filename: str
    line: int
    module: str | None = None


class _SpyThread(msgspec.Struct):
    frames: list[_SpyFrame]
    os_thread_id: int | None = None
    thread_name: str | None = None


def parse_faulthandler(text: str, *, main: int = 0) -> tuple[Thread, ...]:
    """Read a dump of all threads; `main` is the main thread's ident, without it the oldest thread counts."""
    found: list[tuple[int, str, list[Frame]]] = []
    for line in text.splitlines():
        if heading := _THREAD.match(line):
            found.append((int(heading[1], 16), heading[2] or "", []))
        elif found and (frame := _FRAME.match(line)):
            found[-1][2].append(Frame(frame[1], int(frame[2]) if frame[2].isdigit() else 0, frame[3]))
    if main not in [ident for ident, _, _ in found]:
        main = found[-1][0] if found else 0  # the interpreter lists the newest thread first
    return tuple(
        Thread(name or ("MainThread" if ident == main else f"0x{ident:x}"), tuple(frames), ident == main)
        for ident, name, frames in found
    )


def parse_py_spy(text: bytes, *, pid: int) -> tuple[Thread, ...]:
    """Read the output of `py-spy dump --json`; () if it is none."""
    try:
        threads = msgspec.json.decode(text, type=list[_SpyThread])
    except msgspec.DecodeError:
        return ()
    main = next((t for t in threads if t.os_thread_id == pid), None) or next(
        (t for t in threads if t.thread_name == "MainThread"), None
    )
    return tuple(
        Thread(
            thread.thread_name or str(thread.os_thread_id),
            tuple(Frame(f.filename or f.module or "???", f.line, f.name) for f in thread.frames),
            thread is main,
        )
        for thread in threads
    )


def place(stack: Stack) -> str:
    """`data.py:41 in load`: the innermost line of the user's own code, else the innermost line."""
    return place_in(stack.frames)


def place_in(frames: Sequence[Frame]) -> str:
    """The same of frames, most recent first; "" of none."""
    frame = next((f for f in frames if f.is_users), frames[0] if frames else None)
    if frame is None:
        return ""
    name = Path(frame.file).name
    return f"{name}:{frame.line} in {frame.function}" if frame.line else f"{frame.function} in {name}"


def group_stacks(stacks: Mapping[int, Stack]) -> list[tuple[list[int], Stack]]:
    """Ranks whose main threads are at the same lines, largest group first, each with its fullest stack."""
    groups: dict[object, list[int]] = {}
    for index in sorted(stacks):
        stack = stacks[index]
        stopped = stack.proc is not None and stack.proc.state in "TtD"
        # Lines, not names: py-spy qualifies a method's name and faulthandler does not.
        lines = tuple((f.file, f.line) for f in stack.frames if f.line)
        groups.setdefault((stopped, lines, "" if lines else stack.note), []).append(index)
    ordered = sorted(groups.values(), key=lambda ranks: (-len(ranks), ranks))
    return [(ranks, max((stacks[i] for i in ranks), key=lambda stack: stack.native)) for ranks in ordered]


def stacks_text(stacks: Mapping[int, Stack]) -> str:
    """All stacks in full for a file: one block per group, all threads of one of its ranks."""
    blocks: list[str] = []
    for ranks, stack in group_stacks(stacks):
        lines = [f"{'rank' if len(ranks) == 1 else 'ranks'} {format_ranks(ranks)} ({stack.source})"]
        lines += [f"  {text}" for text in (str(stack.proc) if stack.proc else "", stack.note) if text]
        for thread in sorted(stack.threads, key=lambda thread: not thread.main):
            lines.append(f"  thread {thread.name}:")
            lines += [f"    {frame}" for frame in _without_boot(thread.frames)] or ["    (no Python frame)"]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks) + "\n"


def _without_boot(frames: Sequence[Frame]) -> tuple[Frame, ...]:
    """Cut the outermost frames that start the script: Argosy's, and runpy's between them."""
    end = len(frames)
    while end and frames[end - 1].file.startswith((_OURS, "<frozen", "<string>")):
        end -= 1
    return tuple(frames[:end]) if end else tuple(frames)
