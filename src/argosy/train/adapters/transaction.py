"""The transaction of a step, for a loop that belongs to a framework and cannot be handed to `for step in run.steps()`.

A framework's step is several calls: its forward and backward passes, then its update. The adapter does each part of
it inside `attempt`. With the last part all ranks vote. If a rank was lost, this rank waits for its replacement and does
the parts again, in the same place: the framework's loop never sees the loss.

X1  Between ranks nothing is exchanged after the vote, until `commit`.
X2  Outside a step a loss raises nothing: operations are answered locally, and the next step finds the loss.
X3  A process whose framework is at another step than its state ends, and another takes its place.
X4  Where X1 does not hold, no step is repeated: each rank keeps all of its state in memory that outlives it, after each
    step. If one is lost, all end, and others take their places and resume from the newest step that all kept.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from typing import Any, TypeVar, cast

from torch.distributed.fsdp import FSDPModule

from argosy.checkpoint import StepNotFound, list_steps
from argosy.core import ConfigError
from argosy.train.adapters.memory_restart import restart_together
from argosy.train.run import Run
from argosy.train.step import Step

T = TypeVar("T")
_ENDED, _LEFT = "loop ended at step {}", "all have left the loop"


class Transaction:
    """One framework's loop over the steps of a run."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.entry = 0
        """The step at which this rank enters."""
        self._from_memory = False
        self._steps: Any = None
        self._step: Step | None = None
        self._outside = ExitStack()
        """Keeps losses from raising between two steps."""
        self._sharded: list[Any] = []
        """Modules of FSDP2."""
        self.voted = False
        """Whether all ranks have agreed to make the update of the open step."""

    def entry_step(self) -> int:
        """Where the framework must begin: at the step of the other ranks, or of the newest checkpoint.

        Call it before models are made: a rank that replaces another waits here until the others have noticed.
        """
        held = self.run.arena.held() if self.run.arena is not None else []
        self.entry = -1 if self.run.crew.counted(_LEFT) else self.run.crew.entry_step(held)
        self._from_memory = self.entry >= 0 and bool(held)
        if self.entry < 0:
            self.entry = 0
            with suppress(StepNotFound, OSError):
                self.entry = next((each.step for each in list_steps(self.run.directory) if not each.fault), 0)
        return self.entry

    @property
    def has_ended(self) -> bool:
        """Whether the loops of the others ended at the step at which this rank enters."""
        return self.entry > 0 and self.run.crew.counted(_ENDED.format(self.entry)) > 0

    def begin(self, until: int | None, at: int, *, sharded: bool = False, **things: Any) -> None:
        """Take care of the framework's model, optimizer and others; the next step is `at`, the end is `until`.

        Raises:
            ConfigError: the model is sharded, and the framework cannot enter at a step with such a one.
        """
        run = self.run
        run.track(**things)
        parts = [part for each in run.tracked.modules.values() for part in each.modules()]
        self._sharded = [part for part in parts if isinstance(part, FSDPModule)]
        if self._sharded and not sharded:
            run.give_up()
            hint = "use DDP, or `argosy run --max-restarts` with the framework's own resume"
            raise ConfigError("this adapter does not know FSDP: only DDP survives kills here", hint=hint)
        if self._sharded:
            self.restart_together("FSDP exchanges data when a framework clips gradients")
        elif self._from_memory:
            self.restart_together("as before")
        run.undo = False  # X1
        run.healing.origin = 0 if self.entry else at
        self._steps = run.steps(self.entry if self.has_ended else until)

    def restart_together(self, why: str) -> None:
        """From now on a lost rank restarts all ranks (X4)."""
        restart_together(
            self.run, f"all ranks have restarted at step {self.entry:,}, from memory" if self._from_memory else why
        )

    def restart_if_lost(self, wait_s: float = 0.0) -> None:
        """End this process if a rank is lost and all must restart (X4)."""
        if self.run.healing.restarts_together and self.run.crew.is_lost(wait_s):
            self.run.begin_anew()

    @property
    def is_open(self) -> bool:
        """Whether a step is under way."""
        return self._step is not None

    def attempt(self, at: int, work: Callable[[bool], T], *, last: bool) -> T:
        """Do a part of step `at`, and vote after the `last` one; `work(True)` does all of its parts again."""
        again, done = False, cast(T, None)
        if self._step is None:
            self.open(at)
        while True:
            answer: bool | None = None
            try:
                done = work(again)
            except Exception as error:
                self._excuse(error)
            else:
                answer = True if not last or self.voted else self.vote()
            if answer is not None:
                return done
            if self.run.healing.restarts_together:
                self.run.begin_anew()
            again = True
            self.open(at)

    def vote(self) -> bool | None:
        """Ask all ranks: True to make the update, False if all skip it, None to open the step and do it again."""
        step = self._step
        assert step is not None
        try:
            if step.rehearsal:
                self._step = None
                step.__exit__(None, None, None)
                return None
            step.decide()
            self.voted = True
        except Exception as error:
            self._excuse(error)
            if step.committed:
                self._enter_outside()
                return False
            return None
        return True

    def _excuse(self, error: Exception) -> None:
        """Leave the step with an error, which is raised unless a lost rank explains it."""
        step, self._step = self._step, None
        if step is None or not step.__exit__(type(error), error, error.__traceback__):
            raise error

    def commit(self) -> None:
        """The framework has made its update, and everything that belongs to it."""
        step, self._step, self.voted = self._step, None, False
        if step is not None:
            step.__exit__(None, None, None)
            if self.run.healing.restarts_together and not step.committed:
                self.run.begin_anew()
            self._enter_outside()

    def finish(self, *, alone: bool = False) -> None:
        """The loop has ended: leave once all ranks have the last step. `alone`: from then on exchange nothing."""
        self.commit()
        self.run.crew.count(_ENDED.format(self.run.step))
        self.run.end_here()
        self._outside.close()
        self._reshard()
        for step in self._steps:
            with step:  # A rehearsal.
                pass
        self.run.crew.count(_LEFT)
        if alone:
            self.run.crew.part()
            self._enter_outside()

    def open(self, at: int) -> None:
        """Begin step `at`, after waiting for the replacements of lost ranks.

        Raises:
            SystemExit: the run was stopped, or this process cannot continue (X3).
        """
        self._outside.close()
        self.restart_if_lost()
        if self.run.undo and self.run.crew.joined:
            self.restart_together("ranks exchange data after the vote on a step")
            self.run.undo = False
        self._reshard()
        step = next(self._steps, None)
        if step is None:
            raise SystemExit(0)  # `run.stop()` was called.
        if not step.rehearsal and step.number != at:
            self.run.tell(f"rank {self.run.rank} is at step {at:,}, its state at step {step.number:,}: it starts again")
            self.run.begin_anew()
        self._step, self.voted = step.__enter__(), False

    def _reshard(self) -> None:
        """An evaluation leaves whole parameters in the place of shards."""
        for part in self._sharded:
            part.reshard()

    def _enter_outside(self) -> None:
        self._outside.enter_context(self.run.crew.latched() or nullcontext())
