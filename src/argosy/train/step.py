"""A step as a transaction: one attempt at one optimizer update, decided by a vote of all ranks.

This is the shell around `step_machine.py`, which decides.
"""

import math
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch

from argosy.collective import CollectiveMismatch
from argosy.core import ArgosyError, ConfigError, PeerLost
from argosy.data import Loader, Queue, seed_generators
from argosy.train._torch import current_graph_task_id
from argosy.train.arguments import check_count, check_name
from argosy.train.device_loss import lose_device
from argosy.train.gradients import Gradients
from argosy.train.recheck import distrust
from argosy.train.spikes import NOTHING
from argosy.train.step_machine import (
    Asked,
    Attempt,
    Compared,
    Effect,
    Event,
    Leaving,
    Left,
    Outcome,
    Updating,
    Voted,
    react,
)
from argosy.train.tracking import Light
from argosy.transfer import DeviceFailed, State, copy_of, synchronize, take_over

if TYPE_CHECKING:
    from argosy.train.run import Run

SUSPECT_S = 0.5
"""How long an exception waits to hear whether a lost rank explains it."""

LEAVE_S = 2.0
"""How long a rank that was told to leave still waits for the items of its step."""

AGREE = "all ranks must take the same steps; look for `if rank == 0`"


class Diverged(ArgosyError):
    """The ranks of a run do different things."""


class Abandoned(Exception):
    """Leaves the block of an attempt that does not count."""


class Step:
    """One attempt at step `number`; made by `Run.steps`."""

    def __init__(self, run: "Run", number: int, *, rehearsal: bool = False) -> None:
        self._run, self.number, self.rehearsal = run, number, rehearsal
        self.scale = 1.0
        """For the loss of the microbatch in hand: sums and averages over ranks become the mean of the whole batch."""
        self._attempt = Attempt(undo=run.undo or rehearsal, rehearsal=rehearsal)
        self.entered = self._decided = False
        self.loaders: list[Loader | Queue] = []
        self.rows: dict[str, Any] = {}
        self._finite = True
        self._gradients = Gradients(run.tracked.optimizers.values(), run.tracked.others.values())
        self.loss = NOTHING
        """The largest that `check` was given, on any rank once the step is decided."""
        self.spiked = False
        self.fault = ""
        """Why it was skipped."""
        self._latch: Any = None
        self._light = Light({}, State())
        self._versions: list[int] = []
        self._undo: State | None = None

    @property
    def committed(self) -> bool:
        """Whether the step counts."""
        return self._attempt.committed

    @property
    def outcome(self) -> Outcome:
        return self._attempt.outcome

    @property
    def updates(self) -> int:
        """How many optimizers have stepped."""
        return self._attempt.updates

    def every(self, steps: int) -> bool:
        """After the block: whether this was one of every so many steps; False after an attempt that did not count."""
        check_count("the steps of step.every", steps)
        return self.committed and (self.number + 1) % steps == 0

    # -- data --------------------------------------------------------------------------------------

    def batches(self, data: Loader | Queue) -> Iterator[Any]:
        """This rank's microbatches of the step; gradients are exchanged with the last one only."""
        self._use(data)
        pieces = data.pieces
        number = -1
        for number, batch in enumerate(self._handed(data)):
            handed = data.handed
            assert handed is not None
            seed_generators(self._run.seed, self.number, handed.position - data.cursor)
            self.scale = handed.count * data.size / data.samples
            self._run.parallel.exchange_gradients(number == pieces - 1)
            yield batch
        if number < 0 and self.rehearsal:
            raise Abandoned("nobody has put an item yet: there is nothing to rehearse with")

    def _handed(self, data: Loader | Queue) -> Iterator[Any]:
        if isinstance(data, Loader):
            return data.batches()
        return data.rehearse() if self.rehearsal else data.batches(self._patience())

    def batch(self, data: Loader | Queue) -> Any:
        """This rank's one microbatch of the step."""
        self._use(data)
        if data.pieces != 1:
            raise ConfigError(
                f"this rank has {data.pieces} microbatches in step {self.number}", hint="use step.batches(data)"
            )
        return next(iter(self.batches(data)))

    def _use(self, data: Loader | Queue) -> None:
        if not isinstance(data, Loader | Queue):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise ConfigError(f"a step takes data from an argosy.data.Loader or Queue: {type(data).__name__}")
        self._run.use(data)
        if data not in self.loaders:
            self.loaders.append(data)

    def _patience(self) -> Callable[[], None]:
        """What ends a wait for items: a lost rank, and, some seconds later, the wish to leave."""
        run, leave_at = self._run, float("inf")

        def check() -> None:
            nonlocal leave_at
            if run.crew.is_lost():
                raise Abandoned("a rank was lost while others waited for items")
            if run.wish.is_urgent:
                leave_at = min(leave_at, time.monotonic() + LEAVE_S)
            if time.monotonic() >= leave_at:
                if run.crew.kind == "replaceable":  # No rank can finish the step: a survivor saves the one before.
                    self._latch.trip(PeerLost(f"rank {run.rank}", "stopped while it waited for items"))
                    raise Abandoned("told to stop while it waited for items")
                run.wish.check()

        return check

    def once(self, name: str, make: Any) -> Any:
        """The value of `make()`, made once: the same on every attempt at this step."""
        check_name("step.once", name)
        if not callable(make):
            raise ConfigError(f"step.once takes a function that makes the value: {make!r:.80}")
        return self._run.once.get(self.number, name, make, rehearsal=self.rehearsal)

    def check(self, loss: Any) -> None:
        """Leave this step out, on all ranks, if `loss` is not finite, or a spike by the policy of the run.

        Raises:
            ConfigError: the step is decided already, or `loss` is no number.
        """
        if self.outcome is not Outcome.OPEN:
            raise ConfigError(
                f"step.check comes too late: step {self.number} is decided", hint="call it before optimizer.step()"
            )
        try:
            value = float(torch.as_tensor(loss).detach().max())
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(f"step.check takes a loss, a number or a tensor: {loss!r:.80}") from error
        self._finite = self._finite and math.isfinite(value)
        self.loss = max(self.loss, value) if self._finite else self.loss

    # -- the transaction ---------------------------------------------------------------------------

    def __enter__(self) -> "Step":
        run = self._run
        if run.current is not None:
            raise ConfigError(f"step {run.current.number} is still open", hint="do not nest `with step:` blocks")
        if self.entered:
            raise ConfigError(f"step {self.number} was entered before", hint="take a new one from run.steps()")
        self.entered = True
        run.current = self
        self._light, self._versions = run.tracked.changing(), run.tracked.versions()
        if self._attempt.undo:
            run.saves.wait_for_copy()
            self._undo = copy_of(run.tracked.state())
        run.tracked.drop_gradients()
        if not self.rehearsal and run.recheck.wants(self.number):
            run.recheck.watch(p for module in run.tracked.modules.values() for p in module.parameters())
        run.parallel.begin_step()
        seed_generators(run.seed, self.number, "rank", run.rank)
        self._latch = run.crew.latched()
        if self._latch is not None:
            self._latch.__enter__()
        return self

    def before_update(self, optimizer: Any) -> None:
        """An optimizer is about to change parameters: the vote, unless it comes at the end of the block.

        Raises:
            Abandoned: it must not.
        """
        self._run.used = True
        if self._decided:
            self._decided = False  # A second one of the same step is a later update.
            return
        if current_graph_task_id() >= 0:
            raise ConfigError(
                f"an optimizer steps inside backward, in step {self.number}: all ranks must agree before an update",
                hint="call optimizer.step() once, after backward()",
            )
        if self.updates == 0 and not self.rehearsal and self._run.recheck.wants(self.number):
            self._compare()
        if self.updates == 0 and self._attempt.undo and not self.rehearsal:
            self._run.healing.before_update()
        finite, renewed = self._gradients.check(optimizer)
        self._react(Updating(self._issued, finite, renewed, self.updates == 0 and self._has_changed))

    def decide(self) -> None:
        """Vote now, after the last backward, where a framework clips and updates in its own code later.

        What follows in the block must be local to this rank.

        Raises:
            Abandoned: the block must be left.
        """
        self.before_update(next(iter(self._run.tracked.optimizers.values())))
        self._decided = not self.rehearsal

    def _react(self, event: Event) -> list[Effect]:
        """Take note of an event, and do what has to be done inside the block; returns the rest.

        Raises:
            Abandoned: the block must be left.
        """
        self._attempt, effects = react(self._attempt, event)
        if effects == [Effect.VOTE]:
            return self._react(Voted(self._vote()))
        if effects == [Effect.HOLD] and self._latch is not None:
            self._latch.hold()
        if effects == [Effect.ABANDON]:
            raise Abandoned(self.outcome.value)
        return effects

    def _compare(self) -> None:
        """The gradients are there: keep them for comparison, or compare.

        Raises:
            Abandoned: this was the first time.
        """
        run = self._run
        differs = run.recheck.differs(self.number)
        if differs is None and not self._lost:
            self._react(Compared())
        if differs and not self._lost:
            distrust(run, self.number)

    @property
    def _issued(self) -> int:
        return 0 if self._latch is None else self._latch.issued

    @property
    def _has_changed(self) -> bool:
        return self._versions != self._run.tracked.versions()

    @property
    def _lost(self) -> bool:
        return self._latch is not None and self._latch.loss is not None

    def _vote(self) -> bool | None:
        """Ask all ranks whether the step is applied; None if a rank is lost."""
        run = self._run
        self._check_device()
        run.healing.before_vote(self.number + 1, self._light.buffers, final=self._undo is not None)
        applies, late = int(self.updates > 0), self._attempt.late or 0 <= self._attempt.issued < self._issued
        finite = int(self._finite and self._attempt.finite)
        mine = [self.number, -self.number, applies, -applies, finite, *run.wishes(self.loss, late)]
        try:
            answer = run.crew.ask(mine, self._latch)
        except CollectiveMismatch as error:
            raise self._diverged(str(error)) from error
        if answer is None:
            return None
        if answer[0] != -answer[1] or answer[2] != -answer[3]:
            said = run.crew.gather((self.number, applies))
            whole = "; ".join(
                f"rank {rank} {'updates' if updates else 'does not update'} in step {number}"
                for rank, (number, updates) in enumerate(said)
            )
            run.give_up()
            raise Diverged(f"ranks disagree: {whole}", hint=AGREE)
        self.loss = run.agreed(answer[5:])
        self.spiked = bool(answer[4]) and run.spike is not None and run.ledger.watch.is_spike(run.spike, self.loss)
        if self.spiked:
            self.fault = f"the loss is {self.loss:.4g}, its running mean was {run.ledger.watch.mean:.4g}"
        elif not answer[4]:
            self.fault = "a gradient or loss is not finite"
        return not self.fault

    def _check_device(self) -> None:
        """Wait for the model's device; whatever it reports, it reports from then on."""
        try:
            synchronize(self._run.tracked.device)
        except DeviceFailed as error:
            lose_device(self._run, error)

    def _diverged(self, what: str) -> Diverged:
        self._run.give_up()
        self._run.leaving.check(at_once=True)
        return Diverged(f"ranks disagree in step {self.number}: {what}", hint=AGREE)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        run = self._run
        effects: list[Effect] = []
        try:
            if isinstance(error, RuntimeError | DeviceFailed) and not self.rehearsal:
                self._check_device()
            torn = self._latch is not None and self._latch.is_torn()
            changed = self.outcome is not Outcome.APPLIED and self._has_changed
            effects = self._react(Leaving(_how(error), self._issued, self._lost, torn, changed))
        finally:
            if self._latch is not None:
                self._latch.__exit__(None, None, None)
            run.current = None
            run.recheck.let_go()
        if effects == [Effect.ASK]:
            effects = self._react(Asked(run.crew.is_lost(SUSPECT_S)))
        if self.outcome is Outcome.APPLIED and self._latch is not None and self._latch.mismatch is not None:
            raise self._diverged(str(self._latch.mismatch)) from error
        for effect in effects:
            whole = Effect.ROLL_BACK in effects and (self._attempt.undo or not self._attempt.changed)
            self._perform(effect, error, whole=whole)
        return isinstance(error, Exception) and Effect.FAIL not in effects

    def _perform(self, effect: Effect, error: BaseException | None, *, whole: bool) -> None:
        run = self._run
        match effect:
            case Effect.ROLL_BACK:
                self._roll_back()
            case Effect.COMMIT:
                run.commit(self, late=self._attempt.late)
            case Effect.REPORT_LOSS:
                torn = self.outcome is Outcome.TORN
                run.lost(self.number, None if self._latch is None else self._latch.loss, torn=torn)
            case Effect.FAIL if self.rehearsal:
                assert error is not None
                error.add_note("raised while a replaced rank rehearsed the step, before it met the others")
                run.failed_rehearsal(error)
            case _:
                run.failed(self.number, error, whole=whole)

    def _roll_back(self) -> None:
        """Everything as it was when the block began."""
        tracked = self._run.tracked
        tracked.settle()
        if self._undo is None:
            tracked.take_over_changing(self._light)
        else:
            take_over(tracked.state(), self._undo)
        tracked.drop_gradients()


def _how(error: BaseException | None) -> Left:
    """How the block ended."""
    if error is None:
        return Left.DONE
    if isinstance(error, Abandoned):
        return Left.ABANDONED
    return Left.EXCEPTION if isinstance(error, Exception) and not isinstance(error, Diverged) else Left.MISTAKE
