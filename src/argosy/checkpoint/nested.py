"""A step as the nested dicts that people keep with torch.save and DCP, and a state made of such dicts.

{"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "epoch": 3}
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from argosy.checkpoint.reading import Step
from argosy.core import ConfigError
from argosy.transfer import Member, State, Unit, describe, replicated, role_of, torch_dtypes

MODELS = ("model", "state_dict")
"""What people call the weights; they are named as a module alone names them, without a prefix."""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NAMES = {dtype: name for name, dtype in torch_dtypes.items()}
_LOCAL = re.compile(r"rank\d+/")
_GONE = object()


def nested(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a step: `model`, each optimizer by its name, and the rest as it was saved.

    Raises:
        ConfigError: two of them have the same name.
    """
    found = {"model": weights} if (weights := of_modules(step, tensors)) else {}
    rest = {name: _grown(value, tensors) for name, value in step.values.items()}
    for part in (_optimizers(step, tensors), rest):
        for name in part:
            if name in found:
                raise ConfigError(f"two things would be named {name}", hint="export it as hf, or rename one of them")
        found |= part
    return found


def of_modules(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of modules, in their order: no moments, nothing that was saved beside them."""
    loose = set(_references(step.values))
    names = [name for unit, info in step.units.items() for name in (unit, *info.aliases)]
    return {name: tensors[name] for name in names if name in tensors and name not in loose}


def holds_values(value: Any) -> bool:
    """Whether there is anything but tensors in it."""
    if isinstance(value, dict):
        return "$tensor" not in value and any(map(holds_values, value.values()))
    return any(map(holds_values, value)) if isinstance(value, list) else True


def _references(value: Any) -> Iterator[str]:
    """The names of the tensors that values refer to."""
    if isinstance(value, dict):
        if "$tensor" in value:
            yield value["$tensor"]
        for inner in value.values():
            yield from _references(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner)


def _grown(value: Any, tensors: Mapping[str, Any]) -> Any:
    """A value as it was before it was written down as JSON."""
    if isinstance(value, list):
        return [_grown(inner, tensors) for inner in value]
    if not isinstance(value, dict):
        return value
    if "$tensor" in value:
        return tensors[value["$tensor"]]
    if "$float" in value:
        return float(value["$float"])
    if "$tuple" in value:
        return tuple(_grown(inner, tensors) for inner in value["$tuple"])
    items = value["$items"] if "$items" in value else value.items()
    return {key: _grown(inner, tensors) for key, inner in items}


def _optimizers(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each as torch's state_dict with names for numbers; parameters with equal options are one group."""
    kept: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        unit, _, key = name.partition("::")
        if key:
            kept.setdefault(unit, {})[key] = tensor
    found: dict[str, Any] = {}
    for name, info in step.units.items():
        options = _grown(dict(info.options), tensors)
        own = kept.get(name, {}) | options.pop("state", {})
        if not own and not options:
            continue
        one = found.setdefault(options.pop("optimizer", "optimizer"), {"state": {}, "param_groups": []})
        if own:
            one["state"][name] = own
        groups = one["param_groups"]
        group = next((each for each in groups if each == {**options, "params": each["params"]}), None)
        if group is None:
            groups.append({**options, "params": [name]})
        else:
            group["params"].append(name)
    return found


def state_of(content: Any) -> tuple[State, list[str]]:
    """A state of nested dicts, and the names of what it cannot hold, each with its type.

    What is named `model`, or is nothing but tensors, counts as a module's; an optimizer's state goes with its
    parameters where it names them, and is kept as it is where it only counts them.
    """
    left: list[str] = []
    if not isinstance(content, Mapping):
        content = dict(enumerate(content)) if isinstance(content, list | tuple) else {"value": content}
    rest: dict[str, Any] = {str(key): value for key, value in _kept(content, "", left).items()}
    modules = _taken_modules(rest)
    optimizers = {name: value for name, value in rest.items() if _names_parameters(value, modules)}
    state = describe(others={name: value for name, value in rest.items() if name not in optimizers}, ranks=(0, 1))
    for unit in state.units.values():
        if _LOCAL.match(unit.name):  # A generator: whoever restores has one of its own for each rank.
            unit.members["value"] = replace(unit.members["value"], role="local")
    _add_modules(state, modules)
    for title, one in optimizers.items():
        _add_optimizer(state, title, one)
    return state, left


def _kept(value: Any, name: str, left: list[str]) -> Any:
    """The same without what no checkpoint can hold."""
    if isinstance(value, torch.Tensor):
        if value.dtype in NAMES and value.layout == torch.strided:
            return value.detach()
        left.append(f"{name} ({str(value.dtype).removeprefix('torch.')}, {value.layout})")
        return _GONE
    if isinstance(value, Mapping):
        inner = {key: _kept(each, f"{name}.{key}" if name else str(key), left) for key, each in value.items()}
        return {key: each for key, each in inner.items() if each is not _GONE}
    if isinstance(value, list | tuple):
        parts = [_kept(each, f"{name}.{i}" if name else str(i), left) for i, each in enumerate(value)]
        parts = [None if each is _GONE else each for each in parts]
        return parts if isinstance(value, list) else tuple(parts)
    is_small = not isinstance(value, int) or value.bit_length() < 64
    if is_small and (value is None or isinstance(value, bool | int | float | str)):
        return value
    left.append(f"{name} ({type(value).__name__})")
    return _GONE


def _taken_modules(rest: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Take the tensors of modules out of `rest`, by their full names."""
    found: dict[str, torch.Tensor] = {}
    shared = [name for name in rest if not _LOCAL.match(name)]
    if all(isinstance(rest[name], torch.Tensor) for name in shared):
        return {name: rest.pop(name) for name in shared}
    model = next((name for name in MODELS if isinstance(rest.get(name), dict)), None)
    for name in [each for each in rest if each == model or _is_module(rest[each])]:
        for key, value in list(rest[name].items()):
            if isinstance(value, torch.Tensor):
                full = str(key) if name == model else f"{name}.{key}"
                if full in found:
                    raise ConfigError(f"two tensors would be named {full}")
                found[full] = rest[name].pop(key)
        if not rest[name]:
            del rest[name]
    return found


def _is_module(value: Any) -> bool:
    return isinstance(value, dict) and bool(value) and all(isinstance(each, torch.Tensor) for each in value.values())


def _names_parameters(value: Any, modules: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is an optimizer's state by names of parameters, all of them known."""
    if not isinstance(value, dict) or set(value) - {"state", "param_groups"} or not value.get("param_groups"):
        return False
    groups = value["param_groups"]
    if not all(isinstance(group, dict) and isinstance(group.get("params"), list) for group in groups):
        return False
    named = {name for group in groups for name in group["params"] if name in modules}
    count = sum(len(group["params"]) for group in groups)
    return len(named) == count and set(value.get("state", {})) <= named


def _member(key: str, role: Any, tensor: torch.Tensor, kind: Any = "same") -> Member:
    return Member(key, role, NAMES[tensor.dtype], replicated(tuple(tensor.shape)), tensor, kind)


def _of_optimizer(key: str, tensor: torch.Tensor, parameter: tuple[int, ...]) -> Member:
    kind = "same" if tensor.shape == parameter else "reduced" if tensor.dim() else "scalar"
    return _member(key, role_of(key, tuple(tensor.shape)), tensor, kind)


def _add_modules(state: State, tensors: Mapping[str, torch.Tensor]) -> None:
    """Tied weights are one unit with several names; `name::key` is what belongs to `name`."""
    seen: dict[tuple[Any, ...], str] = {}
    for name, tensor in tensors.items():
        unit, _, key = name.partition("::")
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride(), tensor.dtype)
        first = seen.setdefault(place, name) if tensor.numel() and not key else name
        if first != name:
            state.units[first].aliases += (name,)
            continue
        whole = state.units.setdefault(unit, Unit(unit))
        if key:
            whole.members[key] = _of_optimizer(key, tensor, tensors.get(unit, tensor).shape)
        elif _is_buffer(name, tensor):
            whole.members["value"] = _member("value", "buffer", tensor)
        else:
            whole.members["parameter"] = _member("parameter", "parameter", tensor)


def _is_buffer(name: str, tensor: torch.Tensor) -> bool:
    """Files do not say it: by the names of BatchNorm's, and by integers that are no quantised weights."""
    last = name.rpartition(".")[2]
    is_number = tensor.is_floating_point() or tensor.is_complex()
    return last in BUFFERS or not (is_number or last in ("weight", "bias"))


def _add_optimizer(state: State, title: str, one: Mapping[str, Any]) -> None:
    units = {name: unit for unit in state.units.values() for name in (unit.name, *unit.aliases)}
    for group in one["param_groups"]:
        options = {key: _option(value) for key, value in group.items() if key != "params"}
        for name in group["params"]:
            unit = units[name]
            shape = next(iter(unit.members.values())).shape
            unit.options = {**options, "optimizer": title}
            for key, value in one.get("state", {}).get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    unit.members[key] = _of_optimizer(key, value, shape)
                else:
                    unit.options.setdefault("state", {})[key] = _option(value)


def _option(value: Any) -> Any:
    """An option as JSON can say it, which knows neither tuples nor infinity."""
    if isinstance(value, list | tuple):
        return [_option(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _option(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    return {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value
