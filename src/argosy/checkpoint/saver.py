"""Save the state of a training without holding it up: snapshot, then commit in the background.

saver = Saver("runs/x")
saver.save({"model": model, "optimizer": optimizer}, step)
"""

import os
import queue
import sys
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterable, Mapping
from concurrent.futures import wait
from functools import partial
from pathlib import Path
from threading import RLock, Thread
from types import FrameType
from typing import Any, NamedTuple

import msgspec

from argosy.checkpoint.arena import Arena
from argosy.checkpoint.arguments import (
    checked_cadence,
    checked_keep,
    checked_keeping,
    checked_metrics,
    checked_step,
    checked_tags,
)
from argosy.checkpoint.commit_step import Committer
from argosy.checkpoint.format import Draft, UnitInfo, step_name
from argosy.checkpoint.jobs import Handle, Job, at_exit, drop, under_way, warn, work
from argosy.checkpoint.keeper.client import Keeping, KeptWriter, default_keeping
from argosy.checkpoint.keeper.messages import Overtaken
from argosy.checkpoint.own_writer import OwnWriter, Writer
from argosy.checkpoint.owner import Claim, claim, disclaim, take
from argosy.checkpoint.rank_exchange import exchanged, place, run_begun_at, session
from argosy.checkpoint.retention import Cadence, Keep, KeepBest, KeepLast
from argosy.checkpoint.save_interval import Pace, failure_rate
from argosy.checkpoint.snapshot import SAMPLE, Snapshot
from argosy.checkpoint.state_input import as_state, declared, without_collection
from argosy.checkpoint.step_search import newest_of
from argosy.checkpoint.stores import is_url, located, open_store
from argosy.checkpoint.write_plan import Arrangement, Habits, form_of
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import here
from argosy.observe import span
from argosy.transfer import Role, State, Unit, checked_roles

FLAG = "set a flag, and save when the loop comes by"
OPTIMIZER = os.path.join("torch", "optim", "optimizer.py")


class _Wanted(NamedTuple):
    """The checked arguments of one save."""

    tags: list[str]
    metrics: dict[str, float]
    roles: Collection[Role] | None


class Mark(NamedTuple):
    """How far the savers of a run are."""

    session: str
    saves: int
    newest: tuple[int, int] = (0, -1)
    """Era and step of the newest that is there, or is being saved."""
    is_kept: bool = True
    """Whether they have a keeper still."""


class Saver:
    """Writes the checkpoints of one run. Every rank makes one, and saves the same steps in the same order.

    All make it together, except with `like`: so a rank that was replaced joins those that live. On several ranks every
    trained parameter is a DTensor, or in DDP or `replicate`, or named here, as a module, a parameter or a pattern of
    names: `own` are those that each rank trains for itself, `replicated` those that the script keeps alike.

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
        own: Iterable[Any] = (),
        replicated: Iterable[Any] = (),
        sample: int = SAMPLE,
        like: "Mark | None" = None,
        say: Callable[[str], None] = warn,
    ) -> None:
        policies, cadence, path = checked_keep(keep), checked_cadence(cadence), located(path)
        self._declared = declared("Saver", own=own, replicated=replicated)
        self._metrics = {each.metric for each in policies if isinstance(each, KeepBest)}
        self.rank, self.size = place()
        self._sample, self._count, self._say = sample, 0 if like is None else like.saves, say
        self._alone, self._path = like is not None, path
        place_ = path if is_url(path) else os.path.realpath(open_store(path, new=True).name)
        self._claim = claim(place_, "{0.filename}:{0.lineno}".format(traceback.extract_stack(limit=2)[0]))
        try:
            self._session = session(self.size) if like is None else like.session
            wanted = (checked_keeping(keeping) or default_keeping()) if like is None or like.is_kept else None
            self._writer = self._open(path, policies, wanted)
            self._newest = self._agreed_newest(path) if like is None else like.newest
        except BaseException:
            disclaim(self._claim)
            raise
        self._pace = self._paced(cadence)
        self._lock, self._is_saving = RLock(), False
        self._at: int | None = None
        self._habits = Habits()
        self._arranged: Arrangement | None = None
        self._handles: list[Handle] = []
        self._jobs: queue.SimpleQueue[Job | Claim | None] = queue.SimpleQueue()
        self._thread = Thread(target=work, args=(self._jobs, self._writer), name="argosy-checkpoint", daemon=True)
        self._thread.start()
        self._dropped = weakref.finalize(self, drop, self._jobs, self._claim, self._thread)
        self._dropped.atexit = False
        at_exit[self._thread] = partial(drop, self._jobs, self._claim, self._thread)
        self._closed = False
        self._hooks: list[Any] = []

    def _agreed_newest(self, path: str) -> tuple[int, int]:
        """Era and step of the newest that is there, as rank 0 sees it."""
        text = ",".join(map(str, newest_of(path))) if self.rank == 0 else ""
        era, step = str(exchanged(self.size, (text, None))[0][0]).split(",")
        return int(era), int(step)

    def _open(self, path: str, keep: tuple[Keep, ...], keeping: Keeping | None) -> Writer:
        """Make the writer; all ranks have one of the same kind, or all raise."""
        store = open_store(path, new=True)
        self._committer = Committer(store, self.rank, self.size, keep, self._say)
        if keeping is not None:
            writer, faults = self._agree(self._kept(keeping, path), PeerLost)
            if writer is not None and not faults:
                return writer
            if writer is not None:
                writer.close()
            self._say(f"no keeper: snapshots stay in the memory of the ranks: {faults[0]}")

        def own() -> Writer:
            try:
                self._committer.owner = take(store, self._session) if self.rank == 0 else None
            except OSError as error:
                raise ConfigError(f"{path} cannot be written to: {error.strerror}") from error
            return OwnWriter(self._committer)

        writer, _ = self._agree(own, ())
        assert writer is not None
        return writer

    def _kept(self, keeping: Keeping, path: str) -> Callable[[], Writer]:
        """A rank that joins running ranks uses their keeper and starts none."""
        return lambda: KeptWriter(self._committer, keeping, path, may_start=not self._alone)

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
        is_kept = not isinstance(self._writer, KeptWriter) or self._writer.is_kept
        return Mark(self._session, self._count, self._newest, is_kept)

    @span("checkpoint")
    def save(
        self,
        state: Any,
        step: int | None = None,
        *,
        tag: str | None = None,
        metrics: Mapping[str, float] | None = None,
        roles: Collection[Role] | None = None,
        era: int | None = None,
    ) -> Handle:
        """Begin to save, and return at once; the next optimizer step waits until the copy is complete.

        `state` is what `restore` takes as `into`. Without `step` it is the one that `due` or `save` was last told. A
        tagged step is kept until its tag is removed (`untag`). While two saves are under way the third waits for the
        first; with a keeper none waits for the disk. All steps of a later `era` are newer than those of an earlier
        one: a step below the newest begins one by itself, as a training does that has gone back to an older step.
        Metrics that are not finite are dropped. If there is no memory for the copy, a line reports it and the handle
        has the error.

        Raises:
            ConfigError: something of it cannot be kept, or is no step, metric, tag or role; or it is called inside
                an optimizer's step, its hooks or its closure, or inside another save, as a signal handler may be.
        """
        if self._closed:
            raise ConfigError("this saver is closed")
        if self._claim.pid != os.getpid():
            raise ConfigError(
                f"this saver is process {self._claim.pid}'s, and this is a fork of it", hint="save in that process"
            )
        if step is None and self._at is None:
            raise ConfigError(
                "which step is saved is not known", hint="pass step=, or tell it by saver.due(step) or an earlier save"
            )
        number = checked_step(self._at if step is None else step)
        checked_roles(roles)
        wanted = _Wanted(checked_tags(tag), checked_metrics(metrics), roles)
        if _is_in_step():
            raise ConfigError("save was called inside an optimizer's step, when it may be half done", hint=FLAG)
        with self._lock:
            if self._is_saving:
                raise ConfigError("save was called while this thread is in save", hint=FLAG)
            self._is_saving = True
            try:
                self._miss_metrics(number, wanted.metrics)
                era = self._era_of(number) if era is None else era
                return self._save(state, number, wanted, era)
            finally:
                self._is_saving = False

    def _save(self, state: Any, number: int, wanted: "_Wanted", era: int) -> Handle:
        begun = time.monotonic()
        # Whatever becomes of it: ranks call their saves by the same numbers.
        self._count += 1
        self._at, self._newest = number, max(self._newest, (era, number))
        name = step_name(number, f"{self._session}{self._count:04x}", era)
        handle = Handle(number)
        try:
            described, snapshot = self._begin(state, name, wanted, handle)
        except OSError as error:
            self._say(f"step {number} was not saved: {error}")
            handle.copied.set_exception(error)
            handle.durable.set_exception(error)
            return handle
        self._fence(described, snapshot)
        self._pace.saved(number)
        self._pace.lost(time.monotonic() - begun)
        return handle

    def _miss_metrics(self, number: int, metrics: Mapping[str, float]) -> None:
        """Say once that a metric is not there by which the best are kept: it may be misspelt."""
        for name in self._metrics - set(metrics) if metrics else ():
            self._metrics.discard(name)
            if self.rank == 0:
                known = ", ".join(sorted(metrics))
                self._say(f"step {number} has no metric {name!r}, which decides the best checkpoints; it has {known}")

    def _era_of(self, number: int) -> int:
        era, newest = self._newest
        if number >= newest:
            return era
        if self.rank == 0:
            self._say(f"step {number} is saved after step {newest}: it and the steps after it count as newer")
        return era + 1

    def _begin(self, state: Any, name: str, wanted: "_Wanted", handle: Handle) -> tuple[State, Snapshot]:
        """Begin to copy, and have it committed behind; on error nothing is lent any more."""
        arena: Arena | None = None
        try:
            with without_collection():
                described = as_state(state, saving=True, declared=self._declared)
                if (described.rank, described.size) != (self.rank, self.size):
                    here = f"the saver of {self.rank} of {self.size}"
                    raise ConfigError(
                        f"the state is of rank {described.rank} of {described.size}, {here}",
                        hint="make the Saver after init_process_group",
                    )
                form = form_of(described, wanted.roles, self._habits.quiet)
                if self._arranged is None or self._arranged.form != form:
                    self._arranged = Arrangement(described, form)
                draft = msgspec.structs.replace(
                    draft_of(described, self._arranged, handle.step, name, wanted.roles),
                    tags=wanted.tags,
                    metrics=wanted.metrics,
                )
            arena = self._writer.lend(draft.bytes)
            job = Job(draft, handle, self._habits, self._say)
            with without_collection():
                job.snapshot = Snapshot(self._arranged, described, arena, sample=self._sample, done=job.copied)
        except BaseException as error:
            self._writer.abandon(name, arena, str(error))
            raise
        self._jobs.put(job)  # Before it is known of: a signal handler may wait for all that is.
        self._handles = [each for each in self._handles if not each.durable.done()] + [handle]
        # A save of several ranks may wait for a lost rank; a keeper has the snapshot before it is durable.
        if self.size == 1 and isinstance(self._writer, OwnWriter):
            under_way[self._path] = self._handles
        return described, job.snapshot

    def _fence(self, state: State, snapshot: Snapshot) -> None:
        """Wait for the copy before the state changes; at once if nobody can tell when that is."""
        if not state.fences:
            snapshot.wait()
            return

        pace = self._pace  # Not the saver: an optimizer must not keep it alive.

        def fence() -> None:
            begun = time.monotonic()
            snapshot.wait()
            pace.lost(time.monotonic() - begun)

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
        size, begun = self.size, run_begun_at()

        def failures() -> float:
            return failure_rate(cadence.failures_per_day, here().rank.generation, (time.time() - begun) / 86400)

        return Pace(cadence, lambda steps: int(exchanged(size, (str(steps), None))[0][0]), failures)

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

    @span("checkpoint")
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
        self._dropped.detach()
        at_exit.pop(self._thread, None)
        self._jobs.put(None)
        deadline = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        wait((handle.durable for handle in self._handles), max(0.0, deadline - time.monotonic()))
        self._unfence()
        self._writer.close()
        under_way.pop(self._path, None)
        if self._thread.is_alive():  # What it hands over late must not come after what the next saver saves.
            self._claim.leaving = self._thread
        else:
            disclaim(self._claim)

    def __enter__(self) -> "Saver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _is_in_step() -> bool:
    """Whether this thread is inside `Optimizer.step`, which torch wraps: in a hook, a closure, or a signal handler."""
    frame: FrameType | None = sys._getframe()  # pyright: ignore[reportPrivateUsage]
    while frame is not None:
        if frame.f_code.co_name == "wrapper" and frame.f_code.co_filename.endswith(OPTIMIZER):
            return True
        frame = frame.f_back
    return False


def draft_of(state: State, arranged: Arrangement, step: int, name: str, roles: Collection[Role] | None = None) -> Draft:
    """What a rank's part of a step will hold; its entries are not known yet."""
    return Draft(
        step=step,
        name=name,
        rank=state.rank,
        size=state.size,
        entries=[],
        border=arranged.border,
        bytes=arranged.size,
        room=len(arranged.header),
        shared=arranged.shared,
        **said(state, roles),
    )


def said(state: State, roles: Collection[Role] | None = None) -> dict[str, Any]:
    """What a rank says of its state besides tensors: each unit's first rank of that unit, rank 0 all shared values.

    Without their moments, parameters are not said to have an optimizer.
    """
    first = [unit for unit in state.units.values() if state.size == 1 or state.rank == _first_rank(unit)]
    if roles is not None:
        first = [unit for unit in first if any(member.role in roles for member in unit.members.values())]
    is_bare = roles is not None and "moment" not in roles
    units = {unit.name: UnitInfo({} if is_bare else unit.options, unit.aliases) for unit in first}
    own = f"rank{state.rank}/"
    values = {name: value for name, value in state.values.items() if not state.rank or name.startswith(own)}
    return {"values": values, "units": units, "modules": {} if state.rank else state.modules}


def _first_rank(unit: Unit) -> int:
    return min((member.layout.ranks[0] for member in unit.members.values() if member.layout.ranks), default=0)
