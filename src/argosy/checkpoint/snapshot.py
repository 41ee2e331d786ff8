"""Copy a state into warm memory in the background, and find out whether it changed meanwhile.

S1  The copy and its digest come from one load of each word: the digest is that of the copy, torn or not.
S2  When all is copied a part of the source is summed again: if the sums differ, somebody wrote during the copy, and
    the snapshot is discarded. The fence, before the state changes, waits for that.
"""

import random
import time
from bisect import bisect_left
from collections.abc import Callable, Sequence
from threading import Event, Thread
from typing import Any

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.arranging import Share, copies
from argosy.checkpoint.format import sums_text
from argosy.core import ArgosyError, DeadlinePassed
from argosy.transfer import Copy, Progress, Sums, copy_boxes

SAMPLE = 64
"""One chunk in so many is summed again at the end."""
COPY_S = 600.0
LOOK_S = 0.001
"""How often a writer looks how far the copy is."""
Done = Callable[[BaseException | None], None]


class TornSnapshot(ArgosyError):
    """The state was written to while it was copied; the snapshot is discarded."""


def address_of(local: Any) -> int:
    """Where a tensor or array begins."""
    return local.data_ptr() if hasattr(local, "data_ptr") else local.ctypes.data


def settled(local: Any) -> Any:
    """The same cells in contiguous memory of the CPU: itself, or a copy where it must be."""
    if hasattr(local, "data_ptr"):
        # A view that is conjugate or negative has other cells than its memory.
        return local.detach().cpu().resolve_conj().resolve_neg().contiguous()
    import numpy as np

    return np.ascontiguousarray(local)


class Snapshot:
    """A copy under way or done, in the order of the arena. `wait` is the fence."""

    def __init__(
        self, found: Sequence[Share], arena: Arena, text: bytes, *, sample: int = SAMPLE, done: Done = lambda _: None
    ) -> None:
        self.arena, self.shares, self._sample, self._tell = arena, found, sample, done
        arena.begin()
        arena.map[: len(text)] = text
        self._sources: list[Any] = []
        self._copies: list[Copy] = []
        self._counts: list[int] = []
        small: list[Copy] = []
        for share in found:
            source = settled(share.member.local)
            self._sources.append(source)
            parts = copies(share, address_of(source), arena.address)
            self._counts.append(len(parts))
            self._copies += parts
            # A buffer may change in the next forward, before any fence: it is copied now.
            small += parts if share.member.role in ("buffer", "local", "step", "rng") else []
        self._sums: dict[int, Sums] = dict(zip(map(id, small), copy_boxes(small), strict=True))
        self._later = sorted((copy for copy in self._copies if id(copy) not in self._sums), key=_place)
        self._places = [_place(copy) - arena.address for copy in self._later]
        self._progress = Progress()
        self._done = Event()
        self.error: BaseException | None = None
        Thread(target=self._run, name="argosy-snapshot", daemon=True).start()

    def _run(self) -> None:
        try:
            found = copy_boxes(self._later, progress=self._progress)
            self._check(found)
            self._sums |= zip(map(id, self._later), found, strict=True)
        except BaseException as error:  # Whoever waits is told.
            self.error = error
        self._sources.clear()
        self._done.set()
        self._tell(self.error)

    def wait(self) -> None:
        """Return when the source may change: the copy is complete and was checked.

        Raises:
            DeadlinePassed: it is not, after ten minutes.
        """
        if not self._done.wait(COPY_S):
            raise DeadlinePassed("the state copied, so that it may change", COPY_S)

    def until(self, end: int) -> None:
        """Return when the first `end` bytes of the arena are copied; raises what went wrong, if it did."""
        needed = bisect_left(self._places, end)
        deadline = time.monotonic() + COPY_S
        while self._progress.copies < needed and not self._done.wait(LOOK_S):
            if time.monotonic() > deadline:
                raise DeadlinePassed("the state copied, so that it can be written", COPY_S)
        if self.error is not None:
            raise self.error

    def _check(self, found: Sequence[Sums]) -> None:
        """S2: sum a part of the source again, now that all of it was copied."""
        chosen = list(range(len(found)))
        if self._sample > 1 and chosen:
            chosen = random.sample(chosen, -(-len(chosen) // self._sample))
        again = copy_boxes([self._later[i]._replace(destination=None) for i in chosen])
        for i, sums in zip(chosen, again, strict=True):
            if sums != found[i]:
                raise TornSnapshot(f"{self._name(self._later[i])} was written to while it was copied")

    def _name(self, copy: Copy) -> str:
        index = next(i for i, each in enumerate(self._copies) if each is copy)
        for share, count in zip(self.shares, self._counts, strict=True):
            if index < count:
                return f"{share.name}{share.box}"
            index -= count
        raise AssertionError(index)

    def sums(self) -> list[list[str]]:
        """The sums of each share's chunks, when the copy is complete."""
        self.wait()
        if self.error is not None:
            raise self.error
        texts = iter([sums_text(self._sums[id(copy)]) for copy in self._copies])
        return [[next(texts) for _ in range(count)] for count in self._counts]


def _place(copy: Copy) -> int:
    assert copy.destination is not None
    return copy.destination.address
