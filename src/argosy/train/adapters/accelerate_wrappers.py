"""In the place of what accelerate prepares: an optimizer's `step`, a scheduler's `step`, and a loader of batches."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false

import math
from collections.abc import Iterator
from typing import Any

from accelerate import skip_first_batches


class Vote:
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


class Schedule:
    """In the place of a scheduler's `step`."""

    def __init__(self, owner: Any, step: Any) -> None:
        self._owner, self._step = owner, step

    def __call__(self, *words: Any, **how: Any) -> Any:
        if self._owner.sync_gradients and self._owner.argosy_state[1]:
            return
        self._step(*words, **how)
        if self._owner.sync_gradients:
            self._owner.argosy_settle(scheduled=True)


class RepeatedBatches:
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
            if (before - 1) * size < len(loader):
                owner.argosy_leave_if_all_did()
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
