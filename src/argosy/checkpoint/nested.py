"""A step as the nested dicts that people keep with torch.save and DCP, and a state made of such dicts.

{"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "epoch": 3}
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import re
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from argosy.checkpoint.step_index import Step
from argosy.core import ConfigError
from argosy.transfer import (
    WRAPPED_NOTE,
    Member,
    State,
    Unit,
    describe,
    grown,
    is_value,
    references,
    replicated,
    role_of,
    torch_dtypes,
    value_of,
)

MODELS = ("model", "state_dict")
"""What people call the weights; they are named as a module alone names them, without a prefix."""
BUFFERS = ("running_mean", "running_var", "num_batches_tracked")
NUMBERED = (
    "{0}: its state goes by numbers, so it is kept as it is and no optimizer can be restored from it; "
    "to keep it, load the file into the optimizer in a script, and save that with a Saver"
)
LISTED = "{0}: its state has tensors in lists or dicts, so it is kept as it is and no optimizer can be restored from it"
NAMES = {dtype: name for name, dtype in torch_dtypes.items()}
_LOCAL = re.compile(r"rank\d+/")
_GONE = object()


def nested(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a step: `model`, each optimizer by its name, and the rest as it was saved."""
    found = {"model": weights} if (weights := of_modules(step, tensors)) else {}
    rest = {name: grown(value, tensors.__getitem__) for name, value in step.values.items()}
    for part in (_optimizers(step, tensors), rest):
        for name in part:
            if name in found:
                raise ConfigError(f"two things would be named {name}", hint="export it as hf, or rename one of them")
        found |= part
    return found


def of_modules(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of modules, in their order: no moments, nothing else that was saved."""
    loose = set(references(step.values))
    names = [name for unit, info in step.units.items() for name in (unit, *info.aliases)]
    return {name: tensors[name] for name in names if name in tensors and name not in loose}


def _optimizers(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Each as torch's state_dict with names for numbers; parameters with equal options are one group."""
    kept: dict[str, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        unit, _, key = name.partition("::")
        if key:
            kept.setdefault(unit, {})[key] = tensor
    found: dict[str, Any] = {}
    for name, info in step.units.items():
        options = grown(dict(info.options), tensors.__getitem__)
        own = kept.get(name, {}) | options.pop("state", {})
        options.pop("class", None)  # Others' formats have no place for it.
        if WRAPPED_NOTE in options:  # It differs, in one group too.
            own[WRAPPED_NOTE] = options.pop(WRAPPED_NOTE)
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
    """A state of nested dicts, and messages: what was skipped, and what cannot be restored into an optimizer.

    What is named `model`, or is nothing but tensors, counts as a module's; an optimizer's state goes with its
    parameters where it names them, and is kept as it is where it only counts them.
    """
    left: list[str] = []
    if not isinstance(content, Mapping):
        content = dict(enumerate(content)) if isinstance(content, list | tuple) else {"value": content}
    rest: dict[str, Any] = {}
    for key, value in _kept(content, "", left).items():
        if str(key) in rest:
            raise ConfigError(f"two things would be named {key}, as a key of text and as another one")
        rest[str(key)] = value
    modules = _taken_modules(rest)
    notes = [f"skipped {each}" for each in left]
    optimizers: dict[str, Any] = {}
    for name, value in rest.items():
        if not _is_optimizer(value):
            continue
        named = {each for group in value["param_groups"] for each in group["params"] if each in modules}
        value = {"state": {}, **value}  # DCP leaves out an empty one.
        count = sum(len(group["params"]) for group in value["param_groups"])
        if len(named) < count or not set(value["state"]) <= named:
            notes.append(NUMBERED.format(name))
        elif not _is_flat(value):
            notes.append(LISTED.format(name))
        else:
            optimizers[name] = value
    state = describe(others={name: value for name, value in rest.items() if name not in optimizers}, ranks=(0, 1))
    for unit in state.units.values():
        if _LOCAL.match(unit.name):  # A generator: each rank that restores has its own.
            unit.members["value"] = replace(unit.members["value"], role="local")
    _add_modules(state, modules)
    for title, one in optimizers.items():
        _add_optimizer(state, title, one)
    return state, notes


def _kept(value: Any, name: str, left: list[str], around: tuple[int, ...] = ()) -> Any:
    """The same without what no checkpoint can hold; `around` are the containers that it is in."""
    inside = (*around, id(value))
    if id(value) in around:
        left.append(f"{name} (it contains itself)")
        return _GONE
    if isinstance(value, torch.Tensor):
        if value.dtype in NAMES and value.layout == torch.strided:
            return value.detach()
        left.append(f"{name} ({str(value.dtype).removeprefix('torch.')}, {value.layout})")
        return _GONE
    if isinstance(value, Mapping):
        before = f"{name}." if name else ""
        left += [f"{before}{key} (its key is a {type(key).__name__})" for key in value if not _is_key(key)]
        plain = {key: each for key, each in value.items() if _is_key(key)}
        inner = {key: _kept(each, f"{before}{key}", left, inside) for key, each in plain.items()}
        return {key: each for key, each in inner.items() if each is not _GONE}
    if isinstance(value, list | tuple):
        parts = [_kept(each, f"{name}.{i}" if name else str(i), left, inside) for i, each in enumerate(value)]
        parts = [None if each is _GONE else each for each in parts]
        return parts if isinstance(value, list) else tuple(parts)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    left.append(f"{name} ({type(value).__name__})")
    return _GONE


def _is_key(key: Any) -> bool:
    """Whether JSON can say it, be it as a pair with what it is the key of."""
    return all(map(_is_key, key)) if isinstance(key, tuple) else key is None or isinstance(key, str | int | float)


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
    """Whether it is a dict of nothing but tensors; a module's names are text."""
    if not isinstance(value, dict) or not value:
        return False
    return all(isinstance(key, str) and isinstance(each, torch.Tensor) for key, each in value.items())


def _is_optimizer(value: Any) -> bool:
    """Whether it has the form of an optimizer's state_dict."""
    if not isinstance(value, dict) or set(value) - {"state", "param_groups"}:
        return False
    state, groups = value.get("state", {}), value.get("param_groups")
    if not isinstance(state, dict) or not isinstance(groups, list) or not groups:
        return False
    lists = [group.get("params") if isinstance(group, dict) else None for group in groups]
    are_names = all(isinstance(each, list) and all(isinstance(name, str | int) for name in each) for each in lists)
    return are_names and all(isinstance(own, dict) for own in state.values())


def _is_flat(optimizer: Mapping[str, Any]) -> bool:
    """Whether a unit has a place for all of its state and options."""
    values = [value for own in optimizer["state"].values() for value in own.values()]
    values += [value for group in optimizer["param_groups"] for value in group.values()]
    return all(isinstance(each, torch.Tensor) or (is_value(each) and not _holds_tensors(each)) for each in values)


def _holds_tensors(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, torch.Tensor) or any(map(_holds_tensors, inside))


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
        options = {key: value_of(value) for key, value in group.items() if key not in ("params", "param_names")}
        for name in group["params"]:
            unit = units[name]
            shape = next(iter(unit.members.values())).shape
            unit.options = {**options, "optimizer": title}
            for key, value in one["state"].get(name, {}).items():
                if isinstance(value, torch.Tensor):
                    unit.members[key] = _of_optimizer(key, value, shape)
                elif key == WRAPPED_NOTE:
                    unit.options[key] = value_of(value)
                else:
                    unit.options.setdefault("state", {})[key] = value_of(value)
            for key, note in unit.options.get(WRAPPED_NOTE, {}).items():
                for each in (f"{key}.{part}" for part in note["blocks"]):
                    unit.members[each] = replace(unit.members[each], kind="blocked")
