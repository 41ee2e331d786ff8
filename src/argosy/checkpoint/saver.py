"""Save the state of a training without holding it up: snapshot, then commit in the background.

saver = Saver("runs/x")
saver.save({"model": model, "optimizer": optimizer}, step)
"""

import queue
import sys
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

from argosy.checkpoint.arranging import arrange, shares
from argosy.checkpoint.committing import Committer, Job
from argosy.checkpoint.format import step_name
from argosy.checkpoint.gathering import agreed, as_state, place, session
from argosy.checkpoint.owner import Owner, release, take
from argosy.checkpoint.retention import Cadence, Keep, KeepLast
from argosy.checkpoint.snapshot import SAMPLE, Arena, Snapshot
from argosy.checkpoint.stores import open_store
from argosy.core import ArgosyError, ConfigError, DeadlinePassed
from argosy.transfer import Role, State

ARENAS = 2


@dataclass(slots=True)
class Handle:
    """A save under way."""

    step: int
    copied: "Future[None]" = field(default_factory=lambda: Future[None]())
    """Done when the state may change again; `TornSnapshot` if it did too early."""
    durable: "Future[int]" = field(default_factory=lambda: Future[int]())
    """Done when the step is committed: no crash can take it away."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until durable, and raise what went wrong."""
        self.durable.result(timeout_s)


def warn(text: str) -> None:
    print(f"argosy: {text}", file=sys.stderr, flush=True)


class Saver:
    """Writes the checkpoints of one run. Every rank makes one, and saves the same steps in the same order.

    Raises:
        DirectoryInUse: another living run writes to this directory.
        ConfigError: there are several ranks and no process group.
    """

    def __init__(
        self,
        path: str | Path,
        *,
        keep: Iterable[Keep] = (KeepLast(3),),
        cadence: Cadence | None = None,
        sample: int = SAMPLE,
        say: Callable[[str], None] = warn,
    ) -> None:
        self._store = open_store(path, new=True)
        self.rank, self.size = place()
        self._session, self._count, self._sample, self._say = session(self.size), 0, sample, say
        self._owner = self._take()
        self._cadence = cadence or Cadence(every_steps=500)
        self._handles: list[Handle] = []
        self._arenas: queue.SimpleQueue[Arena | None] = queue.SimpleQueue()
        for _ in range(ARENAS):
            self._arenas.put(None)
        self._committer = Committer(self._store, self.rank, self.size, tuple(keep), say)
        self._committer.owner = self._owner
        self._jobs: queue.SimpleQueue[tuple[Job, Snapshot, Handle] | None] = queue.SimpleQueue()
        self._writer = Thread(target=self._write, name="argosy-checkpoint", daemon=True)
        self._writer.start()
        self._last_step, self._closed = -1, False
        self._hooks: list[Any] = []

    def _take(self) -> Owner | None:
        owner, error = None, None
        if self.rank == 0:
            try:
                owner = take(self._store, self._session)
            except ArgosyError as caught:
                error = caught
        faults = agreed(self.size, None if error is None else str(error))
        if error is not None:
            raise error
        if faults:
            raise ConfigError(faults[0])
        return owner

    def save(
        self,
        state: Any,
        step: int,
        *,
        tag: str | None = None,
        metrics: Mapping[str, float] | None = None,
        roles: Collection[Role] | None = None,
    ) -> Handle:
        """Begin to save, and return at once; the next optimizer step waits until the copy is complete.

        `state` is what `restore` takes as `into`. A tagged step is kept until its tag is removed. While two saves
        are under way the third waits for the first.
        """
        if self._closed:
            raise ConfigError("this saver is closed")
        described = as_state(state)
        if (described.rank, described.size) != (self.rank, self.size):
            raise ConfigError(
                f"the state is of rank {described.rank} of {described.size}, the saver of {self.rank} of {self.size}",
                hint="make the Saver after init_process_group",
            )
        found = shares(described, roles)
        text, border, size = arrange(found, self._committer.quiet(found))
        arena = self._arena(size)
        snapshot = Snapshot(found, arena, text, sample=self._sample)
        handle = Handle(step)
        self._fence(described, snapshot)
        self._count += 1
        job = Job(
            step=step,
            name=step_name(step, f"{self._session}{self._count:04x}"),
            border=border,
            size=size,
            room=len(text),
            state=described,
            tags=[tag] if tag else [],
            metrics=dict(metrics or {}),
        )
        self._handles = [each for each in self._handles if not each.durable.done()] + [handle]
        self._jobs.put((job, snapshot, handle))
        self._last_step = step
        return handle

    def _arena(self, size: int) -> Arena:
        arena = self._arenas.get()  # Waits while both are in use.
        if arena is None or arena.size < size:
            if arena is not None:
                arena.close()
            # A little more than needed: optimizer state that comes later often fits.
            arena = Arena(size + size // 64)
        return arena

    def _fence(self, state: State, snapshot: Snapshot) -> None:
        """Wait for the copy before the state changes; at once if nobody can tell when that is."""
        if not state.fences:
            snapshot.wait()
            return
        # A hook cannot be removed while hooks are called, so it goes with the next save.
        self._unfence()
        self._hooks = [register(snapshot.wait) for register in state.fences]

    def _unfence(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def due(self, step: int, *, step_s: float = 0.0, cost_s: float = 0.0) -> bool:
        """Whether a save is due at `step`, by the cadence; the same answer on ranks that pass the same numbers."""
        return step - max(self._last_step, 0) >= self._cadence.steps(step_s, cost_s)

    def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, whatever the policies say."""
        self._committer.pin(step, keep=True)

    def unpin(self, step: int) -> None:
        self._committer.pin(step, keep=False)

    def flush(self, timeout_s: float = 600.0) -> None:
        """Wait until every save begun is durable; raises the first failure.

        Raises:
            DeadlinePassed: not within `timeout_s`; the saves go on.
        """
        deadline = time.monotonic() + timeout_s
        for handle in list(self._handles):
            try:
                handle.durable.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                raise DeadlinePassed(f"step {handle.step} durable", timeout_s) from None

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for all saves, and let go of the directory. Failures were said when they happened."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        self._writer.join(timeout_s)
        self._unfence()
        if self._owner is not None:
            release(self._store, self._owner)
        while not self._arenas.empty():
            arena = self._arenas.get()
            if arena is not None:
                arena.close()

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _write(self) -> None:
        """The writer's thread: commit one snapshot after the other."""
        while (item := self._jobs.get()) is not None:
            job, snapshot, handle = item
            try:
                snapshot.wait()
                if snapshot.error is not None:
                    raise snapshot.error
                handle.copied.set_result(None)
                self._committer.commit(job, snapshot)
                handle.durable.set_result(job.step)
            except BaseException as error:  # Training goes on; whoever waits is told.
                self._say(f"step {job.step} was not saved: {error}")
                if not handle.copied.done():
                    handle.copied.set_exception(error)
                    self._committer.give_up(job, str(error))
                handle.durable.set_exception(error)
            finally:
                self._arenas.put(snapshot.arena)
