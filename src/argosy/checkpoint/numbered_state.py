"""An optimizer's state by numbers, as torch's `state_dict()` has it: of which parameter is each? Pure.

N1  Numbers are given names only by the file itself (`param_names`, of an optimizer made of `named_parameters()`), or by
    somebody who says that they are in the model's order; then counts and shapes must agree. Shapes alone prove nothing.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Mapping
from typing import Any

import torch

from argosy.core import ConfigError

BUFFERS = ("running_mean", "running_var", "num_batches_tracked")


def is_buffer(name: str, tensor: torch.Tensor) -> bool:
    """Files do not say it: by the names of BatchNorm's, and by integers that are no quantised weights."""
    last = name.rpartition(".")[2]
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return last in BUFFERS or not (is_number or last in ("weight", "bias"))


def are_groups(value: Any) -> bool:
    """Whether they are an optimizer's groups."""
    if not isinstance(value, list):
        return False
    return all(isinstance(each, dict) and isinstance(each.get("params"), list) for each in value)


def is_by_parameter(value: Any) -> bool:
    """Whether it is what an optimizer keeps of each parameter."""
    return isinstance(value, dict) and all(isinstance(own, dict) for own in value.values())


def is_numbered(value: Any) -> bool:
    """Whether it is an optimizer's state by numbers."""
    if not isinstance(value, dict) or set(value) != {"state", "param_groups"} or not is_by_parameter(value["state"]):
        return False
    groups = value["param_groups"]
    if not are_groups(groups):
        return False
    numbers = [number for group in groups for number in group["params"]]
    return sorted(map(str, numbers)) == sorted(map(str, range(len(numbers)))) and bool(numbers)


def names_of(
    title: str, one: Mapping[str, Any], modules: Mapping[str, torch.Tensor], *, in_order: bool
) -> list[str] | None:
    """The parameter of each number, or None if nobody can tell.

    Raises:
        ConfigError: they are said to be in the model's order, and cannot be.
    """
    groups = one["param_groups"]
    pairs: list[tuple[int, str]] = [
        (int(number), name)
        for group in groups
        for number, name in zip(group["params"], group.get("param_names") or (), strict=False)
    ]
    count = sum(len(group["params"]) for group in groups)
    if len(pairs) == count and all(name in modules for _, name in pairs):
        found = [name for _, name in sorted(pairs)]
    elif not in_order:
        return None
    elif len(groups) > 1:
        raise ConfigError(f"{title} has {len(groups)} groups, so its numbers are in their order, not in the model's")
    else:
        found = _parameters(modules)
    if len(found) != count:
        raise ConfigError(
            f"{title} has {count} parameters, the model {len(found)}: its numbers are not in the model's order",
            hint="some may have been frozen, or be buffers: import it without --in-order",
        )
    _check_shapes(title, one, [modules[name] for name in found])
    return found


def _parameters(modules: Mapping[str, torch.Tensor]) -> list[str]:
    """As `model.parameters()` has them: each once, in the order of the state_dict."""
    places: dict[tuple[Any, ...], str] = {}
    for name, tensor in modules.items():
        if not is_buffer(name, tensor):
            place = (tensor.data_ptr(), tensor.shape, tensor.stride()) if tensor.numel() else (name,)
            places.setdefault(place, name)
    return list(places.values())


def _check_shapes(title: str, one: Mapping[str, Any], parameters: list[torch.Tensor]) -> None:
    """What an optimizer keeps of a parameter has its shape, or one of rows or columns of it, or is a number."""
    for number, own in one["state"].items():
        shape = parameters[int(number)].shape
        for key, value in own.items():
            if not isinstance(value, torch.Tensor) or not value.dim():
                continue
            if value.dim() != len(shape) or any(a not in (1, b) for a, b in zip(value.shape, shape, strict=True)):
                raise ConfigError(
                    f"{title} is not in the model's order: {key} of number {number} has shape {list(value.shape)}, "
                    f"that parameter {list(shape)}"
                )


def by_names(one: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """The same with names for numbers."""
    groups = [
        {key: value for key, value in group.items() if key != "param_names"}
        | {"params": [names[int(number)] for number in group["params"]]}
        for group in one["param_groups"]
    ]
    return {"state": {names[int(number)]: own for number, own in one["state"].items()}, "param_groups": groups}
