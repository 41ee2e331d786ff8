"""Carry Lightning's Trainer through failures: `Trainer(strategy=Surviving(run), ...)` instead of `strategy="ddp"`.

Lightning calls `optimizer.step(closure)`: the strategy calls the closure itself, votes, then lets the optimizer step.
A replaced rank sets the counters of the fit loop to the step of the others; its batches before that step are skipped.
With manual optimization a batch is a step, and cannot be repeated: a lost rank restarts all, as it does under FSDP2.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUntypedBaseClass=false
# pyright: reportOptionalMemberAccess=false, reportIncompatibleMethodOverride=false, reportAttributeAccessIssue=false

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from itertools import islice
from typing import Any

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch import Tensor

from argosy.train.adapters.lightning_callbacks import CallbackStates
from argosy.train.adapters.lightning_counters import enter_fit_loop
from argosy.train.adapters.transaction import Transaction
from argosy.train.run import Run
from argosy.train.step import SUSPECT_S

_COUNTED = "lightning"


class _Commits(Callback):
    def __init__(self, strategy: "_Surviving") -> None:
        self._strategy = strategy

    def on_train_batch_end(self, *_: Any) -> None:
        self._strategy.argosy_commit()


class _Skipping:
    """A loader whose first pass begins after `skip` batches."""

    def __init__(self, loader: Any) -> None:
        self._loader, self.skip = loader, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        yield from islice(self._loader, skip, None)


class _Surviving:
    """Goes before a Strategy in the order of classes."""

    lightning_module: Any
    model: Any
    optimizers: Any

    def __init__(self, run: Run, **how: Any) -> None:
        super().__init__(**how)
        self._run, self._transaction = run, Transaction(run)
        self._inputs: list[tuple[Any, ...]] = []
        """What `training_step` was called with since the step began."""
        self._loaders: list[_Skipping] = []
        self._at = 0
        self._is_manual = self._is_entering = False
        """Whether this rank has not got the state of the step yet at which it enters."""

    def setup(self, trainer: Any) -> None:
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        self._at = at = self._transaction.entry_step()
        self._is_entering, self._loaders = at > 0, []
        super().setup(trainer)
        self._is_manual = not trainer.lightning_module.automatic_optimization
        trainer.callbacks.append(_Commits(self))
        if at:
            trainer.fit_loop.setup_data()
            updates = self._run.once.kept(at, _COUNTED) or at
            size = (trainer.num_training_batches, trainer.accumulate_grad_batches)
            skip = enter_fit_loop(trainer.fit_loop, at, *size, updates)
            for loader in self._loaders:  # Made here, or before, where an optimizer asked for the number of steps.
                loader.skip = skip

    def save_checkpoint(self, *words: Any, **how: Any) -> None:
        """A replaced rank has no checkpoint to save before it has the state of the others."""
        if not self._is_entering:
            super().save_checkpoint(*words, **how)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """An object of rank `src`; this rank's own one where the ranks have not met, or one of them is lost."""
        crew = self._run.crew
        if crew.kind == "replaceable" and (not crew.joined or crew.is_lost()):
            return obj
        try:
            return super().broadcast(obj, src)
        except Exception:
            if crew.is_lost(SUSPECT_S):
                return obj
            raise

    def process_dataloader(self, dataloader: Any) -> Any:
        self._loaders.append(_Skipping(super().process_dataloader(dataloader)))
        return self._loaders[-1]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As the strategy does it. Argosy's group, like Gloo, has no mean of integers, which Lightning counts with."""
        if isinstance(tensor, Tensor) and not tensor.is_floating_point() and str(reduce_op).lower() in ("mean", "avg"):
            return tensor.copy_(super().reduce(tensor.double(), group, reduce_op))
        return super().reduce(tensor, group, reduce_op)

    def on_train_start(self) -> None:
        trainer = self.lightning_module.trainer
        things = {f"schedule{number}": each.scheduler for number, each in enumerate(trainer.lr_scheduler_configs)}
        until = trainer.estimated_stepping_batches
        last = None if self._is_manual or math.isinf(until) else int(until)
        things |= {f"optimizer{number or ''}": each for number, each in enumerate(self.optimizers)}
        things["callbacks"] = CallbackStates(trainer.callbacks)
        self._at = self._at if self._is_manual else trainer.global_step
        self._transaction.begin(last, self._at, sharded=True, model=self.model, **things)
        trainer.should_stop |= self._transaction.has_ended
        if self._is_manual or isinstance(self, ModelParallelStrategy):
            self._transaction.restart_together("with manual optimization or shards a step cannot be repeated")

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        trainer = self.lightning_module.trainer
        if self._is_manual:
            gradients = [(each, each.grad) for each in self.model.parameters()]  # They may belong to several batches.
            self._transaction.attempt(self._at, lambda _: None, last=False)
            for parameter, gradient in gradients:
                parameter.grad = gradient
        elif batch_idx % trainer.accumulate_grad_batches == 0:
            self._inputs, self._at = [], trainer.global_step
            self._transaction.attempt(self._at, lambda _: None, last=False)

    def argosy_commit(self) -> None:
        """A batch has ended, and with it perhaps a step."""
        if self._is_manual:
            self._at += 1
            self._run.once.put(self._at, _COUNTED, self.lightning_module.trainer.global_step)
        if self._is_manual or self._transaction.voted:
            self._transaction.commit()
            self._is_entering = False

    def on_exception(self, exception: BaseException) -> None:
        """Data were exchanged after the vote, and a rank is lost."""
        super().on_exception(exception)
        if isinstance(exception, Exception):
            self._transaction.restart_if_lost(SUSPECT_S)

    def training_step(self, *words: Any, **how: Any) -> Any:
        self._inputs.append(words)
        return super().training_step(*words, **how)

    def optimizer_step(self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **how: Any) -> Any:
        """Forward and backward, the vote, then the update."""
        if self._is_manual:
            if self._transaction.is_open and not self._transaction.voted:
                self._transaction.attempt(self._at, lambda _: None, last=True)
            return super().optimizer_step(optimizer, closure, model, **how)
        found: Any = None

        def work(again: bool) -> None:
            nonlocal found
            if again:
                before, self._inputs = self._inputs[:-1], []
                for words in before:
                    self._accumulate(words, optimizer)
            found = closure()

        self._transaction.attempt(self._at, work, last=True)
        return super().optimizer_step(optimizer, lambda: found, model, **how)

    def _accumulate(self, words: tuple[Any, ...], optimizer: Any) -> None:
        model: Any = self.model
        with model.no_sync() if hasattr(model, "no_sync") else nullcontext():
            out = self.training_step(*words)
            loss = out["loss"] if isinstance(out, Mapping) else out
            self.backward(loss / self.lightning_module.trainer.accumulate_grad_batches, optimizer)
        # Between batches Lightning asks all ranks whether one was told to end; a replaced rank answers here.
        between = getattr(self.lightning_module.trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor", None)
        if between is not None:
            between()

    def on_train_end(self) -> None:
        self._transaction.finish()
        self._is_entering = False


class Surviving(_Surviving, DDPStrategy):
    """DDP whose ranks are replaced when they are lost. Make the run before the Trainer."""


class SurvivingSharded(_Surviving, ModelParallelStrategy):
    """FSDP2 and tensor parallelism, whose ranks all restart from memory when one is lost."""
