"""The counters of Lightning's fit loop at a step, as a checkpoint has them."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

import math
from typing import Any


def enter_fit_loop(fit: Any, at: int, batches: int, accumulate: int, updates: int) -> int:
    """Set the counters to those of the end of the batch before step `at`; returns the batches that this epoch has had.

    `batches` are those of an epoch, `accumulate` those of a step; `updates` counts steps of optimizers, which are more
    with manual optimization.
    """
    epoch, before = divmod(at - 1, math.ceil(batches / accumulate))
    done = min((before + 1) * accumulate, batches)
    state = fit.state_dict()
    for tracker in state["epoch_progress"].values():
        tracker.update(ready=epoch + 1, started=epoch + 1, processed=epoch, completed=epoch)
    for name, number in (("total", epoch * batches + done), ("current", done)):
        tracker = state["epoch_loop.batch_progress"][name]
        tracker.update(ready=number, started=number, processed=number, completed=number - 1)
    state["epoch_loop.batch_progress"]["is_last_batch"] = done == batches
    state["epoch_loop.state_dict"]["_batches_that_stepped"] = at - 1
    state["epoch_loop.manual_optimization.optim_step_progress"]["total"].update(ready=updates, completed=updates)
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    for name, number in (("total", at), ("current", before + 1)):
        optimizer["step"][name].update(ready=number, completed=number)
        optimizer["zero_grad"][name].update(ready=number, started=number, completed=number)
    fit.load_state_dict(state)
    return done % batches
