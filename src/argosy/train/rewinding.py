"""Go back to an older step, on all ranks, and leave out the data that led astray.

B1  What was saved after that step counts no more: the run begins an era, and all of an era is newer than those before.
B2  A rank that is lost meanwhile undoes nothing: whoever is unsure of its state takes it from the others or from disk.
"""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from argosy.checkpoint import CorruptShard, Restored, StepInfo, StepNotFound, Unreadable, list_steps
from argosy.collective import Superseded
from argosy.core import ConfigError, DeadlinePassed, PeerLost
from argosy.train.arguments import check_count
from argosy.train.heal_decision import Version
from argosy.train.spikes import LossSpike, Spike

if TYPE_CHECKING:
    from argosy.train.run import Run
    from argosy.train.step import Step

_NEVER = 1 << 62
AGAIN_MAX = 20
"""How often in a row a run goes back to the same step."""


class Back(NamedTuple):
    """Where to go back to, and how many batches to leave out there: None for those of all steps before `until`."""

    to: int
    skip: int | None
    reason: str
    until: int = 0


class Rewinding:
    """What this rank asked for, and what all agreed on."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._asked: Back | None = None
        self.agreed: Back | None = None

    def ask(self, back: Back) -> None:
        check_count("to", back.to, 0)
        check_count("skip", 0 if back.skip is None else back.skip, 0)
        self._asked = back

    def words(self) -> list[int]:
        """This rank's part of a vote; the smallest of each counts."""
        if self._asked is None:
            return [_NEVER, 0, 0]
        return [self._asked.to, 0 if self._asked.skip is None else -1 - self._asked.skip, -self._asked.until]

    def agree(self, words: Sequence[int]) -> None:
        to, skip, until = words
        if to != _NEVER:
            reason = self._asked.reason if self._asked else ""
            self.agreed = Back(to, -1 - skip if skip else None, reason, max(self._run.step + 1, -until))

    def watch(self, policy: Spike, step: "Step") -> None:
        """Remember the loss of a step; a spike is answered.

        Raises:
            LossSpike: there were too many.
        """
        run = self._run
        watch = run.ledger.watch = run.ledger.watch.after(policy, step.loss)
        if not step.spiked:
            return
        to = max(0, step.number - policy.back)
        again = sum(abs(each - to) <= policy.back for each in run.ledger.eras)
        if watch.spikes >= policy.most or (policy.then == "rewind" and again >= policy.most):
            run.give_up()
            often = f"spike {watch.spikes} in a row" if watch.spikes >= policy.most else f"rolled back {again} times"
            raise LossSpike(
                f"step {step.number}: {step.fault}; {often}",
                hint="lower the learning rate, check the data of these steps, or change Run(spike=...)",
            ) from None
        if policy.then == "rewind":
            self.agreed = Back(to, None, step.fault, step.number + 1)

    def carry_out(self) -> None:
        """Go back as agreed. A loss leaves this to the next vote."""
        run, back = self._run, self.agreed
        assert back is not None
        self.agreed = None
        try:
            self._go(back)
        except (PeerLost, DeadlinePassed, Superseded) as error:
            if run.crew.kind != "replaceable":
                raise
            run.crew.fail(error)
            self._asked = back
        else:
            self._asked = None

    def _go(self, back: Back) -> None:
        run, ledger = self._run, self._run.ledger
        run.saves.settle(run)
        steps = run.crew.gather(targets(list_steps(run.directory), ledger.eras, back.to) if run.rank == 0 else [])[0]
        was, eras = run.step, ledger.eras
        if steps and eras[-AGAIN_MAX:] == [steps[0]] * AGAIN_MAX:
            raise ConfigError(
                f"run.rewind rolled back to step {steps[0]:,} {AGAIN_MAX} times in a row",
                hint="count the attempts in run.state, or roll back further",
            )
        run.healing.fresh = True  # B2
        if run.arena is not None:
            run.arena.clear()
        found = self._restore(steps)
        if found is None:
            run.healing.fresh = False
            run.say(f"no checkpoint at or before step {back.to:,} to roll back to; continuing at step {was:,}")
            return
        ledger.eras = [*eras, found.step]
        skip = back.until - found.step if back.skip is None else back.skip
        for loader in ledger.loaders:
            loader.skip(skip)
        run.step = found.step
        run.once.forget()
        why = f" ({back.reason})" if back.reason else ""
        run.scribe.went_back(found.step, f"from step {was}{why}")
        run.say(f"rolled back from step {was:,} to step {found.step:,}{why}; {skip:,} batches are skipped")
        run.healing.version = Version(found.step, run.crew.tried)
        run.healing.put_full()
        run.healing.fresh = False
        run.saves.forget()
        run.saves.save(run, None)

    def _restore(self, steps: Iterable[int]) -> Restored | None:
        """The newest of them that is whole."""
        for step in steps:
            try:
                return self._run.healing.restore(self._run.directory, step)
            except (CorruptShard, StepNotFound, Unreadable) as error:
                self._run.say(str(error))
        return None


def targets(steps: Iterable[StepInfo], eras: Sequence[int], to: int) -> list[int]:
    """The saved steps that a run can go back to, newest first: those of its own past, at or before `to`.

    `eras` are the steps at which the run went on when it had gone back; what was saved beyond one before it is past.
    """
    own = {(each.era, each.step) for each in steps if not each.fault and each.step <= min([to, *eras[each.era :]])}
    return [step for _, step in sorted(own, reverse=True)]
