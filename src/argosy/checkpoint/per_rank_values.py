"""What ranks may differ in: values, and small tensors outside modules and optimizers (cursors, states of generators).

D1  All ranks share rank 0's values; each other rank saves its own under `rank3/name`.
D2  A reader drops values that are equal to rank 0's. A rank gets its own back; a new rank gets rank 0's.
"""

import re
from collections.abc import Iterable, Sequence
from math import prod
from typing import Any

from msgspec.structs import replace

from argosy.checkpoint.format import Entry
from argosy.checkpoint.step_index import Step
from argosy.transfer import State, Unit, references, referring, replicated

OWN_BYTES, OWN_TENSORS = 16 << 20, 1024
"""Of one name: where there is more, its tensors count as equal on all ranks."""
_OWN = re.compile(r"(rank(\d+)/)(.*)", re.DOTALL)


def is_own(name: str) -> bool:
    """Whether it is the name of what one rank has."""
    return owner_of(name) is not None


def owner_of(name: str) -> int | None:
    """The rank whose own it is by its name."""
    match = _OWN.fullmatch(name)
    return None if match is None else int(match[2])


def add_own(state: State, names: Iterable[str]) -> None:
    """D1: say what this rank has under these names. Its tensors are its own then: ranks need not have the same ones."""
    if state.size == 1:
        return
    own = f"rank{state.rank}/"
    for name in names:
        tree = state.values[name]
        found = list(dict.fromkeys(references(tree)))
        mine = {each: own + each for each in found if _are_small(state, found)}
        for each in mine:
            member = state.units[each].members["value"]
            alone = replace(member, layout=replicated(member.shape, (state.rank,)))
            if not state.rank:
                state.units[each] = Unit(each, {"value": alone})
                continue
            del state.units[each]
            state.units[own + each] = Unit(own + each, {"value": replace(alone, role="local")})
        if state.rank:
            state.values[own + name] = referring(tree, mine)


def _are_small(state: State, names: Sequence[str]) -> bool:
    members = [state.units[name].members["value"] for name in names]
    everywhere = tuple(range(state.size))
    return (
        len(names) <= OWN_TENSORS
        and all(member.layout == replicated(member.shape, everywhere) for member in members)
        and sum(prod(member.shape) * member.itemsize for member in members) <= OWN_BYTES
    )


def without_equals(step: Step) -> Step:
    """D2: the step without what a rank says that rank 0 says too."""
    found = [match for name in step.values if (match := _OWN.fullmatch(name)) and match[3] in step.values]
    if not found:
        return step
    contents: dict[str, list[Any]] = {}
    for entry in step.entries:
        if entry.key == "value":
            contents.setdefault(entry.name, []).append((entry.dtype, entry.shape, entry.box, entry.sums))
    gone: set[str] = set()
    for match in found:
        tree, own = step.values[match[0]], match[1]
        plain = {each: each.removeprefix(own) for each in references(tree)}
        is_equal = all(contents.get(mine) == contents.get(shared) for mine, shared in plain.items())
        if is_equal and referring(tree, plain) == step.values[match[3]]:
            gone |= {match[0], *(each for each in plain if each.startswith(own))}
    return replace(
        step,
        entries=[entry for entry in step.entries if entry.unit not in gone] if gone else step.entries,
        values={name: value for name, value in step.values.items() if name not in gone},
        units={name: unit for name, unit in step.units.items() if name not in gone},
    )


def differing(step: Step) -> list[str]:
    """The names under which ranks said different things."""
    return sorted({match[3] for name in step.values if (match := _OWN.fullmatch(name)) and match[3] in step.values})


def kept_apart(entries: Iterable[Entry]) -> set[str]:
    """The tensors of which a rank has its own, by the names that all have for them, and their own names."""
    own = {entry.unit for entry in entries if entry.role == "local"}
    return own | {name.partition("/")[2] for name in own}


def own_first(stored: State, entries: Sequence[Entry], live: State) -> tuple[State, Sequence[Entry]]:
    """What is stored, with what this rank has said itself in the place of what rank 0 said."""
    own = f"rank{live.rank}/"
    said = [name.removeprefix(own) for name in stored.values if name.startswith(own)]
    names = [name for name in said if name in stored.values or name in live.values]
    if not names:
        return stored, entries
    values, units = dict(stored.values), dict(stored.units)
    for name in names:
        tree = values.pop(own + name)
        plain = {each: each.removeprefix(own) for each in references(tree)}
        mine = {each: shared for each, shared in plain.items() if each != shared and each in units}
        # A tensor of a role that was not saved is only referred to.
        gone = {*references(values.get(name))} - {*plain.values()} | {*mine.values()}
        for each in gone:
            units.pop(each, None)
        for each, shared in mine.items():
            members = units.pop(each).members
            units[shared] = Unit(shared, {key: replace(member, role="buffer") for key, member in members.items()})
        values[name] = referring(tree, plain)
        entries = [
            replace(entry, unit=mine[entry.unit], name=mine[entry.unit]) if entry.unit in mine else entry
            for entry in entries
            if entry.unit not in gone
        ]
    return State(units=units, values=values), entries
