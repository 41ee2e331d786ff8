"""Fit what is stored to what lives here: names, shapes, roles, and where in live memory each stored cell goes."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.checkpoint.format import Entry
from argosy.checkpoint.module_names import aligned_names, check_prefixes
from argosy.checkpoint.per_rank_values import own_first, owner_of
from argosy.checkpoint.rank_exchange import EXCHANGE_TIMEOUT_S
from argosy.checkpoint.remap import Remap, remapped
from argosy.checkpoint.step_index import Step, stored_state
from argosy.checkpoint.tied_weights import tied, untied
from argosy.core import ConfigError
from argosy.transfer import (
    Adoption,
    Member,
    Role,
    State,
    Unit,
    checked_roles,
    full_name,
    referring,
)

Rename = Mapping[str, str] | Callable[[str], str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller of `restore` asks for besides the step."""

    rename: Rename | None = None
    remap: Remap | None = None
    """Makes other tensors of the stored ones, by the names that `rename` gives them; see `remap.py`."""
    partial: bool = False
    fresh: bool = False
    roles: Collection[Role] | None = None
    own: Sequence[Any] = ()
    """Parameters of which each rank has its own, as `Saver` was told."""
    timeout_s: float = EXCHANGE_TIMEOUT_S
    """How long to wait for other ranks."""

    def __post_init__(self) -> None:
        checked_roles(self.roles)
        timeout_s: Any = self.timeout_s
        if not isinstance(timeout_s, int | float) or not timeout_s > 0:
            raise ConfigError(f"timeout_s is a number above 0: {timeout_s!r}")
        remap: Any = self.remap
        if remap is not None and not callable(remap):
            raise ConfigError(f"remap= is a function from tensors by name to tensors by name: {remap!r}")
        rename: Any = self.rename
        if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
            raise ConfigError(f"rename= is a dict or a function of names: {type(rename).__name__}")


@dataclass(slots=True)
class Fit:
    """Stored boxes under the names of `targets`, whose layouts say where in live memory they go."""

    entries: list[Entry]
    targets: dict[str, Member]
    adoption: Adoption = field(default_factory=lambda: Adoption({}, lambda: None))
    sources: dict[str, Any] = field(default_factory=dict[str, Any])
    """Instead of boxes: the whole tensors that a user's function made."""


def fit(found: Step, live: State, wish: Wish, tensors: Mapping[str, Any] | None = None) -> Fit:
    """Find a place for everything that is stored and wanted; nothing is written.

    `tensors` are all that are stored, by their stored names: `wish.remap` needs them.

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
    renamed, entries = untied(renamed, entries, live)
    mapped, sources = renamed, dict[str, Any]()
    if wish.remap is not None and tensors is not None:
        mapped = remapped(renamed, _by_name(found.entries, entries, tensors), wish.remap)
        sources = {name: member.local for name, _, member in mapped.members()}
    assert live.adopt is not None
    adoption = live.adopt(mapped)
    _check(adoption, live, wish, _missing(adoption, stored, live))
    entries = [entry for entry in entries if entry.name in adoption.targets]
    return Fit(entries, adoption.targets, adoption, sources)


def _by_name(stored: Sequence[Entry], entries: Sequence[Entry], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """Stored tensors by the names that their entries have got."""

    def place(entry: Entry) -> tuple[Any, ...]:
        return entry.file, entry.offset, entry.key, entry.dtype, entry.shape

    names = {place(entry): entry.name for entry in stored}
    return {entry.name: tensors[names[place(entry)]] for entry in entries}


def _missing(adoption: Adoption, stored: State, live: State) -> list[str]:
    """What is here and was not stored. A rank that was not there then keeps what is its own, as a generator."""
    if not adoption.kept:
        return []
    own = f"rank{live.rank}/"
    of_others = {name.partition("/")[2] for name, unit in stored.units.items() if _is_local(unit)}
    return [name for name in adoption.kept if not (name.startswith(own) and name.removeprefix(own) in of_others)]


def _check(adoption: Adoption, live: State, wish: Wish, missing: list[str]) -> None:
    """Refuse to leave live state as it was, or to begin moments again, unless the caller asked for it."""
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
            f"stored without moments, which the optimizer here would start from zero: {some(adoption.bare)}",
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
    if "moment" not in roles:  # The optimizer here stays as it was made.
        options = {key: value for key, value in options.items() if key == "optimizer"}
    return Unit(unit.name, members, options, unit.aliases)


def _is_foreign(unit: Unit, live: State) -> bool:
    """Whether it is another rank's own. Parameters of a rank that is not there any more have no place."""
    rank = owner_of(unit.name)
    return rank is not None and rank != live.rank and (rank < live.size or _is_local(unit))


def _is_local(unit: Unit) -> bool:
    return "local" in [member.role for member in unit.members.values()]


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
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
