"""Copy a state into warm memory in the background, and find out whether it changed meanwhile.

S1  The copy and its digest come from one load of each word: the digest is that of the copy, torn or not.
    What is on a device is copied twice: by the device into pinned memory, while it works on, then into the arena.
S2  When all is copied a part of the source is summed again: if the sums differ, somebody wrote during the copy, and
    the snapshot is discarded. The fence, before the state changes, waits for that.
"""

import random
import sys
import threading
import time
from collections.abc import Callable
from threading import Event, Thread, get_ident
from typing import Any

import numpy as np
from numpy.typing import NDArray

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.write_plan import Arrangement
from argosy.core import ArgosyError, DeadlinePassed
from argosy.transfer import HostCopies, PinnedMemory, Progress, State, is_plain, to_host

SAMPLE = 64
"""One chunk in so many is summed again at the end, at least those of so many bytes, and all that no fence protects."""
SAMPLE_BYTES = 64 << 20
COPY_S = 600.0
LOOK_S = 0.001
"""How often a writer looks how far the copy is."""
WRITE_S = 1.0
"""How long a single write of the thread that saves may take and still be found."""


class TornSnapshot(ArgosyError):
    """The state was written to while it was copied; the snapshot is discarded."""


def torn(name: str) -> TornSnapshot:
    return TornSnapshot(f"{name} was written to while it was copied: wait for handle.copied before you do")


def address_of(local: Any) -> int:
    """Where a tensor or array begins."""
    return local.data_ptr() if hasattr(local, "data_ptr") else local.ctypes.data


def version_of(local: Any) -> int:
    """How often torch has written to a tensor, as far as it counts: not what fused optimizers or numpy do."""
    return local._version if hasattr(local, "data_ptr") and not local.is_inference() else 0


def settled(local: Any) -> Any:
    """The same cells in contiguous memory of the CPU: itself, or a copy where it must be."""
    if is_plain(local):
        return local
    if hasattr(local, "data_ptr"):
        return to_host(local.detach()).resolve_conj().resolve_neg().contiguous()
    return np.ascontiguousarray(local)


class Snapshot:
    """A copy under way or done, in the order of the arena. `wait` is the fence."""

    def __init__(
        self, arranged: Arrangement, state: State, arena: Arena, *, sample: int = SAMPLE, done: "Done" = lambda _: None
    ) -> None:
        self.arena, self.arranged, self._sample, self._tell = arena, arranged, sample, done
        arena.begin()
        arena.map[: len(arranged.header)] = arranged.header
        locals_ = arranged.tensors(state)
        on_device = [i for i, local in enumerate(locals_) if _is_on_device(local)]
        self._copies = HostCopies([locals_[i] for i in on_device], _pinned) if on_device else None
        """Of what is on a device; S1 and S2 are then about these copies, and the fence is the device's."""
        moved: dict[int, Any] = dict(zip(on_device, self._copies.copies if self._copies else [], strict=True))
        self._sources: list[Any] = [moved[i] if i in moved else settled(local) for i, local in enumerate(locals_)]
        table = arranged.table([address_of(source) for source in self._sources], arena.address)
        self.sums = np.zeros((len(table.counts), 2), np.uint64)
        """Those of all chunks, when `done` is told of no error."""
        now = arranged.at_once
        if self._copies is not None and any(i in moved for i in np.unique(arranged.share_of[now]).tolist()):
            self._copies.wait()
        self.sums[now] = table.only(now).perform()
        self._later = np.flatnonzero(~now)
        self._on_device = on_device
        self._late_on_host = [i for i in self._late_shares() if i not in moved]
        self._versions = [version_of(self._sources[i]) for i in self._late_on_host]
        self._table = table.only(~now)
        self._places = arranged.places[self._later]
        self._all_on_device = bool(moved) and not self._late_on_host
        self._progress = Progress()
        self._done, self._asked = Event(), Event()
        self._saving_thread = get_ident()
        self._fenced = False
        self._written_to: list[str] = []
        """Shares on a device that were written to before the fence, by name."""
        self.error: BaseException | None = None
        """Why it is discarded, when `done` is told."""
        Thread(target=self._run, name="argosy-snapshot", daemon=True).start()

    def _run(self) -> None:
        try:
            if self._copies is not None:
                self._copies.wait()
            found = self._table.perform(progress=self._progress)
            self._check(found)
            self.sums[self._later] = found
        except BaseException as error:  # For the thread that waits.
            self.error = error
        self._sources.clear()
        if self._copies is not None:
            self._copies.give_back()
        self._done.set()
        self._tell(self)

    def wait(self) -> None:
        """Return when the source may change: the copy is complete and was checked.

        Raises:
            DeadlinePassed: it is not, after ten minutes.
        """
        self._note_ask()
        if self._copies is not None:
            if not self._fenced:
                self._fenced = True
                self._written_to = self._fence_names(self._copies.written_to())
            self._copies.fence()
            if self._all_on_device:
                return
        if not self._done.wait(COPY_S):
            raise DeadlinePassed("the state copied, so that it may change", COPY_S)

    def until(self, end: int) -> None:
        """Return when the first `end` bytes of the arena are copied; raises what went wrong, if it did."""
        self._note_ask()
        needed = int(np.searchsorted(self._places, end))
        deadline = time.monotonic() + COPY_S
        while self._progress.copies < needed and not self._done.wait(LOOK_S):
            if time.monotonic() > deadline:
                raise DeadlinePassed("the state copied, so that it can be written", COPY_S)
        if self.error is not None:
            raise self.error

    def _await_write(self) -> None:
        """Wait for the write that the saving thread may be in the middle of: torch counts it only when it is over.

        The thread is in none when it waits for the copy or another event, or is at another place of its program.
        """
        place, deadline = self._place(), time.monotonic() + WRITE_S
        while place is not None and self._place() == place and time.monotonic() < deadline:
            if self._asked.wait(LOOK_S):
                return

    def _place(self) -> tuple[int, int] | None:
        """Where the saving thread is in its program; None if it has ended or waits for a lock or an event."""
        frame = sys._current_frames().get(self._saving_thread)  # pyright: ignore[reportPrivateUsage]
        if frame is None or frame.f_code.co_filename == threading.__file__:
            return None
        return id(frame), frame.f_lasti

    def _note_ask(self) -> None:
        if get_ident() == self._saving_thread:
            self._asked.set()

    def _fence_names(self, places: list[int]) -> list[str]:
        """The shares at these places among those on a device that only the fence protects, by name."""
        late = set(self._late_shares())
        return [self.arranged.shares[i].name for i in (self._on_device[place] for place in places) if i in late]

    def _late_shares(self) -> list[int]:
        return np.unique(self.arranged.share_of[self._later]).tolist()

    def _check(self, found: NDArray[np.uint64]) -> None:
        """S2: look whether torch has counted a write, and sum a part of the source again, now that all was copied."""
        if self._written_to:
            raise torn(self._written_to[0])
        if self._late_on_host:
            self._await_write()
        for i, version in zip(self._late_on_host, self._versions, strict=True):
            if version_of(self._sources[i]) != version:
                raise torn(self.arranged.shares[i].name)
        chosen = np.ones(len(found), bool)
        if self._sample > 1:
            chosen = self.arranged.doubtful[self._later].copy()
            enough = SAMPLE_BYTES * len(found) // max(self.arranged.size, 1)
            count = min(len(found), max(-(-len(found) // self._sample), enough))
            chosen[random.sample(range(len(found)), count)] = True
        again = self._table.only(chosen)
        again.rows[:, 1] = 0
        wrong = np.flatnonzero(chosen)[(again.perform() != found[chosen]).any(axis=1)]
        if len(wrong):
            raise torn(self.arranged.named(int(self._later[wrong[0]])))


def _is_on_device(local: Any) -> bool:
    return hasattr(local, "data_ptr") and not local.is_cpu


_pinned = PinnedMemory()
Done = Callable[[Snapshot], None]
"""Told once, by the thread that copies, when the source may change."""
