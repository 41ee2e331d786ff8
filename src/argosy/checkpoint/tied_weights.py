"""Tied weights: what is one tensor on one side and two on the other."""

from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from argosy.checkpoint.format import Entry, text_sums
from argosy.transfer import State, Sums, Unit, add, full_name


def untied(stored: State, entries: Sequence[Entry], live: State) -> tuple[State, Sequence[Entry]]:
    """Where one stored tensor is several here, each of them is a unit that is read from the same place."""
    homes = {name: unit.name for unit in live.units.values() for name in (*unit.aliases, unit.name)}
    units: dict[str, Unit] = {}
    more: list[Entry] = []
    for name, unit in stored.units.items():
        names = (name, *unit.aliases)
        places = list(dict.fromkeys(homes[each] for each in names if each in homes))
        if len(places) > 1:
            aliases = tuple(each for each in unit.aliases if homes.get(each, places[0]) == places[0])
            units |= {place: replace(unit, name=place, aliases=()) for place in places[1:]}
            own = [entry for entry in entries if entry.unit == name]
            more += [replace(e, unit=place, name=full_name(place, e.key)) for place in places[1:] for e in own]
            unit = replace(unit, aliases=aliases)
        units[name] = unit
    return (State(units=units, values=stored.values), [*entries, *more]) if more else (stored, entries)


def tied(stored: State, entries: Sequence[Entry], live: State) -> State:
    """Of stored tensors that are one here and have equal content, one is enough. Others are left, to be refused."""
    homes = {alias: each.name for each in live.units.values() for alias in each.aliases}
    if not homes:
        return stored
    units: dict[str, Unit] = {}
    takers: dict[str, Unit] = {}
    contents = _contents(entries, {*homes, *homes.values()})
    for name, unit in stored.units.items():
        place = homes.get(name, name)
        twin = takers.setdefault(place, unit)
        if twin is unit or not _agree(contents.get(name, {}), contents.get(twin.name, {})):
            units[name] = unit
            continue
        # One of them may be without moments: an optimizer has a tensor once.
        first, second = sorted((twin, unit), key=lambda each: -len(each.members))
        units.pop(second.name, None)
        units[first.name] = takers[place] = replace(first, aliases=(*first.aliases, second.name, *second.aliases))
    return State(units=units, values=stored.values)


def _contents(entries: Sequence[Entry], names: set[str]) -> Mapping[str, dict[str, Sums]]:
    """The sums of each member of these units: they do not depend on how a tensor was cut."""
    found: dict[str, dict[str, Sums]] = {}
    for entry in entries:
        if entry.unit in names:
            sums = found.setdefault(entry.unit, {})
            sums[entry.key] = add([sums.get(entry.key, (0, 0)), *map(text_sums, entry.sums)])
    return found


def _agree(first: Mapping[str, Sums], second: Mapping[str, Sums]) -> bool:
    """Whether two units are equal in what both have, and one has all that the other does."""
    common = set(first) & set(second)
    return len(common) == min(len(first), len(second)) and all(first[key] == second[key] for key in common)
