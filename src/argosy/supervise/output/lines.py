"""Cut the bytes of one rank's stream into pieces that can be shown: lines, and tracebacks kept whole.

Pure: the caller passes `now`. Files are read by `tail.py`, ranks are merged by `stream.py`.

A traceback is one piece and never collapses with those of other ranks: from its header (`Traceback (most recent call
last):`, the `File "x", line` that opens a syntax error, `Fatal Python error`, a faulthandler dump) to the exception
line, plus whatever the stream says in the 50 ms after it (chained exceptions, notes, longer messages). Colours are
looked through, and so is `[rank3]:`, which torch puts before each line of a traceback.
"""

import re
from typing import NamedTuple

LINE_MAX = 16 * 1024
BULK = 64 * 1024
"""A read of this size from one stream is a flood: it passes as one piece, at the speed of memory."""
BLOCK_MAX = 256 * 1024
SETTLE_S = 0.05
"""How long a traceback waits, after its exception line, for what belongs to it."""
QUIET_S = 1.0
"""After this much silence an unfinished line, or traceback, is shown as it is: it may be all there is."""

_DECORATION = re.compile(rb"\x1b\[[0-9;]*m|^\s*\[rank\d+\]: ?")
_HEADER = re.compile(
    rb'[\s|+]*(?:Exception Group )?Traceback \(most recent call last\):|  File ".+", line \d+\s*$'
    rb"|Fatal Python error|(?:Current t|T)hread 0x[0-9a-f]+ .*\(most recent call first\)|terminate called"
)
_HEADER_HINTS = (b"Traceback (most", b'  File "', b"Fatal Python", b"recent call first", b"terminate called")
_MARKS = (*_HEADER_HINTS, b"\r")
_GROUP_END = re.compile(rb"\s*\+-+\s*$")


class LinePiece(NamedTuple):
    """One line, or several joined by newlines; `alone` if it must not collapse with other ranks' lines."""

    text: bytes
    alone: bool


def final_state(line: bytes) -> bytes:
    """What a terminal would show of a line that carriage returns rewrote: its last part that is not empty."""
    if b"\r" not in line:
        return line
    return next((part for part in reversed(line.split(b"\r")) if part), b"")


def split_long(line: bytes) -> list[bytes]:
    """Cut a line into parts of at most LINE_MAX bytes, never inside a UTF-8 sequence."""
    parts: list[bytes] = []
    start = 0
    while len(line) - start > LINE_MAX:
        end = start + LINE_MAX
        while end > start + LINE_MAX - 3 and line[end] & 0xC0 == 0x80:
            end -= 1
        parts.append(line[start:end])
        start = end
    parts.append(line[start:])
    return parts


class LogSource:
    """One stream of one rank. Every byte fed comes out once, in order, but for what a `\\r` rewrote."""

    def __init__(self, *, rewrite_s: float) -> None:
        self._rewrite_s = rewrite_s
        self._open = b""
        """What came since the last newline, or carriage return."""
        self._state = b""
        """The newest finished state of the line that is being rewritten."""
        self._unseen = b""
        """That state, until it or a newer one is shown."""
        self._rewriting = False
        self._shown = b""
        self._shown_at = -1e9
        self._block: list[bytes] = []
        self._block_bytes = 0
        self._block_due = 0.0
        self._inside = False
        """In a traceback, before its exception line."""
        self._fed_at = 0.0

    def feed(self, data: bytes, now: float) -> list[LinePiece]:
        """Take bytes as read; return what can be shown."""
        pieces: list[LinePiece] = []
        self._fed_at = now
        if len(data) >= BULK:
            data = self._bulk(data, pieces)
        lines = data.split(b"\n")
        rest = lines.pop()
        if lines:
            lines[0] = self._finish(lines[0])
            if self._is_plain(data, lines):
                pieces.extend([LinePiece(line, False) for line in lines])
            else:
                self._lines(lines, now, pieces)
        if rest:
            self._extend(rest, now, pieces)
        return pieces

    def due(self, now: float) -> list[LinePiece]:
        """Return what has waited long enough."""
        pieces: list[LinePiece] = []
        if self._block and now >= self._block_due:
            self._end_block(pieces)
        if self._rewriting:
            state = self._unseen
            if self._open and now >= self._fed_at + QUIET_S:
                state = self._open
            if self._may_show(state) and now >= self._shown_at + self._rewrite_s:
                self._shown, self._shown_at, self._unseen = state, now, b""
                pieces.append(LinePiece(state, False))
        elif self._open and now >= self._fed_at + QUIET_S:
            line, self._open = self._open, b""
            self._line(line, now, pieces)
        return pieces

    def next_due(self) -> float | None:
        """When `due` will have something, if nothing is fed before."""
        times: list[float] = []
        if self._block:
            times.append(self._block_due)
        if self._rewriting:
            free_at = self._shown_at + self._rewrite_s
            if self._may_show(self._unseen):
                times.append(free_at)
            if self._may_show(self._open):
                times.append(max(free_at, self._fed_at + QUIET_S))
        elif self._open:
            times.append(self._fed_at + QUIET_S)
        return min(times, default=None)

    def close(self, now: float) -> list[LinePiece]:
        """The stream ended: return all that is left, with or without a newline."""
        pieces: list[LinePiece] = []
        if self._open or self._rewriting:
            self._lines([self._finish(b"")], now, pieces)
        self._end_block(pieces)
        return pieces

    def _is_plain(self, data: bytes, lines: list[bytes]) -> bool:
        """Whether these lines can pass without a look at each; the first may have begun before `data`."""
        if self._block or max(map(len, lines)) > LINE_MAX:
            return False
        return not any(mark in text for text in (lines[0], data) for mark in _MARKS)

    def _may_show(self, state: bytes) -> bool:
        return bool(state) and state != self._shown and not state.isspace()

    def _finish(self, end: bytes) -> bytes:
        """The line whose last bytes are `end`, as it stands when its newline comes."""
        line = self._open + end
        if self._rewriting:
            line = b"\r" + (final_state(line) or self._state)
        self._open = self._state = self._unseen = b""
        self._rewriting = False
        return line

    def _extend(self, rest: bytes, now: float, pieces: list[LinePiece]) -> None:
        """Keep the unfinished line, bounded: of a rewritten one the newest state, of a long one the end."""
        rest = self._open + rest
        if b"\r" in rest:
            before, _, rest = rest.rpartition(b"\r")
            state = final_state(before)[:LINE_MAX]
            if state:
                self._state = self._unseen = state
            self._rewriting = True
        *long, self._open = split_long(rest)
        for part in long:
            self._line(part, now, pieces)

    def _lines(self, lines: list[bytes], now: float, pieces: list[LinePiece]) -> None:
        for line in lines:
            if b"\r" in line:
                line = final_state(line)
                shown, self._shown = self._shown, b""
                if line and line == shown:  # The newline that ends a progress bar says nothing new.
                    continue
            for part in split_long(line):
                self._line(part, now, pieces)

    def _line(self, line: bytes, now: float, pieces: list[LinePiece]) -> None:
        if self._block:
            if self._inside or now < self._block_due:
                self._grow(line, now, pieces)
                return
            self._end_block(pieces)
        plain = _DECORATION.sub(b"", line) if line[:1] in b"\x1b[ " else line
        if _HEADER.match(plain):
            self._grow(line, now, pieces)
        else:
            pieces.append(LinePiece(line, False))

    def _grow(self, line: bytes, now: float, pieces: list[LinePiece]) -> None:
        """Add a line to the traceback, and see where in it we are."""
        plain = _DECORATION.sub(b"", line)
        if self._block_bytes + len(line) > BLOCK_MAX:
            inside = self._inside
            self._end_block(pieces)
            self._inside = inside
        self._block.append(line)
        self._block_bytes += len(line) + 1
        if _HEADER.match(plain):
            self._inside = True
        elif self._inside and (_GROUP_END.match(plain) or (plain and not plain[:1].isspace())):
            self._inside = False
            self._block_due = now + SETTLE_S
        if self._inside:
            self._block_due = now + QUIET_S

    def _end_block(self, pieces: list[LinePiece]) -> None:
        if self._block:
            pieces.append(LinePiece(b"\n".join(self._block), True))
        self._block, self._block_bytes, self._inside = [], 0, False

    def _bulk(self, data: bytes, pieces: list[LinePiece]) -> bytes:
        """Pass the finished lines of a flood as one piece; return what needs a closer look.

        That is a traceback which may still grow at its end; and all of it if a line is rewritten or too long.
        """
        if self._rewriting or b"\r" in data:
            return data
        cut = data.rfind(b"\n") + 1
        for hint in _HEADER_HINTS:
            found = data.rfind(hint, max(0, cut - BLOCK_MAX), cut)
            if found >= 0:
                cut = min(cut, data.rfind(b"\n", 0, found) + 1)
        text = self._open + data[:cut]
        position = 0
        while position < len(text):
            end = text.rfind(b"\n", position, position + LINE_MAX + 1)
            if end < 0:
                return data
            position = end + 1
        if text:
            self._end_block(pieces)
            self._open = b""
            pieces.append(LinePiece(text[:-1], True))
        return data[cut:]
