"""Fit what is stored to what lives here: names, shapes, roles, and where in live memory each stored cell goes."""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.checkpoint.differing import own_first
from argosy.checkpoint.format import Entry
from argosy.checkpoint.gathering import EXCHANGE_TIMEOUT_S
from argosy.checkpoint.prefixes import aligned_names, check_prefixes
from argosy.checkpoint.reading import Step, stored_state
from argosy.checkpoint.tying import tied, untying
from argosy.core import ConfigError
from argosy.transfer import (
    Adoption,
    Layout,
    Made,
    Member,
    Remap,
    Renamed,
    Role,
    State,
    Unit,
    checked_roles,
    full_name,
    parts_by_source,
    referring,
    seen_from_source,
)

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller of `restore` asks for besides the step."""

    rename: Rename | None = None
    remap: Remap | None = None
    """Rules that split, fuse, stack or transpose stored tensors, by the names that `rename` gives them."""
    partial: bool = False
    fresh: bool = False
    roles: Collection[Role] | None = None
    timeout_s: float = EXCHANGE_TIMEOUT_S
    """How long to wait for other ranks."""

    def __post_init__(self) -> None:
        checked_roles(self.roles)
        timeout_s: Any = self.timeout_s
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout_s is a number above 0: {timeout_s!r}")
        remap: Any = self.remap
        if remap is not None and not isinstance(remap, Remap):
            raise ConfigError(f"remap= is a Remap of rules: {remap!r}", hint="Remap((SplitUp(...), ...))")
        rename: Any = self.rename
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise ConfigError(f"rename= is a dict or a function of names: {type(rename).__name__}")


@dataclass(slots=True)
class Fit:
    """Stored boxes under the names of `targets`, whose layouts say where in the memory of `locals` they go."""

    entries: list[Entry]
    targets: dict[str, Member]
    locals: dict[str, Any]
    adoption: Adoption = field(default_factory=lambda: Adoption({}, lambda: None))


def fit(found: Step, live: State, wish: Wish) -> Fit:
    """Find a place for everything that is stored and wanted; nothing is written.

    Raises:
        ConfigError: names, shapes or dtypes do not fit.
    """
    stored, entries = own_first(stored_state(found), found.entries, live)
    renamed = stored
    names = {} if wish.remap is not None else aligned_names(found, stored, live)
    if wish.rename is not None:
        names = _new_names(stored, wish.rename)
    if names:
        entries = [_under_name(entry, names) for entry in entries]
        renamed = _renamed(stored, names)
    renamed = tied(_chosen(renamed, live, wish), entries, live)
    remap = untying(renamed, live, wish.remap)
    mapped, made = (renamed, {}) if remap is None else remapped_state(renamed, remap)
    assert live.adopt is not None
    adoption = live.adopt(mapped)
    _check(adoption, live, wish, _missing(adoption, stored, live))
    targets = adoption.targets if remap is None else _seen(renamed, made, adoption.targets)
    entries = [entry for entry in entries if entry.name in targets]
    return Fit(entries, targets, {name: member.local for name, member in adoption.targets.items()}, adoption)


def _missing(adoption: Adoption, stored: State, live: State) -> list[str]:
    """What is here and was not stored. A rank that was not there then keeps what is its own, as a generator."""
    if not adoption.kept:
        return []
    own = f"rank{live.rank}/"
    of_others = {name.partition("/")[2] for name, unit in stored.units.items() if _is_local(unit)}
    return [name for name in adoption.kept if not (name.startswith(own) and name.removeprefix(own) in of_others)]


def _check(adoption: Adoption, live: State, wish: Wish, missing: list[str]) -> None:
    """Refuse what would leave live state as it was, or begin moments anew, without having been asked."""
    if wish.partial or wish.roles is not None:
        check_prefixes(adoption, live)
        if not wish.partial and (lacking := [name for name in missing if _has_role(name, live, wish)]):
            raise ConfigError(f"not stored: {some(lacking)}", hint="pass partial=True to leave them as they are")
        if live.units and not adoption.targets:
            raise ConfigError(
                f"nothing that is stored has a place here: not {some(adoption.unused) or 'any tensor'}",
                hint="rename them, or ask for other roles",
            )
    elif adoption.unused:
        raise ConfigError(f"no place for stored {some(adoption.unused)}", hint="rename them, or pass partial=True")
    elif missing:
        raise ConfigError(f"not stored: {some(missing)}", hint="pass partial=True to leave them as they are")
    if adoption.bare and not wish.fresh:
        raise ConfigError(
            f"stored without moments, which the optimizer here would begin anew: {some(adoption.bare)}",
            hint="pass fresh=True if that is meant",
        )


def _has_role(name: str, live: State, wish: Wish) -> bool:
    """Whether it is the name of a module's tensor of the wanted roles."""
    unit = live.units.get(name)
    is_of_module = any(name.startswith(prefix) for prefix in live.modules.values()) or not live.modules
    roles = {member.role for member in unit.members.values()} if unit is not None else set[str]()
    return is_of_module and "parameter" in roles & set(wish.roles or ())


def _chosen(renamed: State, live: State, wish: Wish) -> State:
    """Without what other ranks kept for themselves, and of the wanted roles."""
    units = {name: unit for name, unit in renamed.units.items() if not _is_foreign(unit, live)}
    if wish.roles is not None:
        is_bare = not wish.fresh and "parameter" in wish.roles and "moment" not in wish.roles
        if is_bare and any(True for _ in renamed.members({"moment"})):
            raise ConfigError(
                "parameters would be restored without their moments", hint="pass fresh=True if that is meant"
            )
        units = {name: _of_roles(unit, wish.roles) for name, unit in units.items()}
        units = {name: unit for name, unit in units.items() if unit.members}
    return State(units=units, values=renamed.values)


def _of_roles(unit: Unit, roles: Collection[Role]) -> Unit:
    members = {key: member for key, member in unit.members.items() if member.role in roles}
    options = unit.options
    if "moment" not in roles:  # The optimizer here begins anew, as it was made.
        options = {key: value for key, value in options.items() if key == "optimizer"}
    return Unit(unit.name, members, options, unit.aliases)


def _is_foreign(unit: Unit, live: State) -> bool:
    return _is_local(unit) and not unit.name.startswith(f"rank{live.rank}/")


def _is_local(unit: Unit) -> bool:
    return "local" in [member.role for member in unit.members.values()]


def some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _new_names(stored: State, rename: Rename) -> dict[str, str]:
    """Stored units' names and those that they have here."""

    def new(name: str) -> str:
        return rename(name) if callable(rename) else rename.get(name, name)

    aliases = [alias for unit in stored.units.values() for alias in unit.aliases]
    names = {name: new(name) for name in (*stored.units, *aliases)}
    unknown = [] if callable(rename) else sorted(set(rename) - set(names))
    if unknown:
        raise ConfigError(f"rename= names what is not stored: {some(unknown)}", hint=f"stored are {some(list(names))}")
    if len({names[name] for name in stored.units}) != len(stored.units):
        raise ConfigError("rename= gives two stored tensors the same name")
    return names


def _renamed(stored: State, names: Mapping[str, str]) -> State:
    units = [
        Unit(names.get(unit.name, unit.name), unit.members, unit.options, tuple(names.get(a, a) for a in unit.aliases))
        for unit in stored.units.values()
    ]
    values = {names.get(name, name): referring(value, names) for name, value in stored.values.items()}
    return State(units={unit.name: unit for unit in units}, values=values)


def _under_name(entry: Entry, names: Mapping[str, str]) -> Entry:
    new = names.get(entry.unit, entry.unit)
    return entry if new == entry.unit else msgspec.structs.replace(entry, unit=new, name=full_name(new, entry.key))


def remapped_state(stored: State, remap: Remap) -> tuple[State, dict[str, Made]]:
    """The units that rules make of the stored ones, and of what each of their tensors is made.

    What has the parameter's shape goes with it; a scalar (the step) is that of the first.
    """
    used = {name for rule in remap.rules for name in rule.olds}
    result = State(values=stored.values)
    found: dict[str, Made] = {}
    for rule in (*remap.rules, *(Renamed(name, name) for name in stored.units if name not in used)):
        if any(old not in stored.units for old in rule.olds):
            raise ConfigError(f"a rule names tensors that are not stored: {', '.join(rule.olds)}")
        first = stored.units[rule.olds[0]]
        keep = isinstance(rule, Renamed)
        news = [""]
        for key in sorted(first.members, key=lambda key: first.members[key].kind != "same"):
            member = first.members[key]
            if member.kind == "same" or keep:
                shapes = {old: _member(stored, old, key).shape for old in rule.olds}
                made = rule.made(shapes)
                news = list(made)
            elif member.kind == "scalar":
                one = Renamed(first.name, "").made({first.name: member.shape})[""]
                made = dict.fromkeys(news, one)
            else:
                raise ConfigError(f"{full_name(first.name, key)} is {member.kind}: only a rename can move it")
            for new, each in made.items():
                if full_name(new, key) in found:
                    raise ConfigError(f"two rules make the same tensor: {full_name(new, key)}")
                aliases = first.aliases if keep else ()
                unit = result.units.setdefault(new, Unit(new, {}, first.options, aliases))
                layout = Layout(each.shape, ())
                unit.members[key] = Member(key, member.role, member.dtype, layout, None, member.kind)
                parts = tuple(msgspec.structs.replace(p, source=full_name(p.source, key)) for p in each.parts)
                found[full_name(new, key)] = Made(each.shape, parts)
    return result, found


def _member(stored: State, unit: str, key: str) -> Member:
    member = stored.units[unit].members.get(key)
    if member is None:
        raise ConfigError(f"{unit} has no {key}, which goes with it into another tensor")
    return member


def _seen(renamed: State, made: Mapping[str, Made], targets: Mapping[str, Member]) -> dict[str, Member]:
    """The live memory in the index spaces of the stored tensors."""
    layouts = {name: member.layout for name, member in targets.items()}
    parts = parts_by_source(made)
    found: dict[str, Member] = {}
    for name, _, member in renamed.members():
        layout = seen_from_source(member.shape, parts.get(name, []), layouts)
        if layout.pieces:
            found[name] = Member(member.key, member.role, member.dtype, layout, None, member.kind)
    return found
