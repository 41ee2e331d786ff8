"""The progress page: 4096 bytes of shared memory in which a rank records how far it is.

One process writes (the rank), any number of processes on the same host read. Reading needs nothing from the rank: it
may be stopped, hung in C code or dead.

The header has 256 bytes of little-endian 64-bit words, each stored alone and therefore never torn:

    0 magic and version   3 phase                   6 pulse               9 groups that found no slot
    1 pid                 4 steps                   7 time of the pulse   10 committed steps of the run
    2 flags               5 time of the last step   8 current activity

It is followed by 32 group slots of 120 bytes (`_SLOT`): a sequence word (odd while the slot is being written), issued
collectives, issued point-to-point operations (their number differs between ranks), time of the last operation,
waiting since (0 if not in `Work.wait`), size, global rank of the first member and stride (0 if the members are not an
arithmetic progression), own rank in the group; then name, last operation and its call site as zero-padded UTF-8.

Times are CLOCK_MONOTONIC nanoseconds (`time.monotonic_ns`), comparable among the processes of one host only.

P1  A full /dev/shm is an OSError at creation, never a SIGBUS in the training.
P2  A reader never raises on garbage, and does not depend on the writer, which may be stopped inside a write: a torn
    slot is read again for 2 ms, then returned and marked as torn.
P3  A forked child (a DataLoader worker) does not write to its parent's page.
"""

import contextlib
import errno
import mmap
import os
import struct
import time
import weakref
from collections.abc import Callable
from threading import RLock
from typing import Any

from argosy.observe.progress import Flag, GroupProgress, Phase, RankProgress

PAGE_SIZE = 4096
GROUPS_MAX = 32

_MAGIC = int.from_bytes(b"ARGPAGE\x01", "little")  # The last byte is the version.
_PID, _FLAGS, _PHASE, _STEPS, _STEP_AT, _PULSE, _PULSE_AT, _DOING, _CROWDED, _REACHED = range(1, 11)
_HEADER = struct.Struct("<11Q")
_FIRST_SLOT = 256
_SLOT = struct.Struct("<QQQQQIIII24s16s24s")
_TEXT = struct.Struct("<16s24s")
_NAME_BYTES, _SITE_BYTES = 24, 24
_WAITING_AT, _TEXT_AT = 32, 80
_COUNT_MASK = (1 << 48) - 1  # A count never overflows, even from garbage on the page.
_READ_TRIES = 24
_READ_EAGER = 16
_READ_PAUSE_S = 0.0002

assert _SLOT.size == 120
assert _FIRST_SLOT + GROUPS_MAX * _SLOT.size == PAGE_SIZE


detached_in_child: "weakref.WeakSet[Any]" = weakref.WeakSet()
"""Whatever maps memory of this process alone; in a forked child, `detach` is called on each."""


def map_new(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Make a file of `size` allocated bytes and map it; on failure no file is left."""
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, size)
        return mmap.mmap(fd, size)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise
    finally:
        os.close(fd)


class Page:
    """A mapped progress page. Only the rank calls the writing methods, from any of its threads."""

    def __init__(self, memory: mmap.mmap | bytearray) -> None:
        self._view = memoryview(memory)
        self._words = self._view.cast("Q")
        self._lock = RLock()  # Re-entrant: a signal handler may issue a collective, too.
        self._slots: dict[str, int] = {}
        self.reached: Callable[[int], None] | None = None
        """Called with the number of committed steps when the run has reached it."""
        detached_in_child.add(self)

    @classmethod
    def create(cls, path: str | os.PathLike[str]) -> "Page":
        """Make the file and map it.

        Raises:
            FileExistsError: the file exists (others may have mapped it, so it is never reused).
            OSError: no space, or no permission; no file is left.
        """
        page = cls(map_new(path, PAGE_SIZE))  # P1
        page._words[0] = _MAGIC
        return page

    @classmethod
    def void(cls) -> "Page":
        """Return a page that nobody sees, for a writer that has none yet."""
        return cls(bytearray(PAGE_SIZE))

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Page":
        """Map a page that `create` made, for reading or writing.

        Raises:
            OSError: the file is missing, or too short for a page.
        """
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if os.fstat(fd).st_size < PAGE_SIZE:
                raise OSError(errno.EINVAL, "too short for a progress page", os.fspath(path))
            return cls(mmap.mmap(fd, PAGE_SIZE))
        finally:
            os.close(fd)

    def detach(self) -> None:
        """Release the shared memory: later writes are lost."""
        self._view = memoryview(bytearray(PAGE_SIZE))
        self._words = self._view.cast("Q")
        self._lock = RLock()  # After a fork the old one may be held by a thread that no longer exists.

    # -- the rank writes ---------------------------------------------------------------------------

    def claim(self) -> None:
        """Record that this process is the rank."""
        self._words[_PID] = os.getpid()

    def set_phase(self, phase: Phase) -> None:
        self._words[_PHASE] = phase
        self.beat()

    def set_flag(self, flag: Flag) -> None:
        with self._lock:
            self._words[_FLAGS] |= flag

    def clear_flag(self, flag: Flag) -> None:
        with self._lock:
            self._words[_FLAGS] &= ~int(flag)

    def beat(self) -> None:
        """Record a sign of life. Two threads at once may count as one."""
        words = self._words
        words[_PULSE_AT] = time.monotonic_ns()
        words[_PULSE] = (words[_PULSE] + 1) & _COUNT_MASK

    def enter(self, doing: int) -> None:
        """Record a sign of life and the activity that begins."""
        words = self._words
        words[_DOING] = doing
        words[_PULSE_AT] = time.monotonic_ns()
        words[_PULSE] = (words[_PULSE] + 1) & _COUNT_MASK

    def step(self) -> None:
        """Record an optimizer step."""
        words = self._words
        words[_STEP_AT] = time.monotonic_ns()
        words[_STEPS] = (words[_STEPS] + 1) & _COUNT_MASK

    def reach(self, step: int) -> None:
        """Record that `step` steps of the run are committed, by this process or its predecessors."""
        self._words[_REACHED] = step
        if self.reached is not None:
            self.reached(step)

    def add_group(self, name: str, size: int, group_rank: int, members: range | None) -> int:
        """Give a group a slot with counts of zero, and return its index.

        A known name gets its slot again. When all slots are in use, the longest silent group loses its slot.
        """
        first, stride = (members[0], members.step if size > 1 else 0) if members else (0, 0)
        with self._lock:
            index = self._slots.get(name)
            if index is None:
                index = len(self._slots) if len(self._slots) < GROUPS_MAX else self._take_oldest_slot()
                self._slots[name] = index
            self._write(index, _SLOT.pack(0, 0, 0, 0, 0, size, first, stride, group_rank, _name(name), b"", b"")[8:])
            self._words[_FLAGS] |= Flag.PROCESS_GROUP
        return index

    def issue(self, index: int, op: bytes, site: bytes, p2p: bool = False) -> None:
        """Count operation `op` of group `index`, called at `site`."""
        at = _FIRST_SLOT + index * 120
        word = at >> 3
        with self._lock:
            view, words = self._view, self._words
            sequence = words[word]
            words[word] = sequence + 1
            if p2p:
                words[word + 2] += 1
            else:
                words[word + 1] += 1
            words[word + 3] = time.monotonic_ns()
            _TEXT.pack_into(view, at + _TEXT_AT, op, site[-_SITE_BYTES:])
            words[word] = sequence + 2

    def wait(self, index: int) -> None:
        """Record that the rank begins to block in `Work.wait` of group `index`."""
        self._words[(_FIRST_SLOT + index * 120 + _WAITING_AT) >> 3] = time.monotonic_ns()

    def waited(self, index: int) -> None:
        """Record that the wait of group `index` has ended."""
        self._words[(_FIRST_SLOT + index * 120 + _WAITING_AT) >> 3] = 0

    def _take_oldest_slot(self) -> int:
        def last(name: str) -> int:
            return self._words[(_FIRST_SLOT + self._slots[name] * 120 + 24) >> 3]

        self._words[_CROWDED] += 1
        return self._slots.pop(min(self._slots, key=last))

    def _write(self, index: int, body: bytes) -> None:
        at = _FIRST_SLOT + index * 120
        sequence = self._words[at >> 3]
        self._words[at >> 3] = sequence + 1
        self._view[at + 8 : at + 120] = body
        self._words[at >> 3] = sequence + 2

    # -- anybody reads -----------------------------------------------------------------------------

    def read(self) -> RankProgress | None:
        """Return the content of the page, or None if it is not (yet) a progress page."""
        words = _HEADER.unpack_from(self._view)
        if words[0] != _MAGIC:
            return None
        groups: list[GroupProgress] = []
        for index in range(GROUPS_MAX):
            group = self._read_slot(_FIRST_SLOT + index * 120)
            if group is None:  # Slots are taken in order, and kept.
                break
            groups.append(group)
        return RankProgress(*words[1:], groups=tuple(groups))

    def _read_slot(self, at: int) -> GroupProgress | None:
        body = b""
        torn = True
        for attempt in range(_READ_TRIES):
            if attempt >= _READ_EAGER:
                time.sleep(_READ_PAUSE_S)  # The writer lost its core inside a write.
            before = self._words[at >> 3]
            body = bytes(self._view[at : at + 120])
            if not before & 1 and self._words[at >> 3] == before:
                torn = False
                break
        _, issued, p2p, when, since, size, first, stride, rank, name, op, site = _SLOT.unpack(body)
        if not size:
            return None
        return GroupProgress(
            _text(name), size, issued, p2p, when, since, _text(op), _text(site), rank, first, stride, torn
        )


def _name(name: str) -> bytes:
    """Shorten a group's name in the middle: torch's names are a digest and a counter."""
    raw = name.encode()
    return raw if len(raw) <= _NAME_BYTES else raw[: _NAME_BYTES - 8] + raw[-8:]


def _text(raw: bytes) -> str:
    return raw.rstrip(b"\0").decode(errors="replace")


def _detach_in_child() -> None:
    for mapped in list(detached_in_child):
        mapped.detach()


os.register_at_fork(after_in_child=_detach_in_child)  # P3
