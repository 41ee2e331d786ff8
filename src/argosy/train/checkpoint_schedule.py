"""A run's checkpoints: when they are made, by whom, and how the next launch finds the end."""
# pyright: reportUnknownMemberType=false

import re
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from argosy.checkpoint import Cadence, Handle, KeepBack, KeepBest, KeepEvery, KeepLast, Mark, Saver
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, format_ranks
from argosy.data import Queue
from argosy.train.step import Diverged
from argosy.transfer import State, replicated

if TYPE_CHECKING:
    from argosy.train.run import Run

Keep = KeepLast | KeepBest | KeepEvery | KeepBack
_NEVER = Cadence(every_steps=1 << 60)
FLUSH_S = 600.0
HURRY_S = 5.0
FLUSH_SLICE_S = 0.2
SELDOM_S = 30.0


def seldom(tell: Callable[[str], None], now: Callable[[], float] = time.monotonic) -> Callable[[str], None]:
    """Tell the same trouble, of whatever step, now and then."""
    told: dict[str, float] = {}

    def say(text: str) -> None:
        reason = re.sub(r"'[^']*'|\d[\d.]*", "", text)  # Without paths and numbers.
        if now() - told.get(reason, -SELDOM_S) >= SELDOM_S:
            told[reason] = now()
            tell(text)

    return say


class Saves:
    """Makes a checkpoint every so many steps or seconds, whichever comes first, and one at the end."""

    def __init__(self, directory: Path, every: int, every_s: float, keep: Sequence[Keep]) -> None:
        self._directory, self._every, self._every_s = directory, every, every_s
        self._keep = tuple(keep)
        self._saver: Saver | None = None
        self._handle: Handle | None = None
        self._saved_at = time.monotonic()
        self._saved_step = -1
        self._finish_by = 0.0
        self._counted: list[tuple[Handle, list[tuple[Queue, int]]]] = []
        """Saves under way, and where the queues were."""
        self.agreed = self._said_waiting = False
        self.asked, self.site = 0, ""
        """How often the script has called `run.save` since the ranks met, and where last."""

    def open(self, run: "Run", like: Mark | None) -> None:
        """Make the saver, with all ranks, or `like` theirs, if one of them has begun a save that this one has not."""
        if self._saver is not None and like is not None and like.saves > self._saver.mark.saves:
            self._saver.let_go()
            self.close(hurry=True)
        if self._saver is None:
            self._saver = Saver(self._directory, keep=self._keep, cadence=_NEVER, like=like, say=seldom(run.tell))

    def ask(self, site: str) -> None:
        """The script wants a checkpoint."""
        self.asked, self.site = self.asked + 1, site

    def words(self) -> list[int]:
        """This rank's part of a vote: equal on all ranks."""
        return [self.asked, -self.asked]

    def compare(self, run: "Run", words: Sequence[int]) -> None:
        """All ranks have called `run.save` equally often, or the checkpoint would never be whole.

        Raises:
            Diverged: they have not.
        """
        if words[0] == -words[1]:
            return
        said = run.crew.gather((self.asked, self.site))
        most, site = max(said)
        others = format_ranks([rank for rank, (count, _) in enumerate(said) if count < most])
        run.give_up()
        raise Diverged(
            f"not all ranks called run.save: rank {others} did not, at {site}, before the vote on step {run.step:,}",
            hint="a checkpoint needs every rank: call run.save on all of them, after the same step",
        )

    @property
    def is_open(self) -> bool:
        return self._saver is not None

    @property
    def mark(self) -> Mark | None:
        return None if self._saver is None else self._saver.mark

    def due(self, step: int, now: float) -> bool:
        """Whether this rank finds that a checkpoint is due after `step`."""
        return step % self._every == 0 or now - self._saved_at >= self._every_s

    def save(self, run: "Run", tag: str | None) -> None:
        if self._saver is None:
            raise ConfigError(
                "run.save was called outside the loop", hint="call run.save in `for step in run.steps(...)`"
            )
        if run.step == self._saved_step and tag is None:
            return
        self._forget_items(run)
        self._handle = self._saver.save(state_of(run), run.step, tag=tag, era=len(run.ledger.eras))
        self._counted.append((self._handle, [(queue, queue.cursor) for queue in run.queues]))
        self._saved_at, self._saved_step = time.monotonic(), run.step

    def _forget_items(self, run: "Run") -> None:
        """Items that a durable checkpoint counts are of no use any more."""
        while self._counted and self._counted[0][0].durable.done():
            handle, counted = self._counted.pop(0)
            for queue, cursor in counted if run.rank == 0 and handle.durable.exception() is None else []:
                try:
                    queue.forget(cursor)
                except OSError as error:
                    run.tell(f"used items of {queue.directory} could not be deleted: {error.strerror}")

    def wait_for_copy(self) -> None:
        """Before state changes by anything but an optimizer."""
        if self._handle is not None:
            self._handle.copied.exception(FLUSH_S)

    def forget(self) -> None:
        """A rank was replaced: what was being saved may never be whole, and the ranks differ in what they know."""
        self._saved_step, self._counted, self.asked = -1, [], 0
        if self._saver is not None:
            self._saver.let_go()

    def finish(self, run: "Run") -> bool:
        """Have the last step on disk; False if a rank is lost meanwhile, or the disk refuses: then try again.

        Raises:
            DeadlinePassed: the disk has refused for too long.
        """
        self.save(run, None)
        if self._finish_by and not self._said_waiting:
            self._said_waiting = True
            run.say(f"the last checkpoint (step {run.step:,}) is retried for up to {FLUSH_S / 60:g} minutes")
        self._finish_by = self._finish_by or time.monotonic() + FLUSH_S
        return self._settle(run, self._finish_by)

    def settle(self, run: "Run") -> None:
        """Wait until all that was saved is on disk or has failed, or a rank is lost."""
        self.wait_for_copy()
        self._settle(run, time.monotonic() + FLUSH_S)

    def _settle(self, run: "Run", deadline: float) -> bool:
        while not run.crew.is_lost():
            if run.page is not None:
                run.page.beat()  # Waiting for a disk is no hang.
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"writing step {run.step} to disk", FLUSH_S, hint="is the disk full or slow?")
            if (durable := self.flush(FLUSH_SLICE_S)) is not None:
                return durable
        return False

    def flush(self, timeout_s: float = FLUSH_S) -> bool | None:
        """Wait until what was saved is durable; False if that has failed, None if it takes longer."""
        assert self._saver is not None
        try:
            self._saver.flush(timeout_s)
        except DeadlinePassed:
            return None
        except (ArgosyError, OSError):  # Said when it happened.
            return False
        return True

    def close(self, *, hurry: bool) -> None:
        """Let go of the directory; in a hurry, what a lost rank holds up is not waited for."""
        if self._saver is not None:
            self._saver.close(HURRY_S if hurry else FLUSH_S)
            self._saver = None


def state_of(run: "Run") -> State:
    """The tracked state, as checkpoints describe it: what only some ranks have is theirs."""
    state = run.tracked.state(run.healing.apart, transient=False)
    for name, ranks in run.healing.holders.items():
        unit = state.units.get(name)
        for key, member in unit.members.items() if unit is not None else ():
            if unit is not None and member.layout.ranks == tuple(range(run.size)):
                unit.members[key] = msgspec.structs.replace(member, layout=replicated(member.shape, ranks))
    return state
