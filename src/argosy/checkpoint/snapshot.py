"""Copy a state into warm memory in the background, and find out whether it changed meanwhile.

S1  The copy and its digest come from one load of each word: the digest is that of the copy, torn or not.
S2  Before the state changes, the fence waits for the copy, then sums a part of the source again: if the sums
    differ, somebody wrote during the copy, and the snapshot is discarded.
"""

import random
from collections.abc import Sequence
from threading import Event, Lock, Thread
from typing import Any

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.arranging import Share, copies
from argosy.checkpoint.format import sums_text
from argosy.core import ArgosyError
from argosy.transfer import Copy, Sums, copy_boxes

SAMPLE = 64
"""One chunk in so many is summed again at the fence."""


class TornSnapshot(ArgosyError):
    """The state was written to while it was copied; the snapshot is discarded."""


def address_of(local: Any) -> int:
    """Where a tensor or array begins."""
    return local.data_ptr() if hasattr(local, "data_ptr") else local.ctypes.data


def settled(local: Any) -> Any:
    """The same cells in contiguous memory of the CPU: itself, or a copy where it must be."""
    if hasattr(local, "data_ptr"):
        return local.detach().cpu().contiguous()
    import numpy as np

    return np.ascontiguousarray(local)


class Snapshot:
    """A copy under way or done. `wait` is the fence."""

    def __init__(
        self, found: Sequence[Share], arena: Arena, text: bytes, *, threads: int = 1, sample: int = SAMPLE
    ) -> None:
        self.arena, self.shares, self._sample = arena, found, sample
        arena.begin()
        arena.map[: len(text)] = text
        self._sources: list[Any] = []
        self._copies: list[Copy] = []
        self._counts: list[int] = []
        small: list[Copy] = []
        for share in found:
            local = share.member.local
            source = settled(local)
            self._sources.append(source)
            parts = copies(share, address_of(source), arena.address)
            self._counts.append(len(parts))
            self._copies += parts
            # A buffer may change in the next forward, before any fence: it is copied now.
            small += parts if share.member.role in ("buffer", "local", "step", "rng") else []
        self._now = dict(zip(map(id, small), copy_boxes(small), strict=True))
        self._sums: list[Sums] = []
        self._done = Event()
        self._checked = False
        self._lock = Lock()
        self.error: BaseException | None = None
        self._thread = Thread(target=self._run, args=(threads,), name="argosy-snapshot", daemon=True)
        self._thread.start()

    def _run(self, threads: int) -> None:
        try:
            later = [copy for copy in self._copies if id(copy) not in self._now]
            sums = iter(copy_boxes(later, threads))
            self._sums = [self._now[id(copy)] if id(copy) in self._now else next(sums) for copy in self._copies]
        except BaseException as error:  # Whoever waits is told.
            self.error = error
        self._done.set()

    def wait(self) -> None:
        """Return when the source may change: the copy is complete and was checked."""
        self._done.wait()
        with self._lock:
            if not self._checked and self.error is None:
                self._check()
            self._checked = True

    def _check(self) -> None:
        chosen = [i for i, copy in enumerate(self._copies) if id(copy) not in self._now]
        if self._sample > 1 and chosen:
            chosen = random.sample(chosen, -(-len(chosen) // self._sample))
        again = copy_boxes([self._copies[i]._replace(destination=None) for i in chosen])
        for i, sums in zip(chosen, again, strict=True):
            if sums != self._sums[i]:
                self.error = TornSnapshot(f"{self._name(i)} was written to while it was copied")
        self._sources.clear()

    def _name(self, index: int) -> str:
        for share, count in zip(self.shares, self._counts, strict=True):
            if index < count:
                return f"{share.name}{share.box}"
            index -= count
        raise AssertionError(index)

    def sums(self) -> list[list[str]]:
        """The sums of each share's chunks, when the copy is complete."""
        self._done.wait()
        if self.error:
            raise self.error
        texts = iter([sums_text(sums) for sums in self._sums])
        return [[next(texts) for _ in range(count)] for count in self._counts]
