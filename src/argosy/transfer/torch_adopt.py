"""Take a stored state over into live modules and optimizers: first find places, then make them the live ones."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import re
from collections.abc import Iterable
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from argosy.core import ConfigError
from argosy.transfer.layout import blocked, replicated
from argosy.transfer.torch_inner import Owner
from argosy.transfer.torch_values import from_value
from argosy.transfer.torch_whole import Whole
from argosy.transfer.torch_wrapped import is_dtensor, rebuilt
from argosy.transfer.trees import grown, holds_values
from argosy.transfer.units import WRAPPED_NOTE, Adoption, Member, State, Unit, Value, full_name, why_fixed

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
ANOTHER_OPTIMIZER = 'make the optimizer that was saved, or pass roles={"parameter", "buffer"}, fresh=True'
NOTHING = object()
TENSOR = {"parameter", "value"}
"""What a unit has its name from. Files of others do not say which is a buffer, so either goes into either."""
LOCAL = re.compile(r"rank\d+/")
NO_OPTIONS = {"params", "param_names", "optimizer", "class", WRAPPED_NOTE}
"""What is said of a parameter's group besides its options."""


@torch.inference_mode(False)  # What is made here is trained later, wherever it is made.
def adopt(live: State, stored: State, builder: "_Builder") -> Adoption:
    """See `State.adopt`."""
    taker = _Taker(live, stored, builder)
    for name, thing in builder.others.items():
        if isinstance(thing, Whole):
            thing.check(stored.values.get(name))
        if hasattr(thing, "state_dict") and not hasattr(thing, "load_state_dict"):
            raise ConfigError(f"{name} cannot be restored into: a {type(thing).__name__} has no load_state_dict")
    for name in sorted(stored.units):
        taker.take(stored.units[name])
    taker.contents = {name: taker.content(name) for name in builder.others}
    for name, thing in builder.others.items():
        _check_container(name, thing, taker.contents[name])
    missing = set(live.units) - taker.filled
    unused = [*taker.unused, *taker.unused_values()]
    kept = sorted(missing | taker.missing_values())
    return Adoption(taker.targets, taker.commit, kept, unused, taker.bare(), taker.fresh, taker.merged)


class _Taker:
    def __init__(self, live: State, stored: State, builder: "_Builder") -> None:
        self.live, self.stored, self.builder = live, stored, builder
        self.targets: dict[str, Member] = {}
        self.created: dict[str, dict[str, Tensor]] = {}
        self.places: dict[str, str] = {}
        self.homes: dict[str, str] = {}
        """The live names of stored tensors, also by their other names."""
        self.takers: dict[str, str] = {}
        self.filled: set[str] = set()
        self.unused: list[str] = []
        self.loose: dict[str, Tensor] = {}
        self.fresh: set[str] = set()
        self.options: dict[tuple[int, str], Value] = {}
        """Options that groups have taken over."""
        self.merged: list[str] = []
        self.contents: dict[str, Any] = {}
        self.loaders = [name for name, thing in builder.others.items() if hasattr(thing, "load_state_dict")]
        self.aliases = {alias: unit.name for unit in live.units.values() for alias in unit.aliases}

    def take(self, unit: Unit) -> None:
        """Find a place for each member of a stored unit."""
        names = (unit.name, *unit.aliases) if unit.aliases else (unit.name,)
        place = unit.name if unit.name in self.live.units else self._place_of(names)
        if place is None:
            if TENSOR & set(unit.members) and any(self._belongs_to_other(n, of=self.builder.others) for n in names):
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
        for name in names:
            self.homes[name] = place
        here = self.live.units[place]
        if not TENSOR & set(here.members):  # What a further optimizer keeps of a parameter.
            self.filled.add(place)
        if unit.options and here.options:
            self._check_class(unit, here)
        for key, member in unit.members.items():
            if key not in TENSOR and key not in here.members:
                self._check_kind(unit.name, key, place)
            name = full_name(unit.name, key)
            target = here.members.get(key) or self._alike(here, key)
            if target is None and (target := self._create(unit, place, member)) is not None:
                self.fresh.add(name)
            if target is None:
                self.unused.append(name)
                continue
            if target.layout.shape != member.layout.shape and self._belongs_to_other(unit.name, of=self.loaders):
                self._take_loose(unit)  # A buffer of samples that has grown: its load_state_dict knows.
                self.filled.add(place)
                continue
            fits(name, member, target)
            if target.local is None or (why := why_fixed(self.builder.arrays.get(place, target.local))) is None:
                self.targets[name] = target
            elif self._belongs_to_other(unit.name, of=self.loaders):
                self._take_loose(unit)
            else:
                raise ConfigError(f"{name} cannot be restored into: {why}", hint="restore into a copy of it")
            if key in TENSOR:
                self.filled.add(place)
        if WRAPPED_NOTE in unit.options:
            self._wrap(unit, place)

    def _place_of(self, names: Iterable[str]) -> str | None:
        """The live unit that a stored one of these names goes to."""
        known = next((name for name in names if name in self.live.units), None)
        return known or next((self.aliases[name] for name in names if name in self.aliases), None)

    def _alike(self, here: Unit, key: str) -> Member | None:
        """The tensor itself, where it is stored as a buffer and is a parameter here, or the other way round."""
        return next((here.members[each] for each in TENSOR if each in here.members), None) if key in TENSOR else None

    def _check_class(self, unit: Unit, here: Unit) -> None:
        """Refuse what another class of optimizers made: it may have the same names and not mean the same.

        Raises:
            ConfigError: the classes share none that says what the state means.
        """
        then, now = unit.options.get("class") or (), here.options.get("class") or ()
        if then and now and then != now and not set(then) & set(now):
            raise ConfigError(
                f"{unit.name} was saved with {then[0]}, here its optimizer is {now[0]}", hint=ANOTHER_OPTIMIZER
            )

    def _check_kind(self, name: str, key: str, place: str) -> None:
        """Refuse what the optimizer here does not know.

        Raises:
            ConfigError: it is the state of another kind of optimizer.
        """
        owner = self.builder.owners.get(place)
        kind = type(owner.holder) if owner is not None else None
        if kind is None or not f"{kind.__module__}.".startswith("torch.optim."):
            return
        if key.partition(".")[0] not in STATES.get(kind.__name__, {key.partition(".")[0]}):
            raise ConfigError(
                f"{full_name(name, key)} was stored, which {kind.__name__} does not know: "
                f"it keeps {', '.join(sorted(STATES[kind.__name__]))}",
                hint=ANOTHER_OPTIMIZER,
            )

    def missing_values(self) -> set[str]:
        """Others that are here and were not stored, and have no tensors by which that would be known."""
        others = set(self.builder.others) - set(self.stored.values) - self.builder.with_tensors
        taken = {*self.loose, *self.homes}
        return {name for name in others if not any(self._belongs_to_other(each, of=[name]) for each in taken)}

    def unused_values(self) -> list[str]:
        """What was stored that is no tensor, and has no place here."""
        own = f"rank{self.live.rank}/"
        return [
            name
            for name in self.stored.values
            if name not in self.live.values
            and (not LOCAL.match(name) or name.startswith(own))
            and name != "$config"
            and holds_values(self.stored.values[name])
        ]

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

    def _belongs_to_other(self, name: str, of: Iterable[str]) -> bool:
        return any(name == other or name.startswith(f"{other}.") for other in of)

    def _take_loose(self, unit: Unit) -> None:
        """A tensor of somebody's state_dict that is not there yet: given to its load_state_dict later."""
        from argosy.transfer.torch_state import torch_dtypes

        member = next(unit.members[key] for key in TENSOR if key in unit.members)
        tensor = torch.empty(member.shape, dtype=torch_dtypes[member.dtype], device="cpu")
        self.fresh.add(unit.name)
        layout = replicated(member.shape, (self.live.rank,))
        self.loose |= dict.fromkeys((unit.name, *unit.aliases), tensor)
        self.targets[unit.name] = Member("value", member.role, member.dtype, layout, tensor)

    def _wrap(self, unit: Unit, place: str) -> None:
        """Make tensors that consist of others of those that were made for it."""
        made = self.created.get(place, {})
        for key, note in unit.options[WRAPPED_NOTE].items():
            keys = {part: f"{key}.{part}" for part in note["parts"]}
            if not all(each in made for each in keys.values()):
                self._check_context(unit, place, key)
                continue
            parts = {part: _part(made.pop(each)) for part, each in keys.items()}
            parameter = self.builder.parameters[place].detach()
            shape = _part(parameter).shape
            whole = rebuilt(full_name(unit.name, key), note, parts, shape)
            if is_dtensor(parameter):
                from torch.distributed.tensor import DTensor

                mesh, cuts = parameter.device_mesh, parameter.placements
                size, stride = parameter.shape, parameter.stride()
                whole = DTensor.from_local(whole, mesh, cuts, run_check=False, shape=size, stride=stride)
            made[key] = whole

    def _check_context(self, unit: Unit, place: str, key: str) -> None:
        """See to it that a tensor that consists of others means the same as the stored one."""
        then = unit.options[WRAPPED_NOTE][key]
        now = self.live.units[place].options.get(WRAPPED_NOTE, {}).get(key, then)
        if then["context"] != now["context"]:
            name = full_name(unit.name, key)
            raise ConfigError(
                f"{name} was stored as {then['class']} of {then['context']}, here it is of {now['context']}"
            )

    def _create(self, unit: Unit, place: str, member: Member) -> Member | None:
        """Make an optimizer's tensor that it has not made itself yet."""
        from argosy.transfer.torch_state import NAMES, layout_of, torch_dtypes

        owner = self.builder.owners.get(place)
        if owner is None or member.key in TENSOR:
            return None
        parameter = self.builder.parameters[place]
        dtype = torch_dtypes[member.dtype]
        if owner.rank is not None and owner.rank != self.live.rank:
            shape = tuple(parameter.shape) if member.kind == "same" else member.shape
            return Member(member.key, member.role, member.dtype, replicated(shape, (owner.rank,)), None, member.kind)
        if member.kind == "same":
            tensor = torch.empty_like(parameter.detach(), dtype=dtype)
            layout, part = layout_of(tensor, self.live.size)
        elif member.kind == "blocked":
            outer, _, part = member.key.rpartition(".")
            size = unit.options[WRAPPED_NOTE][outer]["blocks"][part]
            layout = blocked(layout_of(parameter, self.live.size)[0], size)
            cells = sum(piece.box.cells for piece in layout.by_rank.get(self.live.rank, ()))
            tensor = part = torch.zeros(cells, dtype=dtype, device=parameter.device)
        else:
            on_device = member.kind != "scalar" or owner.group.get("capturable") or owner.group.get("fused")
            device = parameter.device if on_device else "cpu"
            tensor = torch.zeros(member.shape, dtype=dtype, device=device)
            layout, part = layout_of(tensor, self.live.size)
        self.created.setdefault(place, {})[member.key] = tensor
        if owner.rank is not None:
            layout = replicated(tuple(tensor.shape), (owner.rank,))
        return Member(member.key, member.role, NAMES[part.dtype], layout, part, member.kind)

    def commit(self) -> None:
        """Make what was filled the live state."""
        for stored_name, place in self.places.items():
            owner = self.builder.owners.get(place)
            if owner is not None:
                self._commit_optimizer(self.stored.units[stored_name], place, owner)
        for name, thing in self.builder.others.items():
            content = self.contents[name]
            if content is not NOTHING:
                if isinstance(thing, torch.Generator):
                    thing.set_state(content)
                elif hasattr(thing, "load_state_dict"):
                    _load(name, thing, content)
                elif isinstance(thing, dict):
                    thing.clear()
                    thing.update(content)
                elif isinstance(thing, list):
                    thing[:] = content
                elif isinstance(home := self.builder.home, dict) and not isinstance(thing, Tensor | np.ndarray):
                    home[name if name in home else name.partition("/")[2]] = content

    def _commit_optimizer(self, unit: Unit, place: str, owner: Owner) -> None:
        group = owner.group
        parameter = self.builder.parameters[place]
        plain: dict[str, Any] = from_value(unit.options.get("state") or {})
        wrapped = unit.options.get(WRAPPED_NOTE, {})
        parts = {f"{key}.{part}" for key, note in wrapped.items() for part in note["parts"]}
        keys = ({key for key in unit.members if key != "parameter"} - parts) | set(plain) | set(wrapped)
        if (unit.members or plain) and owner.rank in (None, self.live.rank):
            if not keys:
                owner.holder.state.pop(parameter, None)  # U2: it was absent, so it is again.
            else:
                state = owner.holder.state[parameter]
                for key in [key for key in state if key not in keys]:
                    del state[key]
                state.update(self.created.get(place, {}))
                state.update(plain)
        for key, value in unit.options.items():
            is_own = key == "decoupled_weight_decay" and isinstance(owner.holder, torch.optim.AdamW)
            if key not in NO_OPTIONS and not is_own:  # As torch, where Adam's comes into AdamW.
                _set_option(group, key, from_value(value))
                what = f"{key} of {owner.title}"
                if self.options.setdefault((id(group), key), value) != value and what not in self.merged:
                    self.merged.append(what)

    def content(self, name: str) -> Any:
        """What one of `others` takes over, if anything: of others' files tensors may be known that are in no value."""
        if name in self.stored.values:
            return grown(self.stored.values[name], self._tensor)
        here = grown(self.live.values[name], self._tensor)
        dot = f"{name}."
        names = [each for unit in self.stored.units.values() for each in (unit.name, *unit.aliases)]
        flat = {each.removeprefix(dot): self._tensor(each) for each in names if each.startswith(dot)}
        return here | flat if flat and isinstance(here, dict) else NOTHING

    def _tensor(self, name: str) -> Any:
        """A stored tensor in the live memory that it filled, as an array if it is one here."""
        home = self.homes.get(name, name)
        array, loose = self.builder.arrays.get(home), self.loose.get(name)
        if loose is None:
            return self.builder.parameters[home] if array is None else array
        return loose if array is None else loose.numpy()


def _check_container(name: str, thing: Any, content: Any) -> None:
    """Refuse what cannot be put into what is here.

    Raises:
        ConfigError: it is of another kind.
    """
    if content is NOTHING or isinstance(thing, torch.Generator) or hasattr(thing, "load_state_dict"):
        return
    pairs: list[tuple[Any, Any]] = [(dict, dict), (list, (list, tuple)), ((Tensor, np.ndarray), (Tensor, np.ndarray))]
    for kind, wanted in pairs:
        if isinstance(thing, kind) and not isinstance(content, wanted):
            raise ConfigError(
                f"{name} was stored as a {type(content).__name__}, here it is a {type(thing).__name__}",
                hint="give it the kind that it had, or another name with partial=True",
            )


def _load(name: str, thing: Any, content: Any) -> None:
    try:
        thing.load_state_dict(content)
    except Exception as error:
        raise ConfigError(
            f"{name}: its load_state_dict refused what was stored: {type(error).__name__}: {error}",
            hint="tensors were written before: what was restored is not whole, and must not be used",
        ) from error


def _part(tensor: Any) -> Any:
    """This rank's part of a tensor."""
    return getattr(tensor, "_local_tensor", tensor)


def _set_option(group: dict[str, Any], key: str, value: Value) -> None:
    group[key] = _alike(group.get(key), value)


def _alike(old: Any, value: Any) -> Any:
    """A value with tuples and tensors where the old one has them: JSON knows none."""
    if isinstance(old, Tensor):
        return old.fill_(value)
    if not isinstance(value, list):
        return value
    olds: list[Any] = list(old) if isinstance(old, list | tuple) else []
    items = [_alike(before, each) for before, each in zip_longest(olds[: len(value)], value)]
    return tuple(items) if isinstance(old, tuple) else items


def fits(name: str, stored: Member, target: Member) -> None:
    """Check that a stored tensor can be written into a live one.

    Raises:
        ConfigError: shape or dtype differ.
    """
    if stored.layout.shape != target.layout.shape:
        raise ConfigError(f"{name} has shape {list(stored.shape)}, here it is {list(target.shape)}")
    if stored.dtype != target.dtype:
        raise ConfigError(
            f"{name} is {stored.dtype}, here it is {target.dtype}", hint="nothing is cast: convert the model first"
        )
