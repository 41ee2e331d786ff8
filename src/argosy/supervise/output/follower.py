"""Follow the output of many ranks: read their log files, and merge them into one stream."""

import time
from collections.abc import Iterator

from argosy.supervise.output.stream import Merger, Out, Stream
from argosy.supervise.output.tail import LAG_MAX, Tail


class Follower:
    """Add files, write what `outs` returns, wait `idle_s()`, and again; `rest` is the end."""

    def __init__(self, size: int, *, lag_max: int | None = LAG_MAX) -> None:
        self._size = size
        self._merger, self._tail = Merger(size, prefix=size > 1), Tail(lag_max=lag_max)
        self.render, self.idle_s = self._merger.render, self._tail.idle_s

    def add(self, rank: int, stream: Stream, path: str) -> None:
        """Follow a file of a rank; it need not exist yet."""
        self._tail.add(rank, stream, path)

    def outs(self, *, final: bool = False) -> Iterator[Out]:
        """What is to be written now; with `final` the files are read to their ends."""
        while True:
            chunks, now = self._tail.poll(), time.monotonic()
            self._merger.feed_all(chunks, now)
            yield from self._merger.due(now)
            if not final or not chunks:
                return

    def close(self, rank: int) -> None:
        """A rank ended: its unfinished lines are shown, and no line waits for it."""
        self._merger.close(rank, time.monotonic())

    def rest(self) -> list[Out]:
        """All that is left."""
        outs = list(self.outs(final=True))
        for rank in range(self._size):
            self.close(rank)
        return outs + self._merger.due(time.monotonic() + 60)
