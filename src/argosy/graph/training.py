"""What a script hands over so that its step can be captured: the model, a batch, the loss, the optimizer."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false, reportMissingTypeStubs=false

import importlib.util
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from argosy.core import ConfigError


@dataclass(frozen=True, slots=True)
class Training:
    """A training step in four functions. Nothing is allocated: they are called on fake tensors."""

    model: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, ...]]
    """Takes the number of rows, returns the tensors of a batch."""
    loss: Callable[..., Tensor]
    """Called as `loss(model, *batch)`; returns the mean over the rows."""
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | None = None

    def of_model(self, model: nn.Module) -> "Training":
        """The same training with a model that exists already."""
        return replace(self, model=lambda: model)


def load_training(target: str) -> Training:
    """Import `FILE` or `FILE:NAME` and return its Training, or what its function of that name returns.

    Raises:
        ConfigError: there is no such file or name, or it is something else.
    """
    path, _, name = target.partition(":")
    name = name or "training"
    found = load_name(path, name)
    value = found if isinstance(found, Training) else found()
    if not isinstance(value, Training):
        raise ConfigError(f"{name} in {path} is no argosy.graph.Training: {type(value).__name__}")
    return value


def load_name(path: str, name: str) -> Any:
    """Import a file and return one of its names.

    Raises:
        ConfigError: there is no such file or name.
    """
    if not Path(path).is_file():
        raise ConfigError(f"no such file: {path}")
    spec = importlib.util.spec_from_file_location("argosy_target", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    found: Any = getattr(module, name, None)
    if found is None:
        raise ConfigError(
            f"no {name} in {path}",
            hint="define `training = argosy.graph.Training(model=…, batch=…, loss=…, optimizer=…)`",
        )
    return found


def layer_lists(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """The containers of the model whose children all have the same structure, largest first."""
    found: list[tuple[int, str, nn.Module]] = []
    for name, module in model.named_modules():
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and len(module) > 1:
            shapes = {
                (type(child), tuple((n, p.shape, p.dtype) for n, p in child.named_parameters()))
                for child in module.children()
            }
            weight = sum(p.numel() for p in module.parameters())
            if len(shapes) == 1 and weight:
                found.append((weight, name, module))
    return [(name, module) for _, name, module in sorted(found, key=lambda each: -each[0])]


def with_layers(model: nn.Module, count: int) -> int:
    """Keep the first `count` layers of the largest list of equal layers; return how many there were, or 0."""
    for _, layers in layer_lists(model)[:1]:
        total = len(list(layers.children()))
        if isinstance(layers, nn.ModuleDict):
            for key in list(layers)[count:]:
                del layers[key]
        else:
            assert isinstance(layers, nn.ModuleList | nn.Sequential)
            del layers[count:]
        return total
    return 0
