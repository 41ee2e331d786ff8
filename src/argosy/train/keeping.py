"""A run's checkpoints: when they are made, by whom, and how the next launch finds the end."""
# pyright: reportUnknownMemberType=false

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from argosy.checkpoint import Cadence, Handle, KeepBest, KeepEvery, KeepLast, Mark, Saver
from argosy.core import ArgosyError, DeadlinePassed
from argosy.transfer import State, describe, replicated

if TYPE_CHECKING:
    from argosy.train.run import Run

Keep = KeepLast | KeepBest | KeepEvery
_NEVER = Cadence(every_steps=1 << 60)
FLUSH_S = 600.0
FLUSH_SLICE_S = 0.2


class _Finished(msgspec.Struct):
    step: int
    until: int | None


class Saves:
    """Makes a checkpoint every so many steps or seconds, whichever comes first, and one at the end."""

    def __init__(self, directory: Path, every: int, every_s: float, keep: Sequence[Keep] | None) -> None:
        self._directory, self._every, self._every_s = directory, every, every_s
        self._keep = tuple(keep) if keep is not None else (KeepLast(3),)
        self._saver: Saver | None = None
        self._handle: Handle | None = None
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self.agreed = False

    def open(self, run: "Run", like: Mark | None) -> None:
        """Make the saver, with all ranks, or `like` theirs."""
        if self._saver is None:
            self._saver = Saver(self._directory, keep=self._keep, cadence=_NEVER, like=like, say=run.tell)

    @property
    def mark(self) -> Mark | None:
        return None if self._saver is None else self._saver.mark

    def due(self, step: int, now: float) -> bool:
        """Whether this rank finds that a checkpoint is due after `step`."""
        return step % self._every == 0 or now - self._saved_at >= self._every_s

    def save(self, run: "Run", tag: str | None) -> None:
        assert self._saver is not None, "a run saves inside its loop"
        if run.step == self._saved_step and tag is None:
            return
        self._handle = self._saver.save(state_of(run), run.step, tag=tag)
        self._saved_at, self._saved_step = time.monotonic(), run.step

    def wait_for_copy(self) -> None:
        """Before state changes by anything but an optimizer."""
        if self._handle is not None:
            self._handle.copied.exception(FLUSH_S)

    def forget(self) -> None:
        """A rank was replaced: what was being saved may never be whole, and the ranks differ in what they know."""
        self._saved_step = -1

    def finish(self, run: "Run") -> None:
        """Have the last step on disk, unless a rank is lost meanwhile: then this is tried again."""
        self.save(run, None)
        deadline = time.monotonic() + FLUSH_S
        while not self.flush(FLUSH_SLICE_S) and not run.crew.is_lost():
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"step {run.step} on disk", FLUSH_S, hint="is the disk full or slow?")

    def flush(self, timeout_s: float = FLUSH_S) -> bool:
        """Wait until what was saved is durable, or has failed; False if it takes longer."""
        assert self._saver is not None
        try:
            self._saver.flush(timeout_s)
        except DeadlinePassed:
            return False
        except ArgosyError:
            self._saved_step = -1  # Said when it happened; the next try saves it again.
        return True

    def close(self) -> None:
        if self._saver is not None:
            self._saver.close()
            self._saver = None

    def mark_finished(self, step: int, until: int | None) -> None:
        path = self._directory / "finished.json"
        path.with_suffix(".new").write_bytes(msgspec.json.encode(_Finished(step, until)))
        path.with_suffix(".new").replace(path)

    def finished_step(self) -> int | None:
        try:
            return msgspec.json.decode((self._directory / "finished.json").read_bytes(), type=_Finished).step
        except (OSError, msgspec.MsgspecError):
            return None


def state_of(run: "Run") -> State:
    """The tracked state, as checkpoints describe it: what only some ranks have is theirs."""
    tracked = run.tracked
    model: Any = next(iter(tracked.modules.values())) if len(tracked.modules) == 1 else tracked.modules
    state = describe(model or None, tracked.optimizers, others=tracked.others)
    for name, ranks in run.mending.holders.items():
        unit = state.units.get(name)
        for key, member in unit.members.items() if unit is not None else ():
            if unit is not None and member.layout.ranks == tuple(range(run.size)):
                unit.members[key] = replace(member, layout=replicated(member.shape, ranks))
    return state
