"""A step as the nested dicts that people keep with torch.save and DCP, and a state made of such dicts.

{"model": {name: tensor}, "optimizer": {"state": {name: {key: tensor}}, "param_groups": [...]}, "epoch": 3}
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import math
import re
from collections.abc import Mapping
from typing import Any

import torch
from msgspec.structs import replace

from argosy.checkpoint.numbered_state import are_groups, by_names, is_buffer, is_by_parameter, is_numbered, names_of
from argosy.checkpoint.step_index import Step
from argosy.core import ConfigError
from argosy.transfer import (
    WRAPPED_NOTE,
    Member,
    State,
    Unit,
    describe,
    grown,
    references,
    replicated,
    role_of,
    torch_dtypes,
)

MODELS = ("model", "state_dict")
"""What people call the weights; they are named as a module alone names them, without a prefix."""
NUMBERED = (
    "{0}: its state goes by numbers, and the file does not say of which parameters, so it is kept as it is and no "
    "optimizer can be restored from it; if it was made of model.parameters(), import it again with --in-order"
)
LISTED = "{0}: its state has tensors in lists or dicts, so it is kept as it is and no optimizer can be restored from it"
NAMES = {dtype: name for name, dtype in torch_dtypes.items()}
_LOCAL = re.compile(r"rank\d+/")
_GONE = object()


def nested(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Everything of a step: `model`, each optimizer by its name, and the rest as it was saved.

    Raises:
        ConfigError: two of them have the same name.
    """
    found = {"model": weights} if (weights := of_modules(step, tensors)) else {}
    rest = {name: grown(value, tensors.__getitem__) for name, value in step.values.items()}
    for part in (_optimizers(step, tensors), rest):
        for name in part:
            if name in found:
                raise ConfigError(f"two things would be named {name}", hint="export it as hf, or rename one of them")
        found |= part
    return found


def of_modules(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The parameters and buffers of modules, in their order: no moments, nothing that was saved beside them."""
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


def state_of(content: Any, *, in_order: bool = False) -> tuple[State, list[str]]:
    """A state of nested dicts, and what is to be said of it: what was left out, and what others cannot use.

    What is named `model`, or is nothing but tensors, counts as a module's; an optimizer's state goes with its
    parameters where it names them, and is kept as it is where it only counts them, unless `in_order` says that its
    numbers are those of `model.parameters()`.

    Raises:
        ConfigError: two tensors would have one name, or an optimizer's state does not fit the parameters `in_order`.
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
    notes = [f"left out {each}" for each in left]
    for name in [each for each in rest if is_numbered(rest[each])]:
        if (known := names_of(name, rest[name], modules, in_order=in_order)) is not None:
            rest[name] = by_names(rest[name], known)
        else:
            notes.append(NUMBERED.format(name))
    optimizers = {name: value for name, value in rest.items() if _names_parameters(value, modules)}
    for name in [each for each in optimizers if not _is_flat(optimizers[each])]:
        del optimizers[name]
        notes.append(LISTED.format(name))
    state = describe(others={name: value for name, value in rest.items() if name not in optimizers}, ranks=(0, 1))
    for unit in state.units.values():
        if _LOCAL.match(unit.name):  # A generator: whoever restores has one of its own for each rank.
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


def _names_parameters(value: Any, modules: Mapping[str, torch.Tensor]) -> bool:
    """Whether it is an optimizer's state by names of parameters, all of them known."""
    if not isinstance(value, dict) or set(value) - {"state", "param_groups"} or not value.get("param_groups"):
        return False
    groups, state = value["param_groups"], value.get("state", {})
    if not are_groups(groups) or not is_by_parameter(state):
        return False
    named = {name for group in groups for name in group["params"] if isinstance(name, str) and name in modules}
    count = sum(len(group["params"]) for group in groups)
    return len(named) == count and set(state) <= named


def _is_flat(optimizer: Mapping[str, Any]) -> bool:
    """Whether a unit has a place for each tensor of its state."""
    values = [value for own in optimizer.get("state", {}).values() for value in own.values()]
    return not any(_holds_tensors(value) for value in values if not isinstance(value, torch.Tensor))


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
        elif is_buffer(name, tensor):
            whole.members["value"] = _member("value", "buffer", tensor)
        else:
            whole.members["parameter"] = _member("parameter", "parameter", tensor)


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
                elif key == WRAPPED_NOTE:
                    unit.options[key] = _option(value)
                else:
                    unit.options.setdefault("state", {})[key] = _option(value)
            for key, note in unit.options.get(WRAPPED_NOTE, {}).items():
                for each in (f"{key}.{part}" for part in note["blocks"]):
                    unit.members[each] = replace(unit.members[each], kind="blocked")


def _option(value: Any) -> Any:
    """An option as JSON can say it, which knows neither tuples nor infinity."""
    if isinstance(value, list | tuple):
        return [_option(inner) for inner in value]
    if isinstance(value, dict):
        return {str(key): _option(inner) for key, inner in value.items()}
    if isinstance(value, torch.Tensor):
        value = value.item() if value.numel() == 1 else value.tolist()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return {"$int": hex(value)}
    return {"$float": str(value)} if isinstance(value, float) and not math.isfinite(value) else value
