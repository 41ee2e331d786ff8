"""Carry a loop of Hugging Face accelerate through failures: `surviving(Accelerator, run)` is an Accelerator that does.

The loop body is the user's, so what comes again after a loss comes from the loader: the same batches. What the body
does with an attempt that does not count is undone, except for variables of the script. A replaced rank gets no batches
of the epochs and steps that are over, and until it has the weights of the others it neither saves, logs nor prints.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUntypedBaseClass=false

from typing import Any, TypeVar, cast

from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration
from torch.nn import Module
from torch.utils.data import DataLoader

from argosy.train.adapters.accelerate_wrappers import RepeatedBatches, Schedule, Vote
from argosy.train.adapters.transaction import Transaction
from argosy.train.run import Run
from argosy.train.step import SUSPECT_S

C = TypeVar("C", bound=type)


def surviving(accelerator: C, run: Run) -> C:
    """The same class of Accelerator, which survives lost ranks. Call its `end_training` after the loop."""
    return cast(C, type(f"Surviving{accelerator.__name__}", (_Surviving, accelerator), {"argosy_run": run}))


class _Surviving:
    """Goes before Accelerator in the order of classes."""

    argosy_run: Run
    _is_entering = False
    """Whether this rank has not got the state of the step yet at which it enters."""

    def __init__(self, *words: Any, **how: Any) -> None:
        config = how.setdefault("dataloader_config", DataLoaderConfiguration())
        config.use_seedable_sampler = True  # The order of an epoch must not depend on the epochs before it.
        super().__init__(*words, **how)
        self._transaction = Transaction(self.argosy_run)
        self.argosy_at = self._transaction.entry_step()
        self._is_entering = self.argosy_at > 0
        self._has_left = False
        self._trained: list[Module] = []
        self._waits_for = 0
        """Schedulers that have not stepped in the open step."""
        self._again = False
        self._schedulers_known = 0

    def prepare(self, *things: Any, **how: Any) -> Any:
        """As accelerate does; what comes together with an optimizer is trained."""
        found = super().prepare(*things, **how)  # pyright: ignore
        every = list(found) if isinstance(found, tuple) else [found]
        every = [RepeatedBatches(self, each) if isinstance(each, DataLoader) else each for each in every]
        optimizers = [each for each in every if isinstance(each, AcceleratedOptimizer)]
        for each in every:
            if isinstance(each, AcceleratedOptimizer):
                each.step = Vote(self, each.step)  # pyright: ignore[reportAttributeAccessIssue]
            elif isinstance(each, AcceleratedScheduler):
                each.step = Schedule(self, each.step)  # pyright: ignore[reportAttributeAccessIssue]
        if optimizers:
            self._trained = [each for each in every if isinstance(each, Module)]
            schedules = [each for each in every if isinstance(each, AcceleratedScheduler)]
            self._schedulers_known = len(schedules)
            things_by_name: dict[str, Any] = {f"model{number}": each for number, each in enumerate(self._trained)}
            things_by_name |= {f"optimizer{number}": each.optimizer for number, each in enumerate(optimizers)}
            things_by_name |= {f"schedule{number}": each.scheduler for number, each in enumerate(schedules)}
            self._transaction.begin(None, self.argosy_at, **things_by_name)
        return tuple(every) if isinstance(found, tuple) else every[0]

    def end_training(self) -> None:
        """Leave once all ranks have the last step."""
        self._leave()
        super().end_training()  # pyright: ignore

    def _leave(self, *, alone: bool = False) -> None:
        if self._trained and not self._has_left:
            self._transaction.finish(alone=alone)
            self._is_entering, self._has_left = False, True

    # -- what a rank without the state must not do: it would replace good files by untrained weights ----

    @property
    def is_main_process(self) -> bool:
        return not self._is_entering and cast(Any, super()).is_main_process

    @property
    def is_local_main_process(self) -> bool:
        return not self._is_entering and cast(Any, super()).is_local_main_process

    @property
    def is_last_process(self) -> bool:
        return not self._is_entering and cast(Any, super()).is_last_process

    def print(self, *words: Any, **how: Any) -> None:
        self._unless_entering("print", *words, **how)

    def log(self, *words: Any, **how: Any) -> None:
        self._unless_entering("log", *words, **how)

    def save(self, *words: Any, **how: Any) -> None:
        self._unless_entering("save", *words, **how)

    def save_model(self, *words: Any, **how: Any) -> None:
        self._unless_entering("save_model", *words, **how)

    def save_state(self, *words: Any, **how: Any) -> Any:
        return self._unless_entering("save_state", *words, **how)

    def _unless_entering(self, name: str, *words: Any, **how: Any) -> Any:
        return None if self._is_entering else getattr(super(), name)(*words, **how)

    # -- for loaders, optimizers and schedulers ----------------------------------------------------

    def argosy_trains(self) -> bool:
        return bool(self._trained) and all(each.training for each in self._trained)

    def argosy_open(self) -> None:
        self._again = False
        self._transaction.open(self.argosy_at)

    def argosy_vote(self) -> bool:
        """Whether the optimizer may step."""
        if self._transaction.voted:
            return True  # Another optimizer of the same step.
        answer = self._transaction.vote()
        self._again = answer is None
        self._is_entering &= self._again
        self.argosy_at += answer is not None
        self._waits_for = self._schedulers_known
        return bool(answer)

    def argosy_excuse(self) -> None:
        """An update failed: a lost rank may be the cause."""
        self._transaction.restart_if_lost(SUSPECT_S)

    def argosy_settle(self, *, scheduled: bool = False) -> bool:
        """The update is made, and if it `scheduled` one more schedule has stepped; False: all comes again."""
        self._waits_for -= scheduled
        if self._transaction.voted and self._waits_for <= 0:
            self._transaction.commit()
        return not self._again

    def argosy_leave_if_all_did(self) -> None:
        """The loop has no more batches. If the other ranks have left it, take their weights, for what comes after."""
        if self._is_entering and self._transaction.has_ended:
            self._leave(alone=True)

    def argosy_close(self) -> None:
        self._waits_for = 0
        self.argosy_settle()

    @property
    def argosy_state(self) -> tuple[bool, bool]:
        """Whether a step is open, and whether it comes again."""
        return self._transaction.is_open, self._again
