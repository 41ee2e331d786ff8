"""Carry a loop of Hugging Face accelerate through failures: `surviving(Accelerator, run)` is an Accelerator that does.

The loop body is the user's, so what comes again after a loss comes from the loader: the same batches. What the body
does with an attempt that does not count is undone, except for variables of the script. A replaced rank gets no batches
of the epochs and steps that are over.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUntypedBaseClass=false

import math
from collections.abc import Iterator
from typing import Any, TypeVar, cast

from accelerate import skip_first_batches
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import DataLoaderConfiguration
from torch.nn import Module
from torch.utils.data import DataLoader

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

    def __init__(self, *words: Any, **how: Any) -> None:
        config = how.setdefault("dataloader_config", DataLoaderConfiguration())
        config.use_seedable_sampler = True  # The order of an epoch must not depend on the epochs before it.
        super().__init__(*words, **how)
        self._transaction = Transaction(self.argosy_run)
        self.argosy_at = self._transaction.entry_step()
        self._trained: list[Module] = []
        self._waits_for = 0
        """Schedulers that have not stepped in the open step."""
        self._again = False
        self._schedulers_known = 0

    def prepare(self, *things: Any, **how: Any) -> Any:
        """As accelerate does; what comes together with an optimizer is trained."""
        found = super().prepare(*things, **how)  # pyright: ignore
        every = list(found) if isinstance(found, tuple) else [found]
        every = [_Again(self, each) if isinstance(each, DataLoader) else each for each in every]
        optimizers = [each for each in every if isinstance(each, AcceleratedOptimizer)]
        for each in every:
            if isinstance(each, AcceleratedOptimizer):
                each.step = _Vote(self, each.step)  # pyright: ignore[reportAttributeAccessIssue]
            elif isinstance(each, AcceleratedScheduler):
                each.step = _Schedule(self, each.step)  # pyright: ignore[reportAttributeAccessIssue]
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
        if self._trained:
            self._transaction.finish()
        super().end_training()  # pyright: ignore

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

    def argosy_close(self) -> None:
        self._waits_for = 0
        self.argosy_settle()

    @property
    def argosy_state(self) -> tuple[bool, bool]:
        """Whether a step is open, and whether it comes again."""
        return self._transaction.is_open, self._again


class _Vote:
    """In the place of an optimizer's `step`."""

    def __init__(self, owner: Any, step: Any) -> None:
        self._owner, self._step = owner, step

    def __call__(self, *words: Any, **how: Any) -> Any:
        if not self._owner.sync_gradients:
            return self._step(*words, **how)
        if not self._owner.argosy_vote():
            return None
        try:
            done = self._step(*words, **how)
        except Exception:
            self._owner.argosy_excuse()
            raise
        self._owner.argosy_settle()
        return done


class _Schedule:
    """In the place of a scheduler's `step`."""

    def __init__(self, owner: Any, step: Any) -> None:
        self._owner, self._step = owner, step

    def __call__(self, *words: Any, **how: Any) -> Any:
        if self._owner.sync_gradients and self._owner.argosy_state[1]:
            return
        self._step(*words, **how)
        if self._owner.sync_gradients:
            self._owner.argosy_settle(scheduled=True)


class _Again:
    """In the place of a loader: its batches come again if a rank was lost."""

    def __init__(self, owner: Any, loader: Any) -> None:
        self._owner, self._loader = owner, loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        owner, loader = self._owner, self._loader
        if not owner.argosy_trains():
            yield from loader
            return
        size = owner.gradient_accumulation_steps
        before = owner.argosy_at - loader.iteration * math.ceil(len(loader) / size)
        if before * size >= len(loader):
            loader.iteration += 1
            return
        shard: Any = skip_first_batches(loader, before * size) if before else loader
        source = iter(shard)
        for batch in source:
            yield from self._update(batch, source, shard)
        if before:
            loader.iteration += 1

    def _update(self, batch: Any, source: Iterator[Any], shard: Any) -> Iterator[Any]:
        """The batches of one update, until it counts."""
        owner, drawn, index = self._owner, [(batch, shard.end_of_dataloader)], 0
        owner.argosy_open()
        while True:
            batch, shard.end_of_dataloader = drawn[index]
            yield batch
            owner.argosy_close()
            index += 1
            is_open, again = owner.argosy_state
            if again:
                index = 0
                owner.argosy_open()
            elif not is_open:
                return
            elif index == len(drawn):
                batch = next(source)
                drawn.append((batch, shard.end_of_dataloader))
