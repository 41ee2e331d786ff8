"""What a run must not lose: modules, optimizers and others, as named tensors and values.

T1  A capsule of a rank, adopted by the same rank of another generation, gives the same bits.
T2  Adopting writes into the tensors that are there: whoever holds them (DDP, a compiled graph) goes on with them.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import copy
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.core import ConfigError
from argosy.train.ledger import Ledger
from argosy.train.ownership import Declared, Ownership, find_owned

SMALL_BYTES = 1 << 20
"""The state_dict of something else than a module or optimizer is copied at each step if its tensors are no larger."""


_PLAIN = (int, float, str, bytes, type(None))


class Ref(NamedTuple):
    """Stands for a tensor in a tree of values."""

    name: str


class Capsule(NamedTuple):
    """State as named tensors, this rank's part of each, and the values around them."""

    tensors: dict[str, Tensor]
    values: dict[str, Any]


class Tracked:
    """The things that `track` was told of, by name."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.declared = Declared()
        self._homes: list[tuple[str, dict[str, Tensor | None], str]] | None = None
        """Of each buffer: its name, and where its module keeps it. Modules are looked through once, not every step."""
        self._parts: list[Tensor] | None = None
        self._extras: list[tuple[str, nn.Module]] = []
        """The modules with extra state; found together with the buffers."""

    def add(self, name: str, thing: Any) -> None:
        """Take care of a thing from now on.

        Raises:
            ConfigError: the name or the thing is tracked already, or it has no state to keep.
        """
        for known, other in self.all():
            if known == name or other is thing:
                raise ConfigError(
                    f"{name} is tracked already" + (f", as {known}" if known != name else ""),
                    hint="give each thing to run.track once, under a name of its own",
                )
        if isinstance(thing, nn.Module):
            self.modules[name], self._homes, self._parts = thing, None, None
        elif isinstance(thing, torch.optim.LBFGS):
            raise ConfigError(f"{name} cannot be tracked: LBFGS evaluates the model several times in one step")
        elif isinstance(thing, Optimizer):
            self.optimizers[name] = thing
        elif hasattr(thing, "state_dict") and hasattr(thing, "load_state_dict"):
            self.others[name] = thing
        else:
            raise ConfigError(
                f"{name} cannot be tracked: a {type(thing).__name__} has no state_dict and load_state_dict",
                hint="keep plain counters in run.state",
            )

    def all(self) -> Iterator[tuple[str, Any]]:
        yield from self.modules.items()
        yield from self.optimizers.items()
        yield from self.others.items()

    def check_optimizers(self) -> None:
        """Refuse an optimizer whose parameters no tracked module has: they would not be saved.

        Raises:
            ConfigError: there is one.
        """
        known = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        for name, optimizer in self.optimizers.items():
            loose = sum(id(p) not in known for group in optimizer.param_groups for p in group["params"])
            if loose:
                raise ConfigError(
                    f"{loose} parameters of {name} belong to no tracked module", hint="track the module as well"
                )

    def has_to_do_with(self, optimizer: Optimizer) -> bool:
        """Whether an optimizer that is not tracked changes what is, or is the only one there is."""
        known = {id(parameter) for module in self.modules.values() for parameter in module.parameters()}
        return not self.optimizers or any(id(p) in known for group in optimizer.param_groups for p in group["params"])

    def named(self) -> dict[str, Tensor]:
        """Every parameter by its name."""
        return {
            f"{name}/p/{key}": parameter
            for name, module in self.modules.items()
            for key, parameter in module.named_parameters()
        }

    def parameters(self) -> dict[str, Tensor]:
        """This rank's part of every parameter."""
        return {name: local(parameter) for name, parameter in self.named().items()}

    def versions(self) -> list[int]:
        """How often each parameter was written, as torch counts: what writes past torch is not seen."""
        if self._parts is None:
            self._parts = list(self.parameters().values())
        return [part._version for part in self._parts]

    def ownership(self, size: int) -> Ownership:
        """Which parameters each of `size` ranks has for itself."""
        trained = {id(p) for each in self.optimizers.values() for group in each.param_groups for p in group["params"]}
        return find_owned(self.modules, trained, self.declared.find(self.modules), size)

    def buffers(self) -> dict[str, Tensor]:
        """What forward passes change, each rank in its own way."""
        if self._homes is None:
            self._homes = [
                (f"{name}/b/{path}{'.' if path else ''}{key}", part._buffers, key)
                for name, module in self.modules.items()
                for path, part in module.named_modules()
                for key in part._buffers
            ]
            self._extras = [
                (f"{name}/x/{path}", part)
                for name, module in self.modules.items()
                for path, part in module.named_modules()
                if type(part).get_extra_state is not nn.Module.get_extra_state
            ]
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, home, key in self._homes:
            buffer = home.get(key)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = local(buffer)
        return found

    def _states(self, *, changing: bool = False) -> Iterator[tuple[str, Any]]:
        """What each other thing says in its state_dict, and each module as its extra state."""
        for name, other in self.others.items():
            yield name, other.changing() if changing and isinstance(other, Ledger) else other.state_dict()
        yield from ((name, part.get_extra_state()) for name, part in self._extras)

    def capture(self) -> Capsule:
        """All of it, as it is: the tensors are the live ones."""
        self._homes = None
        tensors, values = {**self.parameters(), **self.buffers()}, dict[str, Any]()
        for name, optimizer in self.optimizers.items():
            values[name] = _optimizer_values(name, optimizer, tensors)
        for name, state in self._states():
            values[name] = take_apart(f"{name}/o", state, tensors)
        return Capsule(tensors, values)

    def capture_light(self) -> Capsule:
        """A copy of what may change before a step is decided: buffers, and small states of others."""
        tensors, values = self.buffers(), dict[str, Any]()
        for name, state in self._states(changing=True):
            found: dict[str, Tensor] = {}
            value = take_apart(f"{name}/o", state, found)
            if sum(tensor.nbytes for tensor in found.values()) <= SMALL_BYTES:
                values[name] = value
                tensors.update(found)
        return Capsule({name: tensor.clone() for name, tensor in tensors.items()}, values)

    def adopt(self, capsule: Capsule) -> None:
        """Take a capsule's state over, as far as it has some."""
        live = {**self.parameters(), **self.buffers()}
        with torch.no_grad():
            for name, tensor in live.items():
                if name in capsule.tensors:
                    tensor.copy_(capsule.tensors[name])
            for name, optimizer in self.optimizers.items():
                if name in capsule.values:
                    _adopt_optimizer(optimizer, capsule.values[name], capsule.tensors)
        for name, other in self.others.items():
            if name in capsule.values:
                other.load_state_dict(put_together(capsule.values[name], capsule.tensors))
        for name, part in self._extras:
            if name in capsule.values:
                part.set_extra_state(put_together(capsule.values[name], capsule.tensors))

    def settle(self) -> None:
        """After an attempt that was broken off: nothing of it is left in scalers and FSDP2's pipelines (rule 9)."""
        for other in self.others.values():
            if isinstance(other, torch.amp.GradScaler) and other.is_enabled():  # One that is off has no such states.
                cast(Any, other)._per_optimizer_states.clear()
        for module in self.modules.values():
            if hasattr(module, "reset_iter_state"):
                cast(Any, module).reset_iter_state()


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without its gradient's history."""
    found = tensor.detach()
    return cast(Any, found).to_local() if hasattr(found, "to_local") else found


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in row-major order."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu().numpy().data


def take_apart(name: str, tree: Any, tensors: dict[str, Tensor]) -> Any:
    """Put the tensors of a tree into `tensors`, and return the rest with references to them."""
    if isinstance(tree, Tensor):
        tensors[name] = local(tree)
        return Ref(name)
    if isinstance(tree, Mapping):
        return {key: take_apart(f"{name}.{key}", value, tensors) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        parts = [take_apart(f"{name}.{number}", value, tensors) for number, value in enumerate(tree)]
        return parts if isinstance(tree, list) else tuple(parts)
    return tree if isinstance(tree, _PLAIN) else copy.deepcopy(tree)


def put_together(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The tree that was taken apart, with copies of its tensors."""
    if isinstance(value, Ref):
        return tensors[value.name].clone()
    if isinstance(value, dict):
        return {key: put_together(inner, tensors) for key, inner in cast("dict[Any, Any]", value).items()}
    if isinstance(value, list | tuple):
        parts = [put_together(inner, tensors) for inner in cast("list[Any]", value)]
        return parts if isinstance(value, list) else tuple(parts)
    return value


def _numbered(optimizer: Optimizer) -> Iterator[tuple[str, Tensor]]:
    for number, group in enumerate(optimizer.param_groups):
        for index, parameter in enumerate(group["params"]):
            yield f"{number}.{index}", parameter


def _optimizer_values(name: str, optimizer: Optimizer, tensors: dict[str, Tensor]) -> dict[str, Any]:
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    state = {
        place: take_apart(f"{name}/s/{place}", optimizer.state[parameter], tensors)
        for place, parameter in _numbered(optimizer)
        if parameter in optimizer.state
    }
    return {"groups": take_apart(f"{name}/g", groups, tensors), "state": state}


def _adopt_optimizer(optimizer: Optimizer, values: dict[str, Any], tensors: Mapping[str, Tensor]) -> None:
    for group, wanted in zip(optimizer.param_groups, values["groups"], strict=True):
        for key, value in wanted.items():
            if isinstance(group.get(key), Tensor) and isinstance(value, Ref):
                group[key].copy_(tensors[value.name])
            else:
                group[key] = put_together(value, tensors)
    for place, parameter in _numbered(optimizer):
        wanted = values["state"].get(place)
        if wanted is None:
            optimizer.state.pop(parameter, None)
            continue
        state = optimizer.state[parameter]
        for key in [key for key in state if key not in wanted]:
            del state[key]
        for key, value in wanted.items():
            if not isinstance(value, Ref):
                state[key] = put_together(value, tensors)
                continue
            stored = tensors[value.name]
            if not isinstance(state.get(key), Tensor) or local(state[key]).shape != stored.shape:
                alike = stored.shape == local(parameter).shape
                state[key] = torch.zeros_like(parameter, dtype=stored.dtype).detach() if alike else stored.clone()
            local(state[key]).copy_(stored)
