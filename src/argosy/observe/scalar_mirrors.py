"""Mirror the scalars that a script sends to TensorBoard, W&B or Hugging Face's Trainer into the rank's journal.

M1  The other logger gets every call unchanged, and its result and errors are the caller's.
M2  Nothing is read from a device: only numbers and tensors that are on the CPU.
"""

from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import wraps
from typing import Any, cast

from argosy.observe.rank_journal import rank_journal
from argosy.observe.spans import ring


def mirror(name: str, value: object, step: object = None) -> None:
    """Write one scalar to the journal; what is no number on the CPU is skipped (M2)."""
    with suppress(Exception):
        if hasattr(value, "is_cpu") and not cast(Any, value).is_cpu:
            return
        if isinstance(value, (str, bytes)):
            return
        number = float(cast(Any, value))
        at = ring().step if step is None else int(cast(Any, step))
        rank_journal.write("scalar", name=str(name), value=number, step=at)


def _after(original: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    @wraps(original)
    def logged(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)  # M1
        with suppress(Exception):
            note(*args, **kwargs)
        return result

    return logged


def patch_tensorboard(module: Any) -> None:
    """Mirror `SummaryWriter.add_scalar` and `add_scalars`."""

    def scalar(_: Any, tag: str, scalar_value: object, global_step: object = None, *__: Any, **___: Any) -> None:
        mirror(tag, scalar_value, global_step)

    def scalars(
        _: Any, main_tag: str, values: Mapping[str, object], global_step: object = None, *__: Any, **___: Any
    ) -> None:
        for name, value in values.items():
            mirror(f"{main_tag}/{name}", value, global_step)

    writer = module.SummaryWriter
    writer.add_scalar = _after(writer.add_scalar, scalar)
    writer.add_scalars = _after(writer.add_scalars, scalars)


def patch_wandb(module: Any) -> None:
    """Mirror `wandb.log`, which calls the method of its run."""

    def log(_: Any, data: Mapping[str, object], step: object = None, *__: Any, **___: Any) -> None:
        for name, value in data.items():
            mirror(name, value, step)

    module.Run.log = _after(module.Run.log, log)


def patch_trainer(module: Any) -> None:
    """Mirror what Hugging Face's Trainer logs."""

    def log(trainer: Any, logs: Mapping[str, object], *_: Any, **__: Any) -> None:
        for name, value in logs.items():
            mirror(name, value, trainer.state.global_step)

    module.Trainer.log = _after(module.Trainer.log, log)


MIRRORS: dict[str, Callable[[Any], None]] = {
    "torch.utils.tensorboard.writer": patch_tensorboard,
    "tensorboardX.writer": patch_tensorboard,
    "wandb.sdk.wandb_run": patch_wandb,
    "transformers.trainer": patch_trainer,
}
"""By module that holds the class."""
