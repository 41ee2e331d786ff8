"""Merge the output of many ranks into one readable stream: equal lines collapse to `[0-63] text`.

Pure: the caller passes bytes and `now`; `tail.py` reads the files, `lines.py` cuts lines and tracebacks.

S1  What a rank wrote to one stream comes out in that order, all of it, once.
S2  A traceback is contiguous and never collapses. It comes at once, behind what its rank said before.
S3  A line waits for its like from other ranks at most `window_s`, and not once all the living have said it.
S4  Pending lines are bounded by PENDING_MAX bytes; beyond, the oldest come out without waiting.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import merge
from typing import Literal, NamedTuple

from argosy.core import format_ranks
from argosy.supervise.output.lines import LinePiece, LogSource

Stream = Literal["stdout", "stderr"]

PENDING_MAX = 4 * 1024 * 1024
_LINE_COST = 400
"""About what Python spends on a pending line besides its bytes."""
_DEPTH_MAX = 100
_SLICE_BYTES = 2048
_LABEL_MAX = 32
_COLOURS = (36, 33, 32, 35, 34, 96)


class Out(NamedTuple):
    """What `ranks` wrote: lines joined by newlines, without the last one; raw bytes without prefixes."""

    stream: Stream
    ranks: frozenset[int]
    text: bytes


class _Aged(NamedTuple):
    """Something to write, and when the first of its ranks said it."""

    born: float
    out: Out


class _Line:
    """A pending line of one rank."""

    __slots__ = ("born", "left", "rank", "text")

    def __init__(self, rank: int, text: bytes, born: float) -> None:
        self.rank, self.text, self.born = rank, text, born
        self.left = False


class _Lane:
    """The pending lines of one stream: a queue per rank, and who holds which text.

    A text leaves for all ranks that hold it. Ranks that hold it behind other lines say those first: so lines
    that all share are joined even where each rank says something of its own between them.
    """

    def __init__(self, stream: Stream, size: int) -> None:
        self.stream: Stream = stream
        self.cost = 0
        self._queues: list[deque[_Line]] = [deque() for _ in range(size)]
        self._holders: dict[bytes, dict[int, int]] = {}
        """text -> rank -> how often the rank holds it"""
        self._arrived: deque[_Line] = deque()
        self._complete: dict[bytes, None] = {}
        self._review = False
        self._alone = [frozenset((rank,)) for rank in range(size)]

    def add(self, rank: int, text: bytes, now: float, alive_count: int) -> None:
        line = _Line(rank, text, now)
        self._queues[rank].append(line)
        self._arrived.append(line)
        self.cost += len(text) + _LINE_COST
        holders = self._holders.get(text)
        if holders is None:
            holders = self._holders[text] = {rank: 1}
        else:
            holders[rank] = holders.get(rank, 0) + 1
        if len(holders) >= alive_count:
            self._complete[text] = None

    def oldest(self) -> _Line | None:
        while self._arrived and self._arrived[0].left:
            self._arrived.popleft()
        return self._arrived[0] if self._arrived else None

    def front(self, rank: int) -> _Line | None:
        queue = self._queues[rank]
        return queue[0] if queue else None

    def review(self) -> None:
        """A rank ended: more texts may be complete."""
        self._review = True

    def leave_complete(self, alive: set[int], outs: list[_Aged]) -> None:
        """Let out what every living rank has said (S3)."""
        texts = list(self._holders if self._review else self._complete)
        self._complete.clear()
        self._review = False
        for text in texts:
            while (holders := self._holders.get(text)) and alive <= holders.keys():
                self.leave(text, outs)

    def leave(self, text: bytes, outs: list[_Aged], busy: tuple[bytes, ...] = ()) -> None:
        """Let out the first `text` of all ranks that can get to it; `busy` texts wait for this call."""
        holders = self._holders[text]
        if len(holders) == 1:  # Most lines of a flood: this saves them half the time.
            (rank,) = holders
            if self._queues[rank][0].text == text:
                outs.append(_Aged(self._pop(rank), Out(self.stream, self._alone[rank], text)))
                return
        busy = (*busy, text)
        ranks: list[int] = []
        for rank in sorted(holders):
            queue = self._queues[rank]
            while queue and queue[0].text != text and queue[0].text not in busy and len(busy) < _DEPTH_MAX:
                self.leave(queue[0].text, outs, busy)
            # Bringing others forward never takes this rank's front away: it is busy.
            if queue and queue[0].text == text:
                ranks.append(rank)
        born = min([self._pop(rank) for rank in ranks])
        outs.append(_Aged(born, Out(self.stream, frozenset(ranks), text)))

    def _pop(self, rank: int) -> float:
        line = self._queues[rank].popleft()
        line.left = True
        self.cost -= len(line.text) + _LINE_COST
        holders = self._holders[line.text]
        if holders[rank] > 1:
            holders[rank] -= 1
        else:
            del holders[rank]
            if not holders:
                del self._holders[line.text]
        return line.born


class Merger:
    """Feed what ranks wrote, ask for what is due, write it. Call `due` after every round of `feed`.

    `prefix=False` is for one rank: its bytes pass unchanged and at once.
    """

    def __init__(self, size: int, *, window_s: float = 0.15, prefix: bool = True) -> None:
        self._window_s = window_s
        self._prefix = prefix
        self._alive = set(range(size))
        self._lanes: dict[Stream, _Lane] = {"stdout": _Lane("stdout", size), "stderr": _Lane("stderr", size)}
        self._sources: dict[tuple[int, Stream], LogSource] = {}
        self._waiting: dict[tuple[int, Stream], float] = {}
        self._ready: list[Out] = []
        self._prefixes: dict[tuple[frozenset[int], bool], bytes] = {}
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
            source = self._sources[key] = LogSource(rewrite_s=self._rewrite_s)
        self._place(key, source.feed(data, now), now)

    def feed_all(self, chunks: Sequence[tuple[int, Stream, bytes]], now: float) -> None:
        """Take what several ranks wrote, in turns: lines that are alike must not lie far apart to be found so."""
        longest = max((len(data) for _, _, data in chunks), default=0)
        step = _SLICE_BYTES if self._prefix and len(chunks) > 1 else max(1, longest)
        for at in range(0, longest, step):
            for rank, stream, data in chunks:
                if part := data[at : at + step]:
                    self.feed(rank, stream, part, now)

    def close(self, rank: int, now: float) -> None:
        """The rank ended: its unfinished lines come out, and nobody waits for it any more."""
        for stream in self._lanes:
            source = self._sources.get((rank, stream))
            if source is not None:
                self._place((rank, stream), source.close(now), now)
        self._alive.discard(rank)
        for lane in self._lanes.values():
            lane.review()

    def due(self, now: float) -> list[Out]:
        """Return what is to be written now, in order."""
        for key in [key for key, at in self._waiting.items() if at <= now]:
            self._place(key, self._sources[key].due(now), now)
        leaving: list[list[_Aged]] = []
        for lane in self._lanes.values():
            outs: list[_Aged] = []
            lane.leave_complete(self._alive, outs)
            while (line := lane.oldest()) and line.born + self._window_s <= now:
                lane.leave(line.text, outs)
            leaving.append(outs)
        self._release(merge(*leaving, key=lambda aged: aged.born))
        ready, self._ready = self._ready, []
        return ready

    def render(self, out: Out, colour: bool) -> bytes:
        """The bytes to write for `out`: every line behind its ranks."""
        if not self._prefix:
            return out.text
        prefix = self._prefixes.get((out.ranks, colour))
        if prefix is None:
            if len(self._prefixes) > 1000:
                self._prefixes.clear()
            prefix = self._prefixes[out.ranks, colour] = _prefix(out.ranks, self._width, colour)
        # A colour that a line leaves open must not run into the next prefix.
        end = b"\x1b[0m\n" if b"\x1b[" in out.text else b"\n"
        return prefix + out.text.replace(b"\n", end + prefix) + end

    def _place(self, key: tuple[int, Stream], pieces: list[LinePiece], now: float) -> None:
        rank, stream = key
        lane, alive_count = self._lanes[stream], len(self._alive)
        for text, alone in pieces:
            if alone:
                self._catch_up(rank)
                self._ready.append(Out(stream, frozenset((rank,)), text))
            else:
                lane.add(rank, text, now, alive_count)
        if lane.cost > PENDING_MAX:  # S4
            outs: list[_Aged] = []
            lane.leave_complete(self._alive, outs)
            while lane.cost > PENDING_MAX // 2 and (line := lane.oldest()):
                lane.leave(line.text, outs)
            self._release(outs)
        at = self._sources[key].next_due()
        if at is None:
            self._waiting.pop(key, None)
        else:
            self._waiting[key] = at

    def _catch_up(self, rank: int) -> None:
        """Let out everything that `rank` has said so far (S2)."""
        leaving: list[list[_Aged]] = []
        for lane in self._lanes.values():
            outs: list[_Aged] = []
            while line := lane.front(rank):
                lane.leave(line.text, outs)
            leaving.append(outs)
        self._release(merge(*leaving, key=lambda aged: aged.born))

    def _release(self, aged: Iterable[_Aged]) -> None:
        self._ready.extend(item.out for item in aged)


def _prefix(ranks: frozenset[int], width: int, colour: bool) -> bytes:
    label = _label(ranks).ljust(width)
    if colour:
        number = _COLOURS[min(ranks) % len(_COLOURS)] if len(ranks) == 1 else 1
        label = f"\x1b[{number}m{label}\x1b[0m"
    return f"{label} ".encode()


def _label(ranks: frozenset[int]) -> str:
    text = format_ranks(ranks)
    if len(text) <= _LABEL_MAX:
        return f"[{text}]"
    return f"[{text[: text.rfind(',', 0, _LABEL_MAX - 12)]},... {len(ranks)} ranks]"
