"""Steps that count and change nothing: gradients that nobody used are said, and too many in a row that are not finite
end the run.

F1  What only evaluates, or makes no gradients, is no mistake.
"""

from typing import TYPE_CHECKING, Any

import torch

from argosy.train.step import Diverged, Outcome, Step

if TYPE_CHECKING:
    from argosy.train.run import Run

LEFT_OUT_MAX = 100
"""In a row, for numbers that are not finite."""
UNUSED_MAX = 3
SAID = 3
"""So many in a row are said one by one, then every tenth."""


class Fruitless:
    """What a run has seen of such steps."""

    def __init__(self, run: "Run") -> None:
        self._run = run
        self._unused = 0

    def see(self, step: Step) -> None:
        """A step counts.

        Raises:
            Diverged: the numbers of too many in a row were not finite.
        """
        run, ledger = self._run, self._run.ledger
        if step.outcome is Outcome.REJECTED:
            ledger.left_out += not step.spiked
            if step.spiked or ledger.left_out <= SAID or ledger.left_out % 10 == 0:
                run.say(f"skipped step {step.number}: {step.fault}")
        elif step.updates or not self._has_gradients():
            ledger.left_out *= not step.updates
            return
        elif any(
            isinstance(other, torch.amp.GradScaler) and other.is_enabled() for other in run.tracked.others.values()
        ):
            ledger.left_out += 1  # A scaler lets no optimizer step if it finds such a number.
        else:
            self._say_unused(step)
        if ledger.left_out >= LEFT_OUT_MAX:
            run.give_up()
            raise Diverged(
                f"{LEFT_OUT_MAX} steps in a row changed nothing, up to step {step.number}: gradients are not finite",
                hint="check the data and the loss of these steps, lower the learning rate, or start a new run "
                f"from an older checkpoint: Run(..., parent='{run.directory}@STEP')",
            ) from None

    def _has_gradients(self) -> bool:
        groups: list[dict[str, Any]] = [g for each in self._run.tracked.optimizers.values() for g in each.param_groups]
        return any(parameter.grad is not None for group in groups for parameter in group["params"])

    def _say_unused(self, step: Step) -> None:
        self._unused += 1
        if self._unused == UNUSED_MAX:
            self._run.say(
                f"{UNUSED_MAX} steps, up to step {step.number}, made gradients that no optimizer used: call "
                "optimizer.step() inside `with step:`; to accumulate, take several microbatches in one step"
            )
