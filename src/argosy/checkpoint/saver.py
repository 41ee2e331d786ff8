"""Save the state of a training without holding it up: snapshot, then commit in the background.

saver = Saver("runs/x")
saver.save({"model": model, "optimizer": optimizer}, step)
"""

import os
import queue
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any, NamedTuple

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.arranging import Habits, arrange, entry, shared_digest, shares
from argosy.checkpoint.asking import checked_keep, checked_metrics, checked_step, checked_tags
from argosy.checkpoint.committing import Committer
from argosy.checkpoint.format import Draft, Entry, UnitInfo, step_name
from argosy.checkpoint.gathering import as_state, exchanged, place, run_begun_at, session, without_collection
from argosy.checkpoint.keeper.client import Keeping, KeptWriter, default_keeping
from argosy.checkpoint.keeper.messages import Overtaken
from argosy.checkpoint.operations import segment_name
from argosy.checkpoint.owner import claim, disclaim, take
from argosy.checkpoint.pacing import Pace, failure_rate
from argosy.checkpoint.retention import Cadence, Keep, KeepLast
from argosy.checkpoint.snapshot import SAMPLE, Snapshot
from argosy.checkpoint.stores import is_url, open_store
from argosy.checkpoint.writing import OwnWriter, Writer
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import here
from argosy.transfer import Role, State, Unit, checked_roles


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


class _Wanted(NamedTuple):
    """What is said of one save, checked."""

    tags: list[str]
    metrics: dict[str, float]
    roles: Collection[Role] | None


class Mark(NamedTuple):
    """How far the savers of a run are."""

    session: str
    saves: int


def warn(text: str) -> None:
    print(f"argosy: {text}", file=sys.stderr, flush=True)


class Saver:
    """Writes the checkpoints of one run. Every rank makes one, and saves the same steps in the same order.

    All make it together, except with `like`: so a rank that was replaced joins those that live.

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
        keeping: Keeping | None = None,
        sample: int = SAMPLE,
        like: "Mark | None" = None,
        say: Callable[[str], None] = warn,
    ) -> None:
        policies = checked_keep(keep)
        self.rank, self.size = place()
        self._sample, self._count, self._say = sample, 0 if like is None else like.saves, say
        self._alone = like is not None
        self._place = os.path.realpath(open_store(path, new=True).name) if not is_url(path) else str(path)
        claim(self._place, "{0.filename}:{0.lineno}".format(traceback.extract_stack(limit=2)[0]))
        try:
            self._session = session(self.size) if like is None else like.session
            self._writer = self._open(path, policies, keeping or default_keeping())
        except BaseException:
            disclaim(self._place)
            raise
        self._pace = self._paced(cadence or Cadence(every_steps=500))
        self._at: int | None = None
        self._habits = Habits()
        self._handles: list[Handle] = []
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread = Thread(target=self._work, name="argosy-checkpoint", daemon=True)
        self._thread.start()
        self._closed = False
        self._hooks: list[Any] = []

    def _open(self, path: str | Path, keep: tuple[Keep, ...], keeping: Keeping | None) -> Writer:
        """Make the writer; all ranks have one of the same kind, or all raise."""
        store = open_store(path, new=True)
        self._committer = Committer(store, self.rank, self.size, keep, self._say)
        if keeping is not None:
            writer, faults = self._agree(lambda: KeptWriter(self._committer, keeping, str(path)), PeerLost)
            if writer is not None and not faults:
                return writer
            if writer is not None:
                writer.close()
            self._say(f"no keeper, snapshots stay in the ranks: {faults[0]}")

        def own() -> Writer:
            try:
                self._committer.owner = take(store, self._session) if self.rank == 0 else None
            except OSError as error:
                raise ConfigError(f"{path} cannot be written to: {error.strerror}") from error
            return OwnWriter(self._committer, self._committer.owner)

        writer, _ = self._agree(own, ())
        assert writer is not None
        return writer

    def _agree(
        self, make: Callable[[], Writer], bearable: type[ArgosyError] | tuple[()]
    ) -> tuple[Writer | None, list[str]]:
        """Make a writer on every rank; what is not bearable on one is raised on all."""
        writer: Writer | None = None
        error: ArgosyError | None = None
        try:
            writer = make()
        except ArgosyError as caught:
            error = caught
        kind = "bearable" if isinstance(error, bearable) else "not"
        answers = exchanged(1 if self._alone else self.size, (kind, None if error is None else str(error)))
        fatal = [fault for other, fault in answers if fault is not None and other == "not"]
        if fatal:
            if writer is not None:
                writer.close()
            raise error or ConfigError(fatal[0])
        return writer, [fault for _, fault in answers if fault is not None]

    @property
    def mark(self) -> "Mark":
        """What a rank needs that joins the others in the middle: it makes its saver `like` theirs."""
        return Mark(self._session, self._count)

    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        tag: str | None = None,
        metrics: Mapping[str, float] | None = None,
        roles: Collection[Role] | None = None,
        era: int = 0,
    ) -> Handle:
        """Begin to save, and return at once; the next optimizer step waits until the copy is complete.

        `state` is what `restore` takes as `into`. Without `step` it is the one that `due` or `save` was last told. A
        tagged step is kept until its tag is removed (`untag`). While two saves are under way the third waits for the
        first; with a keeper none waits for the disk. All steps of a later `era` are newer than those of an earlier
        one: a training that has gone back to an older step begins one. Metrics that are not finite are not kept.

        Raises:
            ConfigError: something of it cannot be kept, or is no step, metric, tag or role.
        """
        if self._closed:
            raise ConfigError("this saver is closed")
        if step is None and self._at is None:
            raise ConfigError(
                "which step is saved is not known", hint="pass step=, or tell it by saver.due(step) or an earlier save"
            )
        self._at = number = checked_step(self._at if step is None else step)
        checked_roles(roles)
        wanted = _Wanted(checked_tags(tag), checked_metrics(metrics), roles)
        begun = time.monotonic()
        # Whatever becomes of it: ranks call their saves by the same numbers.
        self._count += 1
        name = step_name(number, f"{self._session}{self._count:04x}", era)
        handle = Handle(number)
        described, snapshot = self._begin(state, name, wanted, handle)
        self._fence(described, snapshot)
        self._pace.saved(number)
        self._pace.lost(time.monotonic() - begun)
        return handle

    def _begin(self, state: Any, name: str, wanted: "_Wanted", handle: Handle) -> tuple[State, Snapshot]:
        """Begin to copy, and have it committed behind; on error nothing is lent any more."""
        arena: Arena | None = None
        try:
            with without_collection():
                described = as_state(state)
                found = shares(described, wanted.roles)
                text, border, size = arrange(found, self._habits.quiet(found))
            if (described.rank, described.size) != (self.rank, self.size):
                here = f"the saver of {self.rank} of {self.size}"
                raise ConfigError(
                    f"the state is of rank {described.rank} of {described.size}, {here}",
                    hint="make the Saver after init_process_group",
                )
            draft = Draft(
                step=handle.step,
                name=name,
                rank=self.rank,
                size=self.size,
                entries=[],
                border=border,
                bytes=size,
                room=len(text),
                shared=shared_digest(described),
                **said(described, wanted.roles),
                tags=wanted.tags,
                metrics=wanted.metrics,
            )
            arena = self._writer.lend(size)
            with without_collection():
                snapshot = Snapshot(found, arena, text, sample=self._sample, done=partial(_tell, handle.copied))
        except BaseException as error:
            self._writer.abandon(name, arena, str(error))
            raise
        self._handles = [each for each in self._handles if not each.durable.done()] + [handle]
        self._jobs.put(_Job(draft, snapshot, handle, self._habits))
        return described, snapshot

    def _fence(self, state: State, snapshot: Snapshot) -> None:
        """Wait for the copy before the state changes; at once if nobody can tell when that is."""
        if not state.fences:
            snapshot.wait()
            return

        def fence() -> None:
            begun = time.monotonic()
            snapshot.wait()
            self._pace.lost(time.monotonic() - begun)

        # A hook cannot be removed while hooks are called, so it goes with the next save.
        self._unfence()
        self._hooks = [register(fence) for register in state.fences]

    def _unfence(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def due(self, step: int) -> bool:
        """Whether a save is due at `step`; call it once per step, on every rank. All ranks get the same answer."""
        self._at = step
        return self._pace.due(step, time.monotonic())

    @property
    def interval(self) -> int:
        """Steps between saves, as it is chosen now."""
        return self._pace.interval

    def _paced(self, cadence: Cadence) -> Pace:
        def share(steps: int) -> int:
            return int(str(exchanged(self.size, (str(steps), None))[0][0]))

        begun = run_begun_at()

        def failures() -> float:
            days = (time.time() - begun) / 86400
            return failure_rate(cadence.failures_per_day, here().rank.generation, days)

        return Pace(cadence, share, failures)

    def pin(self, step: int) -> None:
        """Keep a step until it is unpinned, whatever the policies say.

        Raises:
            StepNotFound: it is neither committed nor being saved.
        """
        number = checked_step(step)
        self._committer.pin(number, keep=True, is_coming=any(each.step == number for each in self._handles))

    def unpin(self, step: int) -> None:
        """Leave a step to the policies again."""
        self._committer.pin(checked_step(step), keep=False)

    def untag(self, tag: str) -> None:
        """Remove a tag from the steps that have it; the policies decide about them again.

        Raises:
            StepNotFound: no committed step has it.
        """
        self._committer.untag(tag)

    def flush(self, timeout_s: float = 600.0) -> None:
        """Wait until every save begun is durable, or a later one is instead of it; raises the first failure.

        Raises:
            DeadlinePassed: not within `timeout_s`; the saves go on.
        """
        deadline = time.monotonic() + timeout_s
        for handle in list(self._handles):
            try:
                handle.durable.result(max(0.0, deadline - time.monotonic()))
            except Overtaken:
                continue
            except TimeoutError:
                raise DeadlinePassed(f"step {handle.step} durable", timeout_s) from None

    def let_go(self) -> None:
        """A rank was replaced: what was begun before may never be whole, so nobody waits for it any more."""
        self._handles = []
        self._writer.let_go()

    def close(self, timeout_s: float = 600.0) -> None:
        """Wait for all saves, and let go of the directory. Failures were said when they happened."""
        if self._closed:
            return
        self._closed = True
        self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        wait((handle.durable for handle in self._handles), max(0.0, deadline - time.monotonic()))
        self._unfence()
        self._writer.close()
        disclaim(self._place)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _work(self) -> None:
        """The saver's thread: one save after the other goes to the writer."""
        while (job := self._jobs.get()) is not None:
            self._writer.submit(job.draft, job, partial(self._end, job))

    def _end(self, job: "_Job", error: BaseException | None) -> None:
        if error is None:
            job.handle.durable.set_result(job.draft.step)
            return
        if not isinstance(error, Overtaken):
            self._say(f"step {job.draft.step} was not saved: {error}")
        job.handle.durable.set_exception(error)


def _tell(copied: "Future[None]", error: BaseException | None) -> None:
    if error is None:
        copied.set_result(None)
    else:
        copied.set_exception(error)


class _Job:
    """A save under way, as its writer sees it."""

    def __init__(self, draft: Draft, snapshot: Snapshot, handle: Handle, habits: Habits) -> None:
        self.draft, self.handle, self.arena, self.until = draft, handle, snapshot.arena, snapshot.until
        self._snapshot, self._habits = snapshot, habits
        self._entries: list[Entry] | None = None

    def entries(self) -> list[Entry]:
        """Wait for the copy; the boxes of this rank with their sums."""
        if self._entries is None:
            file = f"{self.draft.name}/{segment_name(self.draft.rank)}"
            sums = self._snapshot.sums()
            with without_collection():
                self._entries = [entry(*each, file) for each in zip(self._snapshot.shares, sums, strict=True)]
                self._habits.learn(self._entries)
        return self._entries


def said(state: State, roles: Collection[Role] | None = None) -> dict[str, Any]:
    """What a rank says of its state besides tensors: each unit's first rank of that unit, rank 0 all shared values.

    Without their moments, parameters are not said to have an optimizer.
    """
    first = [unit for unit in state.units.values() if state.rank == min(_ranks(unit), default=0)]
    if roles is not None:
        first = [unit for unit in first if any(member.role in roles for member in unit.members.values())]
    is_bare = roles is not None and "moment" not in roles
    units = {unit.name: UnitInfo({} if is_bare else unit.options, unit.aliases) for unit in first}
    own = f"rank{state.rank}/"
    values = {name: value for name, value in state.values.items() if not state.rank or name.startswith(own)}
    return {"values": values, "units": units}


def _ranks(unit: Unit) -> set[int]:
    return {rank for member in unit.members.values() for rank in member.layout.ranks}
