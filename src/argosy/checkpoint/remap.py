"""Turn stored tensors into others by a user's function, before they are matched with what lives here.

The function gets whole tensors by name and returns whole tensors by name. It is called once with parameters and
buffers, and once for each tensor of the optimizer that has its parameter's shape, so moments follow.
"""

from collections.abc import Callable, Mapping
from typing import Any, cast

from argosy.core import ConfigError
from argosy.transfer import Member, State, Unit, full_name, references, replicated

Remap = Callable[[dict[str, Any]], Mapping[str, Any]]
TENSOR = ("parameter", "value")


def remapped(stored: State, tensors: Mapping[str, Any], remap: Remap) -> State:
    """The units that the function makes of stored ones, whose tensors are given by their full names.

    A unit under a new name has the step and the options that all stored units share.

    Raises:
        ConfigError: the function fails, or leaves out a tensor that only a rename can move.
    """
    beside = set(references(stored.values))
    units = {name: unit for name, unit in stored.units.items() if name not in beside}
    made: dict[str, Unit] = {}
    for key in dict.fromkeys(key for unit in units.values() for key in unit.members if _is_mapped(unit, key)):
        names = TENSOR if key in TENSOR else (key,)
        if key == "value" and any("parameter" in unit.members for unit in units.values()):
            continue  # They were given together with parameters.
        olds = {name: each for name, unit in units.items() for each in names if each in unit.members}
        given = {name: tensors[full_name(name, each)] for name, each in olds.items()}
        for name, tensor in _called(remap, given, key).items():
            old = units[name].members[olds[name]] if name in olds else units[next(iter(olds))].members[key]
            made.setdefault(name, Unit(name)).members[old.key] = _made(old, name, tensor)
    for name, unit in units.items():
        lost = [key for key in unit.members if not _is_mapped(unit, key) and unit.members[key].kind != "scalar"]
        if name not in made and lost:
            raise ConfigError(f"{full_name(name, lost[0])} has no counterpart: remap= must return {name} as it is")
    for name, unit in made.items():
        _complete(unit, units.get(name), units, tensors)
    kept = {name: _held(unit, tensors) for name, unit in stored.units.items() if name in beside}
    return State(units=kept | made, values=stored.values)


def _is_mapped(unit: Unit, key: str) -> bool:
    return key in TENSOR or unit.members[key].kind == "same"


def _called(remap: Remap, given: dict[str, Any], key: str) -> Mapping[str, Any]:
    try:
        found: Any = remap(dict(given))
    except Exception as error:
        what = "parameters and buffers" if key in TENSOR else key
        raise ConfigError(f"remap= failed with {what}: {type(error).__name__}: {error}") from error
    if not isinstance(found, Mapping):
        raise ConfigError(f"remap= returns a dict of tensors by name: {type(found).__name__}")
    return cast("Mapping[str, Any]", found)


def _made(old: Member, name: str, tensor: Any) -> Member:
    from argosy.transfer import torch_dtypes

    dtype = next((each for each, kind in torch_dtypes.items() if kind == getattr(tensor, "dtype", None)), None)
    if dtype is None:
        raise ConfigError(f"remap= returns what is no tensor that can be kept: {name}: {type(tensor).__name__}")
    return Member(old.key, old.role, dtype, replicated(tuple(tensor.shape)), tensor.contiguous(), "same")


def _held(unit: Unit, tensors: Mapping[str, Any]) -> Unit:
    """A unit with its stored tensors."""
    members = {
        key: Member(key, each.role, each.dtype, replicated(each.shape), tensors[full_name(unit.name, key)], each.kind)
        for key, each in unit.members.items()
    }
    return Unit(unit.name, members, unit.options, unit.aliases)


def _complete(unit: Unit, old: Unit | None, units: Mapping[str, Unit], tensors: Mapping[str, Any]) -> None:
    """Give a unit what is no tensor of its parameter's shape: that of the old one, or what all have in common."""
    if old is not None:
        rest = {key: each for key, each in _held(old, tensors).members.items() if not _is_mapped(old, key)}
        unit.members, unit.options, unit.aliases = unit.members | rest, old.options, old.aliases
        return
    trained = [each for each in units.values() if "optimizer" in each.options]
    if len(unit.members) < 2 or not trained:
        return
    first = trained[0]
    same = {key: value for key, value in first.options.items() if all(u.options.get(key) == value for u in trained)}
    unit.options = same
    for key in [key for key, each in first.members.items() if each.kind == "scalar"]:
        values = [tensors[full_name(each.name, key)] for each in trained if key in each.members]
        if any(bool((value != values[0]).any()) for value in values):
            raise ConfigError(f"{key} differs between stored parameters, so {unit.name} has none")
        unit.members[key] = _held(first, tensors).members[key]
