"""Carry the Trainer of transformers, and of TRL, through failures: `surviving(Trainer, run)` is a Trainer that does.

A replaced rank resumes at the step of the others: `train` gives it a checkpoint of the Trainer's own kind that names
this step, and the weights and optimizer state come from a survivor.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUntypedBaseClass=false

import inspect
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from argosy.train.adapters.attributes import Attributes
from argosy.train.adapters.kept_calls import kept_calls
from argosy.train.adapters.trainer_progress import TrainerProgress
from argosy.train.adapters.transaction import Transaction
from argosy.train.run import Run
from argosy.train.step import SUSPECT_S

C = TypeVar("C", bound=type)
_KEPT = "trainer"
_PAST_ALL = 1 << 50
"""A step after which the Trainer has nothing left to do."""
_OWN = ("_begun", "_batches", "_inputs", "_items", "_loss", "_mean", "_before", "_device", "_has_left")


def surviving(trainer: C, run: Run) -> C:
    """The same class of Trainer, which survives lost ranks. Make the run before `TrainingArguments`."""
    return cast(C, type(f"Surviving{trainer.__name__}", (_Surviving, trainer), {"argosy_run": run}))


class _Commits(TrainerCallback):
    def __init__(self, trainer: "_Surviving") -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        self._trainer.argosy_enter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self._trainer.argosy_commit()


class _Surviving:
    """Goes before a Trainer in the order of classes."""

    argosy_run: Run

    def __init__(self, *words: Any, **how: Any) -> None:
        known = inspect.signature(super().__init__).parameters.values()
        starred = any(each.kind is each.VAR_POSITIONAL for each in known)
        named = [each.name for each in known if each.kind is each.POSITIONAL_OR_KEYWORD and not starred]
        how |= dict(zip(named, words, strict=False))
        for name in ("reward_funcs", "rollout_func"):
            if name in how:
                how[name] = kept_calls(self.argosy_run, how[name])
        super().__init__(*words[len(named) :], **how)

    def train(self, resume_from_checkpoint: Any = None, *words: Any, **how: Any) -> Any:
        me: Any = self
        self._transaction, self._progress = Transaction(self.argosy_run), TrainerProgress(me.callback_handler)
        self._begun = self._has_left = False
        self._batches: list[Any] = []
        self._inputs: list[Any] = []
        self._items: Any = None
        self._loss = self._mean = torch.zeros(())
        self._attributes: Attributes | None = None
        self._before: dict[str, bytes] = {}
        commits = _Commits(self)
        me.add_callback(commits)
        at = self._transaction.entry_step()
        with tempfile.TemporaryDirectory(prefix="argosy-entry-") as place:
            if at:
                step = _PAST_ALL if self._transaction.has_ended else at
                resume_from_checkpoint = self._progress.write_entry(self, Path(place), step)
            try:
                outcome = super().train(resume_from_checkpoint, *words, **how)  # pyright: ignore
            except Exception:
                self._transaction.restart_if_lost(SUSPECT_S)
                raise
        self._leave()
        me.remove_callback(commits)
        return outcome._replace(training_loss=self._progress.total / max(self._progress.steps, 1))

    def argosy_enter(self) -> None:
        """The Trainer begins. If the loops of the others have ended, early perhaps, this one has no batches left."""
        me: Any = self
        if me.state.global_step == _PAST_ALL:
            me.state.global_step = self._transaction.entry

    def _leave(self) -> None:
        if not self._begun:  # There was nothing left to do.
            self._begin()
        if not self._has_left:
            self._transaction.finish()
        self._has_left = True

    def _begin(self) -> None:
        me: Any = self
        self._begun = True
        self._progress.state = me.state
        self._transaction.begin(
            me.state.max_steps,
            me.state.global_step,
            model=me.model_wrapped,
            optimizer=me.optimizer.optimizer,
            schedule=me.lr_scheduler,
            progress=self._progress,
        )
        if type(self).__mro__[2] is not Trainer:  # A subclass of it: it may count and draw samples for itself.
            self._attributes = Attributes(self, without=_OWN)
            if (kept := self.argosy_run.once.kept(self._at, _KEPT)) is not None:
                self._attributes.give(kept)

    def _keep(self, step: int) -> None:
        if self._attributes is not None:
            self.argosy_run.once.put(step, _KEPT, self._attributes.take())

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """Draw the batches of a step, then begin it: counting their tokens is exchanged between ranks."""
        if not self._begun:
            self._begin()
        self._batches, self._inputs = list(islice(epoch_iterator, num_batches)), []
        if not self._batches:
            return [], None
        self._device = device
        self._before = self._attributes.take() if self._attributes is not None else {}
        self._transaction.attempt(self._at, lambda _: self._count(), last=False)
        return self._batches, self._items

    @property
    def _at(self) -> int:
        return cast(Any, self).state.global_step

    def _count(self) -> None:
        said = super().get_batch_samples(iter(self._batches), len(self._batches), self._device)  # pyright: ignore
        self._items = said[1]

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> torch.Tensor:
        """Forward and backward; with the last microbatch of the step the vote, and the mean loss of all ranks."""
        self._inputs.append(inputs)
        last = len(self._inputs) == len(self._batches)
        if len(self._inputs) == 1:
            self._loss = torch.zeros((), device=cast(Any, self).args.device)

        def work(again: bool) -> None:
            if again:
                if self._attributes is not None:
                    self._attributes.give(self._before)
                self._loss.zero_()
                self._count()
            for index in range(len(self._inputs)) if again else [len(self._inputs) - 1]:
                self._pass(model, index)
            if last and dist.is_initialized():
                self._mean = self._loss / dist.get_world_size()
                dist.all_reduce(self._mean)
            else:
                self._mean = self._loss.clone()
            if last:
                self._keep(self._at + 1)

        self._transaction.attempt(self._at, work, last=last)
        if not last:
            return torch.zeros_like(self._loss)
        self._progress.add(self._mean.item())
        return self._mean

    def _pass(self, model: Any, index: int) -> None:
        me: Any = self
        silent = index < len(self._batches) - 1 and hasattr(model, "no_sync")
        with me.accelerator.no_sync(model) if silent else nullcontext():
            self._loss += super().training_step(model, self._inputs[index], self._items)  # pyright: ignore

    def argosy_commit(self) -> None:
        """The Trainer has made its update."""
        self._transaction.commit()

    def log(self, logs: dict[str, float], *words: Any, **how: Any) -> None:
        """With losses that a replaced rank knows as well as the others."""
        progress = getattr(self, "_progress", None)
        if "train_loss" in logs and not getattr(self, "_has_left", True):
            self._leave()  # The loop has ended. What follows, such as loading the best model, all ranks do together.
            if self._transaction.has_ended and self._transaction.entry == self._at:
                logs = {name: value for name, value in logs.items() if not name.endswith("_per_second")}
        if progress is not None:
            progress.fill(logs)
        super().log(logs, *words, **how)  # pyright: ignore
        if progress is not None and not self._transaction.is_open:
            self._keep(self._at)
