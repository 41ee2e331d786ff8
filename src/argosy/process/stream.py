"""Merge the output of many ranks into one readable stream: equal lines collapse to `[0-63] text`.

Pure: the caller passes bytes and `now`; `tail.py` reads the files, `lines.py` cuts lines and knows errors.

S1  What a rank wrote to one stream comes out in that order, all of it, once.
S2  Errors never collapse; a traceback is contiguous. They come at once, behind what their rank said before.
S3  A line waits for its like from other ranks at most `window_s`, and only as long as some living rank
    may still say it: a rank that has already said something later will not.
S4  Pending lines are bounded by PENDING_MAX bytes; beyond, the oldest come out without waiting.
"""

from bisect import bisect_right
from collections import deque
from dataclasses import dataclass
from math import inf
from typing import Literal

from argosy.core import format_ranks
from argosy.process.lines import Piece, Source

Stream = Literal["stdout", "stderr"]

PENDING_MAX = 4 * 1024 * 1024
_GROUP_COST = 256
"""About what Python spends on a pending line besides its bytes."""
_LABEL_MAX = 32
_COLOURS = (36, 33, 32, 35, 34, 96)


@dataclass(frozen=True, slots=True)
class Out:
    """What `ranks` wrote: lines joined by newlines, without the last one; raw bytes without prefixes."""

    stream: Stream
    ranks: frozenset[int]
    text: bytes


class _Group:
    """A pending line and the ranks that have said it."""

    __slots__ = ("born", "position", "ranks", "text")

    def __init__(self, position: int, text: bytes, rank: int, born: float) -> None:
        self.position, self.text, self.born = position, text, born
        self.ranks = [rank]


def _position(group: _Group) -> int:
    return group.position


class _Lane:
    """The pending lines of one stream, in the order in which they will come out.

    A rank joins the first group of its text behind the one it joined last: leaving from the front keeps S1.
    """

    def __init__(self, stream: Stream, size: int) -> None:
        self.stream: Stream = stream
        self.queue: deque[_Group] = deque()
        self.cost = 0
        self._by_text: dict[bytes, list[_Group]] = {}
        self._last = [0] * size

    def add(self, rank: int, text: bytes, position: int, now: float) -> bool:
        """Put a line into a pending group, or into a new one at `position`: true if that was needed."""
        last = self._last[rank]
        groups = self._by_text.get(text)
        if groups is None:
            groups = self._by_text[text] = []
        elif groups[-1].position > last:
            group = groups[bisect_right(groups, last, key=_position)]
            group.ranks.append(rank)
            self._last[rank] = group.position
            return False
        group = _Group(position, text, rank, now)
        groups.append(group)
        self.queue.append(group)
        self._last[rank] = position
        self.cost += len(text) + _GROUP_COST
        return True

    def floor(self, alive: set[int]) -> float:
        """Groups up to this position can gain no more ranks (S3)."""
        return min([self._last[rank] for rank in alive], default=inf)

    def last(self, rank: int) -> int:
        return self._last[rank]

    def pop(self) -> tuple[int, Out]:
        group = self.queue.popleft()
        groups = self._by_text[group.text]
        if len(groups) == 1:
            del self._by_text[group.text]
        else:
            del groups[0]
        self.cost -= len(group.text) + _GROUP_COST
        return group.position, Out(self.stream, frozenset(group.ranks), group.text)


class Merger:
    """Feed what ranks wrote, ask for what is due, write it. Call `due` after every round of `feed`.

    `prefix=False` is for one rank: its bytes pass unchanged and at once.
    """

    def __init__(self, size: int, *, window_s: float = 0.15, prefix: bool = True) -> None:
        self._window_s = window_s
        self._prefix = prefix
        self._alive = set(range(size))
        self._lanes: dict[Stream, _Lane] = {"stdout": _Lane("stdout", size), "stderr": _Lane("stderr", size)}
        self._sources: dict[tuple[int, Stream], Source] = {}
        self._waiting: dict[tuple[int, Stream], float] = {}
        self._ready: list[Out] = []
        self._position = 0
        # Wide enough for every single range, so that columns stay where they are.
        self._width = len(f"[{min(10, size - 1)}-{size - 1}]")
        # Progress bars of many ranks share about eight lines a second.
        self._rewrite_s = max(1.0, size / 8)

    def feed(self, rank: int, stream: Stream, data: bytes, now: float) -> None:
        """Take what `rank` wrote, cut anywhere. A rank that was closed lives again."""
        if not self._prefix:
            self._ready.append(Out(stream, frozenset((rank,)), data))
            return
        self._alive.add(rank)
        key = rank, stream
        source = self._sources.get(key)
        if source is None:
            source = self._sources[key] = Source(errors=stream == "stderr", rewrite_s=self._rewrite_s)
        self._place(key, source.feed(data, now), now)

    def close(self, rank: int, now: float) -> None:
        """The rank ended: its unfinished lines come out, and nobody waits for it any more."""
        for stream in self._lanes:
            source = self._sources.get((rank, stream))
            if source is not None:
                self._place((rank, stream), source.close(now), now)
        self._alive.discard(rank)

    def due(self, now: float) -> list[Out]:
        """Return what is to be written now, in order."""
        for key in [key for key, at in self._waiting.items() if at <= now]:
            self._place(key, self._sources[key].due(now), now)
        leaving: list[tuple[int, Out]] = []
        for lane in self._lanes.values():
            floor = lane.floor(self._alive) if lane.queue else 0
            while lane.queue:
                head = lane.queue[0]
                if head.position > floor and head.born + self._window_s > now:
                    break
                leaving.append(lane.pop())
        leaving.sort(key=lambda item: item[0])
        outs, self._ready = self._ready, []
        outs.extend(out for _, out in leaving)
        return outs

    def next_due(self) -> float | None:
        """When to call `due` again if nothing is fed before; None if nothing is pending."""
        if self._ready:
            return 0.0
        times = list(self._waiting.values())
        for lane in self._lanes.values():
            if lane.queue:
                head = lane.queue[0]
                times.append(0.0 if head.position <= lane.floor(self._alive) else head.born + self._window_s)
        return min(times, default=None)

    def render(self, out: Out, colour: bool) -> bytes:
        """The bytes to write for `out`: every line behind its ranks."""
        if not self._prefix:
            return out.text
        label = _label(out.ranks)
        prefix = label.ljust(self._width).encode()
        if colour:
            paint = f"\x1b[{_COLOURS[min(out.ranks) % len(_COLOURS)]}m" if len(out.ranks) == 1 else "\x1b[1m"
            prefix = b"%s%s\x1b[0m" % (paint.encode(), prefix)
        prefix += b" "
        # A colour that a line leaves open must not run into the next prefix.
        end = b"\x1b[0m\n" if b"\x1b[" in out.text else b"\n"
        return prefix + out.text.replace(b"\n", end + prefix) + end

    def _place(self, key: tuple[int, Stream], pieces: list[Piece], now: float) -> None:
        rank, stream = key
        lane = self._lanes[stream]
        for text, alone in pieces:
            if alone:
                self._release(rank)
                self._ready.append(Out(stream, frozenset((rank,)), text))
            elif lane.add(rank, text, self._position + 1, now):
                self._position += 1
        if lane.cost > PENDING_MAX:  # S4
            while lane.cost > PENDING_MAX // 2:
                self._ready.append(lane.pop()[1])
        at = self._sources[key].next_due()
        if at is None:
            self._waiting.pop(key, None)
        else:
            self._waiting[key] = at

    def _release(self, rank: int) -> None:
        """Let out everything up to what `rank` said last (S2)."""
        leaving: list[tuple[int, Out]] = []
        for lane in self._lanes.values():
            last = lane.last(rank)
            while lane.queue and lane.queue[0].position <= last:
                leaving.append(lane.pop())
        leaving.sort(key=lambda item: item[0])
        self._ready.extend(out for _, out in leaving)


def _label(ranks: frozenset[int]) -> str:
    text = format_ranks(ranks)
    if len(text) <= _LABEL_MAX:
        return f"[{text}]"
    return f"[{text[: text.rfind(',', 0, _LABEL_MAX - 12)]},... {len(ranks)} ranks]"
