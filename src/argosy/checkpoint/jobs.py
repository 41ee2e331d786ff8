"""Saves under way: what their callers hold, the thread that hands them to the writer, and how they end."""

import atexit
import queue
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from threading import Event, Thread, current_thread

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.format import Draft, Entry
from argosy.checkpoint.keeper.messages import Overtaken
from argosy.checkpoint.operations import segment_name
from argosy.checkpoint.own_writer import Writer
from argosy.checkpoint.owner import LEAVE_S, Claim, disclaim
from argosy.checkpoint.snapshot import COPY_S, Snapshot
from argosy.checkpoint.state_input import without_collection
from argosy.checkpoint.write_plan import Habits

EXIT_S, EXIT_SAY_S = 60.0, 3.0
BEGIN_S = 0.1


def warn(text: str) -> None:
    print(f"argosy: {text}", file=sys.stderr, flush=True)


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


def work(jobs: "queue.SimpleQueue[Job | Claim | None]", writer: Writer) -> None:
    """The saver's thread: one save after the other goes to the writer. It does not keep the saver alive."""
    begun: list[Handle] = []
    while isinstance(job := jobs.get(), Job):
        begun = [each for each in begun if not each.durable.done()] + [job.handle]
        writer.submit(job.draft, job, job.end)
        del job
    if job is not None:
        wait((handle.durable for handle in begun), LEAVE_S)
        writer.close()
        disclaim(job)
        at_exit.pop(current_thread(), None)


def drop(jobs: "queue.SimpleQueue[Job | Claim | None]", mine: Claim, thread: Thread) -> None:
    """A saver is gone that nobody closed: its thread ends what was begun, and lets go of the directory."""
    mine.leaving = thread
    jobs.put(mine)


under_way: dict[str, list[Handle]] = {}
"""The saves of this process that are not durable yet, by the places that they go to."""


def await_saves(path: str) -> None:
    """Wait for what this process is saving to a place, however it ends: its restore shall find it."""
    wait((handle.durable for handle in under_way.get(path, ())), EXIT_S)


at_exit: dict[Thread, Callable[[], None]] = {}
"""How savers are dropped that nobody closed, by their threads."""


@atexit.register
def _end_all() -> None:
    """The program ends, and savers were not closed: what they began is ended, as far as it can be in a minute."""
    living = {thread: leave for thread, leave in at_exit.items() if thread.is_alive()}
    for leave in living.values():
        leave()
    deadline = time.monotonic() + EXIT_S
    for thread in living:
        try:
            thread.join(min(EXIT_SAY_S, max(0.0, deadline - time.monotonic())))
            if thread.is_alive():
                warn(f"waiting for the last checkpoint to be durable, up to {EXIT_S:g} s")
                thread.join(max(0.0, deadline - time.monotonic()))
        except KeyboardInterrupt:
            deadline = 0.0
        if thread.is_alive():
            warn("the last checkpoint is not durable: the program ended before it was")


class Job:
    """A save under way, as its writer sees it."""

    snapshot: Snapshot

    def __init__(self, draft: Draft, handle: Handle, habits: Habits, say: Callable[[str], None]) -> None:
        self.draft, self.handle, self._habits, self._say = draft, handle, habits, say
        self._entries: Future[list[Entry]] = Future()
        self._is_written = Event()
        """Its writing has begun."""

    @property
    def arena(self) -> Arena:
        return self.snapshot.arena

    def until(self, end: int) -> None:
        self.snapshot.until(end)
        self._is_written.set()

    def copied(self, snapshot: Snapshot) -> None:
        """The snapshot's thread: the copy is over. Boxes are described while they are written, and not before that
        has begun: it would wait for the interpreter."""
        if snapshot.error is not None:
            self.handle.copied.set_exception(snapshot.error)
            self._entries.set_exception(snapshot.error)
            return
        self.handle.copied.set_result(None)
        self._is_written.wait(BEGIN_S)
        try:
            with without_collection():
                file = f"{self.draft.name}/{segment_name(self.draft.rank)}"
                entries = snapshot.arranged.entries(snapshot.sums, file)
                self._habits.learn(entries)
            self._entries.set_result(entries)
        except BaseException as error:
            self._entries.set_exception(error)

    def entries(self) -> list[Entry]:
        """Wait for the copy; the boxes of this rank with their sums.

        Not by the fence: that would have the device's work wait for the copies from now on.
        """
        self._is_written.set()
        return self._entries.result(COPY_S)

    def end(self, error: BaseException | None) -> None:
        """Told by the writer, once: it is durable, or why it will not be."""
        if error is None:
            self.handle.durable.set_result(self.draft.step)
            return
        if not isinstance(error, Overtaken):
            self._say(f"step {self.draft.step} was not saved: {error}")
        self.handle.durable.set_exception(error)
