"""Where a saver's snapshots lie and who commits them: this process itself, or a keeper (`keeper/client.py`)."""

import queue
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.commit_step import Committer, Filling
from argosy.checkpoint.format import Draft
from argosy.checkpoint.owner import release
from argosy.core import DeadlinePassed

ARENAS = 2
LEND_TIMEOUT_S = 600.0
Done = Callable[[BaseException | None], None]
"""Told once, when a step is durable or why it will not be."""


class Snapshotting(Filling, Protocol):
    """A snapshot that is being made, and its memory."""

    @property
    def arena(self) -> Arena: ...


class Writer(Protocol):
    """Commits the snapshots of a saver."""

    def lend(self, size: int) -> Arena:
        """An arena of at least `size` bytes that nobody reads; waits for one, up to a deadline."""
        ...

    def submit(self, draft: Draft, filling: Snapshotting, done: Done) -> None:
        """Take over a snapshot, to be committed when it is whole; `draft` has no entries yet."""
        ...

    def abandon(self, name: str, arena: Arena | None, reason: str) -> None:
        """Step `name` will not be: take back what was lent for it, and tell the other ranks."""
        ...

    def let_go(self) -> None:
        """Wait no more for other ranks' parts of what was submitted."""
        ...

    def close(self) -> None: ...


class OwnWriter:
    """Commits in the thread that submits, from two arenas of this process."""

    def __init__(self, committer: Committer) -> None:
        self.committer = committer
        # The last one used comes first: a second is made only when two saves are under way.
        self._arenas: queue.LifoQueue[Arena | None] = queue.LifoQueue()
        for _ in range(ARENAS):
            self._arenas.put(None)

    def lend(self, size: int) -> Arena:
        try:
            arena = self._arenas.get(timeout=LEND_TIMEOUT_S)
        except queue.Empty:
            raise DeadlinePassed(
                "an earlier save durable, so that its memory can be used again", LEND_TIMEOUT_S
            ) from None
        if arena is None or arena.size < size:
            if arena is not None:
                arena.close()
            try:
                # A little more than needed: optimizer state that comes later often fits.
                arena = Arena(size + size // 64)
            except BaseException:
                self._arenas.put(None)
                raise
        return arena

    def submit(self, draft: Draft, filling: Snapshotting, done: Done) -> None:
        failure: BaseException | None = None
        try:
            self.committer.commit(draft, filling.arena.view, filling)
        except BaseException as error:
            failure = error
            with suppress(Exception):
                filling.entries()  # It may still be copied into its memory.
        self._arenas.put(filling.arena)
        done(failure)
        if failure is None:
            self.committer.tidy()

    def take_back(self, arena: Arena) -> None:
        """An arena that was lent is used no more."""
        self._arenas.put(arena)

    def abandon(self, name: str, arena: Arena | None, reason: str) -> None:
        if arena is not None:
            self.take_back(arena)
        if self.committer.size > 1:
            self.committer.give_up(name, reason)

    def let_go(self) -> None:
        self.committer.let_go()

    def close(self) -> None:
        if self.committer.owner is not None:
            try:
                release(self.committer.store, self.committer.owner)
            except OSError as error:  # The next run finds that the owner is dead.
                self.committer.say(f"{self.committer.store.name} could not be released: {error}")
        deadline = time.monotonic() + 1.0
        for _ in range(ARENAS):
            try:
                arena = self._arenas.get(timeout=max(0.0, deadline - time.monotonic()))
            except queue.Empty:
                return  # A writer that does not end keeps its memory.
            if arena is not None:
                arena.close()
