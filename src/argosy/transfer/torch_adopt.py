"""Take a stored state over into live modules and optimizers: first find places, then make them the live ones."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from argosy.core import ConfigError
from argosy.transfer.layout import replicated
from argosy.transfer.units import Adoption, Member, State, Unit, Value, blocked, full_name

if TYPE_CHECKING:
    from argosy.transfer.torch_state import _Builder


def adopt(live: State, stored: State, builder: "_Builder") -> Adoption:
    """See `State.adopt`."""
    taker = _Taker(live, stored, builder)
    for name in sorted(stored.units):
        taker.take(stored.units[name])
    known = {alias for unit in stored.units.values() for alias in (unit.name, *unit.aliases)}
    missing = sorted(set(live.units) - known - set(taker.places.values()))
    return Adoption(taker.targets, taker.commit, missing, taker.unused)


class _Taker:
    def __init__(self, live: State, stored: State, builder: "_Builder") -> None:
        self.live, self.stored, self.builder = live, stored, builder
        self.targets: dict[str, Member] = {}
        self.created: dict[str, dict[str, Tensor]] = {}
        self.places: dict[str, str] = {}
        self.unused: list[str] = []
        self.loose: dict[str, Tensor] = {}
        self.aliases = {alias: unit.name for unit in live.units.values() for alias in unit.aliases}

    def take(self, unit: Unit) -> None:
        """Find a place for each member of a stored unit."""
        names = (unit.name, *unit.aliases)
        place = next((n for n in names if n in self.live.units), None)
        place = place or next((self.aliases[n] for n in names if n in self.aliases), None)
        if place is None:
            if self._belongs_to_other(unit.name):
                self._take_loose(unit)
            else:
                self.unused += [full_name(unit.name, key) for key in unit.members]
            return
        self.places[unit.name] = place
        here = self.live.units[place]
        for key, member in unit.members.items():
            target = here.members.get(key) or self._create(place, member)
            if target is None:
                self.unused.append(full_name(unit.name, key))
                continue
            fits(full_name(unit.name, key), member, target)
            self.targets[full_name(unit.name, key)] = target

    def _belongs_to_other(self, name: str) -> bool:
        return any(name == other or name.startswith(f"{other}.") for other in self.builder.others)

    def _take_loose(self, unit: Unit) -> None:
        """A tensor of somebody's state_dict that is not there yet: given to its load_state_dict later."""
        from argosy.transfer.torch_state import torch_dtypes

        member = unit.members["value"]
        tensor = torch.empty(member.shape, dtype=torch_dtypes[member.dtype])
        layout = replicated(member.shape, (self.live.rank,))
        self.loose[unit.name] = tensor
        self.targets[unit.name] = Member("value", member.role, member.dtype, layout, tensor)

    def _create(self, place: str, member: Member) -> Member | None:
        """Make an optimizer's tensor that it has not made itself yet."""
        from argosy.transfer.torch_state import NAMES, layout_of, torch_dtypes

        owner = self.builder.owners.get(place)
        if owner is None or member.key in ("parameter", "value"):
            return None
        parameter = self.builder.parameters[place]
        dtype = torch_dtypes[member.dtype]
        if member.kind == "same":
            tensor = torch.zeros_like(parameter.detach(), dtype=dtype)
            layout, part = layout_of(tensor, self.live.size)
        elif member.kind == "blocked":
            layout = blocked(layout_of(parameter, self.live.size)[0], self.builder.blocks[member.key])
            cells = sum(piece.box.cells for piece in layout.by_rank.get(self.live.rank, ()))
            tensor = part = torch.zeros(cells, dtype=dtype)
        else:
            on_device = member.kind != "scalar" or owner[2].get("capturable") or owner[2].get("fused")
            device = parameter.device if on_device else "cpu"
            tensor = torch.zeros(member.shape, dtype=dtype, device=device)
            layout, part = layout_of(tensor, self.live.size)
        self.created.setdefault(place, {})[member.key] = tensor
        return Member(member.key, member.role, NAMES[part.dtype], layout, part, member.kind)

    def commit(self) -> None:
        """Make what was filled the live state. Raises only on a bug: everything was checked before."""
        for stored_name, place in self.places.items():
            owner = self.builder.owners.get(place)
            if owner is not None:
                self._commit_optimizer(self.stored.units[stored_name], place, owner)
        for name, thing in self.builder.others.items():
            if name in self.stored.values:
                content = self._grown(self.stored.values[name])
                if isinstance(thing, torch.Generator):
                    thing.set_state(content)
                elif hasattr(thing, "load_state_dict"):
                    thing.load_state_dict(content)
                elif isinstance(thing, dict):
                    thing.clear()
                    thing.update(content)

    def _commit_optimizer(self, unit: Unit, place: str, owner: tuple[str, Any, dict[str, Any]]) -> None:
        from argosy.transfer.torch_state import from_value

        _, optimizer, group = owner
        parameter = self.builder.parameters[place]
        plain: dict[str, Any] = from_value(unit.options.get("state") or {})
        keys = {key for key in unit.members if key != "parameter"} | set(plain)
        if unit.members or plain:
            if not keys:
                optimizer.state.pop(parameter, None)  # U2: it was absent, so it is again.
            else:
                state = optimizer.state[parameter]
                for key in [key for key in state if key not in keys]:
                    del state[key]
                state.update(self.created.get(place, {}))
                state.update(plain)
        for key, value in unit.options.items():
            if key in group and key != "params":
                _set_option(group, key, from_value(value))

    def _grown(self, value: Value) -> Any:
        """The tree that `_tree` of the description took apart."""
        from argosy.transfer.torch_state import FLOAT

        if isinstance(value, dict):
            if FLOAT in value:
                return float(value[FLOAT])
            if "$tensor" in value:
                name = value["$tensor"]
                found = self.loose.get(name)
                return found if found is not None else self.builder.parameters[name]
            if "$items" in value:
                return {key: self._grown(inner) for key, inner in value["$items"]}
            if "$tuple" in value:
                return tuple(self._grown(inner) for inner in value["$tuple"])
            return {key: self._grown(inner) for key, inner in value.items()}
        return [self._grown(inner) for inner in value] if isinstance(value, list) else value


def _set_option(group: dict[str, Any], key: str, value: Value) -> None:
    old = group[key]
    if isinstance(old, Tensor):
        old.fill_(value)
    else:
        group[key] = tuple(value) if isinstance(old, tuple) else value


def fits(name: str, stored: Member, target: Member) -> None:
    """Check that a stored tensor can be written into a live one.

    Raises:
        ConfigError: shape or dtype differ.
    """
    if stored.shape != target.shape:
        raise ConfigError(f"{name} has shape {list(stored.shape)}, here it is {list(target.shape)}")
    if stored.dtype != target.dtype:
        raise ConfigError(
            f"{name} is {stored.dtype}, here it is {target.dtype}", hint="nothing is cast: convert the model first"
        )
