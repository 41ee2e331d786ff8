"""A loop whose body is a function: the user's own lines, each pass through them a step.

An attempt that does not count leaves the function at `optimizer.step()`. So what stands behind it, such as a print or
an evaluation, happens for steps that count. Each pass has its own local variables.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from torch.optim.optimizer import register_optimizer_step_post_hook

from argosy.core import ConfigError
from argosy.train.step import Abandoned

if TYPE_CHECKING:
    from argosy.train.run import Run


def run_body(run: "Run", numbers: range, things: Mapping[str, Any], body: Callable[[int], Any]) -> None:
    """Call `body` for the steps of `numbers` that are left, each as a transaction.

    Raises:
        ConfigError: the numbers are no range of consecutive ones.
    """
    if not isinstance(numbers, range) or numbers.step != 1:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise ConfigError(f"run.loop takes a range of steps: {numbers!r}", hint="run.loop(range(first, steps), ...)")
    run.track(**things)
    run.healing.origin = numbers.start

    def after_update(*_: Any) -> None:
        step = run.current
        if step is not None and step.rehearsal and step.updates >= len(run.tracked.optimizers):
            raise Abandoned("a rehearsal ends with its update")

    watching = register_optimizer_step_post_hook(after_update)
    try:
        for step in run.steps(numbers.stop):
            with step:
                body(step.number)
    finally:
        watching.remove()
