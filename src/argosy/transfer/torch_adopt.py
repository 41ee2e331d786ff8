"""Take a stored state over into live modules and optimizers: first find places, then make them the live ones."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from argosy.core import ConfigError
from argosy.transfer.layout import replicated
from argosy.transfer.units import Adoption, Member, State, Unit, Value, blocked, full_name

if TYPE_CHECKING:
    from argosy.transfer.torch_state import _Builder


_ADAM = frozenset({"step", "exp_avg", "exp_avg_sq"})
STATES = {
    "SGD": frozenset({"momentum_buffer"}), "Muon": frozenset({"momentum_buffer"}),
    "Adam": _ADAM | {"max_exp_avg_sq"}, "AdamW": _ADAM | {"max_exp_avg_sq"}, "RAdam": _ADAM, "SparseAdam": _ADAM,
    "NAdam": _ADAM | {"mu_product"}, "Adamax": frozenset({"step", "exp_avg", "exp_inf"}),
    "RMSprop": frozenset({"step", "square_avg", "momentum_buffer", "grad_avg"}),
    "Adagrad": frozenset({"step", "sum"}), "Adadelta": frozenset({"step", "square_avg", "acc_delta"}),
    "Rprop": frozenset({"step", "prev", "step_size"}), "ASGD": frozenset({"step", "eta", "mu", "ax"}),
    "Adafactor": frozenset({"step", "row_var", "col_var", "variance"}),
}  # fmt: skip
"""What torch's own optimizers keep of a parameter. Of others nobody can tell before they have made it."""


def adopt(live: State, stored: State, builder: "_Builder") -> Adoption:
    """See `State.adopt`."""
    taker = _Taker(live, stored, builder)
    for name, thing in builder.others.items():
        if hasattr(thing, "state_dict") and not hasattr(thing, "load_state_dict"):
            raise ConfigError(f"{name} cannot be restored into: a {type(thing).__name__} has no load_state_dict")
    for name in sorted(stored.units):
        taker.take(stored.units[name])
    missing = set(live.units) - taker.filled
    return Adoption(taker.targets, taker.commit, sorted(missing | taker.missing_values()), taker.unused, taker.bare())


class _Taker:
    def __init__(self, live: State, stored: State, builder: "_Builder") -> None:
        self.live, self.stored, self.builder = live, stored, builder
        self.targets: dict[str, Member] = {}
        self.created: dict[str, dict[str, Tensor]] = {}
        self.places: dict[str, str] = {}
        self.takers: dict[str, str] = {}
        self.filled: set[str] = set()
        self.unused: list[str] = []
        self.loose: dict[str, Tensor] = {}
        self.aliases = {alias: unit.name for unit in live.units.values() for alias in unit.aliases}

    def take(self, unit: Unit) -> None:
        """Find a place for each member of a stored unit."""
        names = (unit.name, *unit.aliases)
        place = next((n for n in names if n in self.live.units), None)
        place = place or next((self.aliases[n] for n in names if n in self.aliases), None)
        if place is None:
            if "value" in unit.members and self._belongs_to_other(unit.name):
                self._take_loose(unit)
            else:
                self.unused += [full_name(unit.name, key) for key in unit.members]
            return
        twin = self.takers.setdefault(place, unit.name)
        if twin != unit.name:
            raise ConfigError(
                f"{twin} and {unit.name} are one tensor here, but were stored as two that differ",
                hint="untie them here, or rename= one of them to nothing that is here, with partial=True",
            )
        self.places[unit.name] = place
        here = self.live.units[place]
        for key, member in unit.members.items():
            self._check_kind(unit.name, key, place)
            target = here.members.get(key) or self._create(place, member)
            if target is None:
                self.unused.append(full_name(unit.name, key))
                continue
            fits(full_name(unit.name, key), member, target)
            self.targets[full_name(unit.name, key)] = target
            if key in ("parameter", "value"):
                self.filled.add(place)

    def _check_kind(self, name: str, key: str, place: str) -> None:
        """Refuse what the optimizer here does not know.

        Raises:
            ConfigError: it is the state of another kind of optimizer.
        """
        owner = self.builder.owners.get(place)
        kind = type(owner[1]) if owner is not None else None
        if kind is None or key == "parameter" or not kind.__module__.startswith("torch.optim."):
            return
        if key not in STATES.get(kind.__name__, {key}):
            raise ConfigError(
                f"{full_name(name, key)} was stored, which {kind.__name__} does not know: "
                f"it keeps {', '.join(sorted(STATES[kind.__name__]))}",
                hint='make the optimizer that was saved, or pass roles={"parameter", "buffer"}, fresh=True',
            )

    def missing_values(self) -> set[str]:
        """Others that are here and were not stored, and have no tensors by which that would be known."""
        return set(self.builder.others) - set(self.stored.values) - self.builder.with_tensors

    def bare(self) -> list[str]:
        """Parameters of optimizers that were stored without one; where some have one, only those that would lose
        moments: a parameter may have been frozen when it was saved."""
        stored = self.stored.units
        found = [
            place
            for name, place in self.places.items()
            if place in self.builder.owners
            and "optimizer" not in stored[name].options
            and not set(stored[name].members) - {"parameter"}
        ]
        if any("optimizer" in unit.options for unit in stored.values()):
            found = [place for place in found if set(self.live.units[place].members) - {"parameter"}]
        return sorted(found)

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
                elif isinstance(thing, list):
                    thing[:] = content
                elif isinstance(home := self.builder.home, dict) and not isinstance(thing, Tensor | np.ndarray):
                    home[name if name in home else name.partition("/")[2]] = content

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
