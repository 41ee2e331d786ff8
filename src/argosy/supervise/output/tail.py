"""Read many growing log files at once: fair, bounded per round, and aware of holes, cuts and rotation.

Holes and long runs of zeros (what a hole becomes when a directory is copied) are replaced by one line that
says how much is missing. Cutting into lines is left to `lines.py`: a read may end anywhere.
"""

import errno
import os
import re

from argosy.supervise.output.logfile import cut_note
from argosy.supervise.output.stream import Stream

ROUND_MAX = 1 << 20
"""Bytes read in one round, of all files together."""
READ_MAX = 256 * 1024
READ_MIN = 8 * 1024
LAG_MAX = 32 << 20
IDLE_MIN_S, IDLE_MAX_S = 0.005, 0.05
_LOOK_EVERY = 20
"""Rounds between looks at the paths, for files that were replaced by others."""
_ZEROS_MIN = 4096
_ZEROS = re.compile(rb"\0{%d,}" % _ZEROS_MIN)
_MARK = re.compile(rb"\n(?=\.\.\. \d+ [kM]B of this log were cut here \.\.\.\n)")
_MARK_WITHIN = 4 << 20


class _File:
    """One log file, and where we are in it."""

    def __init__(self, rank: int, stream: Stream, path: str) -> None:
        self.rank, self.path = rank, path
        self.stream: Stream = stream
        self._fd = -1
        self._offset = 0
        self._zeros = 0
        """Bytes of the hole that we are in, not yet told."""
        self._line_begins = True

    def unread(self) -> int:
        """Bytes behind our offset; sees a file that appeared, or became shorter."""
        try:
            if self._fd < 0:
                self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            # lseek costs less than fstat, and this is done for every file in every round.
            size = os.lseek(self._fd, 0, os.SEEK_END)
            if size < self._offset:
                self._offset = self._after_cut(size)
        except OSError:  # Not there yet, no descriptor free, a stale handle: the next round tries again.
            self.close()
            return 0
        return size - self._offset

    def read(self, count: int) -> bytes | None:
        """The next bytes to show, about `count` at most; none if a hole was skipped, None if reading failed."""
        try:
            data = os.pread(self._fd, count, self._offset)
        except OSError:
            self.close()
            return None
        # Zeros at the end wait for what follows them: a hole may begin there.
        text = data.rstrip(b"\0")
        if text:
            self._offset += len(text)
            return self._show(text)
        if len(data) >= _ZEROS_MIN:
            self._skip(len(data))
            return b""
        self._offset += len(data)
        return self._show(data)

    def follow_path(self) -> None:
        """If another file has taken our path, and ours is read to its end, go over to it."""
        try:
            there, ours = os.stat(self.path), os.fstat(self._fd)
        except OSError:  # Deleted: its writer may still append to what we hold open.
            return
        if not os.path.samestat(there, ours) and ours.st_size <= self._offset:
            self.close()
            self._offset = 0

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _skip(self, count: int) -> None:
        """Go over a hole whose first `count` bytes were read."""
        end = self._offset + count
        try:
            end = max(end, os.lseek(self._fd, end, os.SEEK_DATA))
        except OSError as error:
            if error.errno == errno.ENXIO:  # No data behind it.
                end = max(end, os.lseek(self._fd, 0, os.SEEK_END))
        self._zeros += end - self._offset
        self._offset = end

    def _show(self, text: bytes) -> bytes:
        shown = bytearray()
        if self._zeros:
            zeros = len(text) - len(text.lstrip(b"\0"))
            self._zeros += zeros
            text = text[zeros:]
        position = 0
        for run in _ZEROS.finditer(text) if b"\0\0\0\0" in text else ():
            self._append(shown, text[position : run.start()])
            self._zeros += run.end() - run.start()
            position = run.end()
        self._append(shown, text[position:] if position else text)
        return bytes(shown)

    def _append(self, shown: bytearray, text: bytes) -> None:
        if not text:
            return
        if self._zeros:
            shown += (b"" if self._line_begins else b"\n") + cut_note(self._zeros)
            self._zeros = 0
        shown += text
        self._line_begins = text.endswith(b"\n")

    def _after_cut(self, size: int) -> int:
        """Where to go on in a file that was shortened: at the mark of our own cut, else near its end."""
        start = max(0, size - _MARK_WITHIN)
        marks = [found.start() for found in _MARK.finditer(os.pread(self._fd, size - start, start))]
        self._zeros = 0
        return start + marks[-1] + self._line_begins if marks else start


class Tail:
    """Follow log files of many ranks. Call `poll`, and wait `idle_s()` between calls that gave nothing.

    More than `lag_max` bytes behind, files are read in large pieces: lines then no longer collapse, but the
    reader catches up ten times as fast. None is for reading history, where nobody runs ahead.
    """

    def __init__(self, *, lag_max: int | None = LAG_MAX) -> None:
        self._lag_max = lag_max
        self._files: list[_File] = []
        self._first = 0
        self._rounds = 0
        self._idle_s = IDLE_MIN_S

    def add(self, rank: int, stream: Stream, path: str) -> None:
        """Follow `path` from its beginning; it need not exist yet."""
        self._files.append(_File(rank, stream, path))

    def close(self) -> None:
        """Let go of all files."""
        for file in self._files:
            file.close()
        self._files = []

    def poll(self) -> list[tuple[int, Stream, bytes]]:
        """Read what came, a bounded amount; files that got nothing this time are first the next time.

        Nothing is returned only where nothing is left to read: a hole that is skipped counts as empty bytes.
        """
        self._rounds += 1
        if self._rounds % _LOOK_EVERY == 0:
            for file in self._files:
                file.follow_path()
        count = len(self._files)
        order = [(self._first + step) % count for step in range(count)]
        unread = [(index, self._files[index].unread()) for index in order]
        waiting = [index for index, bytes_count in unread if bytes_count]
        share = min(READ_MAX, max(READ_MIN, ROUND_MAX // max(1, len(waiting))))
        if self._lag_max is not None and sum(bytes_count for _, bytes_count in unread) > self._lag_max:
            share = READ_MAX
        served = waiting[: ROUND_MAX // share]
        if len(served) < len(waiting):
            self._first = waiting[len(served)]
        chunks: list[tuple[int, Stream, bytes]] = []
        for file in map(self._files.__getitem__, served):
            data = file.read(share)
            if data is not None:
                chunks.append((file.rank, file.stream, data))
        self._idle_s = IDLE_MIN_S if served else min(IDLE_MAX_S, self._idle_s * 1.25)
        return chunks

    def idle_s(self) -> float:
        """How long to wait before the next `poll`: short while something comes, longer in silence."""
        return self._idle_s
