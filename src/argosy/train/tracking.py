"""What `run.track` was told of, and its state: described once by `transfer`, for rollback, healing and checkpoints.

T1  A copy that another generation of the rank takes over gives the same bits.
T2  It is written into the tensors that are there: whoever holds them (DDP, a compiled graph) goes on with them.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.core import ConfigError
from argosy.train._torch import was_forwarded
from argosy.train.ledger import Ledger
from argosy.transfer import (
    Declared,
    Ownership,
    State,
    clean,
    copy_of,
    describe,
    device_of,
    extras_of,
    find_owned,
    is_zero,
    references,
    take_over,
    to_host,
    unwrapped,
)

SMALL_BYTES = 1 << 20
"""The state_dict of something else than a module or optimizer is copied at each step if its tensors are no larger."""


class Light(NamedTuple):
    """What may change before a step is decided."""

    buffers: dict[str, Tensor]
    others: State


class Tracked:
    """The things that `track` was told of, by name."""

    def __init__(self) -> None:
        self.modules: dict[str, nn.Module] = {}
        self.optimizers: dict[str, Optimizer] = {}
        self.others: dict[str, Any] = {}
        self.declared = Declared("run.track")
        self._homes: list[tuple[str, dict[str, Tensor | None], str]] | None = None
        """Of each buffer: its name, and where its module keeps it. Modules are looked through once, not every step."""
        self._parts: list[Tensor] | None = None
        self._device: list[torch.device | None] | None = None
        self._extras: dict[str, Any] = {}
        """The extra state of modules; found together with the buffers."""
        self._place: tuple[int, int] | None = None
        """Rank and size, once they were found."""
        self._large: set[str] = set()
        """Others whose state is too large for a copy at each step, as of the last checkpoint."""

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
            self.modules[name], self._homes, self._parts, self._device = thing, None, None, None
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

    @property
    def splits_moments(self) -> bool:
        """Whether only one rank has the moments of a parameter, as in a ZeroRedundancyOptimizer."""
        return any(map(is_zero, self.optimizers.values()))

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

    @property
    def device(self) -> "torch.device | None":
        """The accelerator that the model is on, if any."""
        if self._device is None:  # Modules are looked through once, not every step.
            self._device = [device_of(parameter for each in self.modules.values() for parameter in each.parameters())]
        return self._device[0]

    def versions(self) -> list[int]:
        """How often each parameter was written, as torch counts: what writes past torch is not seen."""
        if self._parts is None:
            self._parts = list(self.parameters().values())
        return [part._version for part in self._parts]

    def ownership(self, size: int) -> Ownership:
        """Which parameters each of `size` ranks has for itself."""
        return find_owned(self.modules, self.optimizers.values(), self.declared, size)

    def state(self, apart: Sequence[Tensor] = (), *, transient: bool = True) -> State:
        """All of it, as it is: the tensors are the live ones. `apart` are parameters kept under the rank's name."""
        self._homes = None
        if not transient:
            self._large = set()
        model: Any = next(iter(self.modules.values())) if len(self.modules) == 1 else self.modules or None
        state = describe(model, self.optimizers, others=self.others, local=apart, transient=transient)
        state.modules = state.modules or dict.fromkeys(self.modules, "")
        return state

    def buffers(self) -> dict[str, Tensor]:
        """What forward passes change, each rank in its own way, by the names that it has in the state."""
        if self._homes is None:
            self._homes, self._extras = [], {}
            for key, module in self.modules.items():
                dot, inner = f"{key}." if len(self.modules) > 1 else "", unwrapped(module)
                self._extras |= {dot + clean(name): extra for name, extra in extras_of(inner)}
                for path, part in inner.named_modules():
                    self._homes += [(dot + clean(f"{path}.{k}".lstrip(".")), part._buffers, k) for k in part._buffers]
        found: dict[str, Tensor] = {}
        seen: set[int] = set()
        for name, home, key in self._homes:
            buffer = home.get(key)
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                found[name] = local(buffer)
        return found

    def changing(self) -> "Light":
        """A copy of what may change before a step is decided: buffers, and small states of others."""
        buffers = {name: buffer.clone() for name, buffer in self.buffers().items()}
        others = {name: each for name, each in {**self.others, **self._extras}.items() if name not in self._large}
        others = {name: each.changing() if isinstance(each, Ledger) else each for name, each in others.items()}
        said = describe(others=others, ranks=self._place)
        self._place = (said.rank, said.size)
        state = State()
        for name, value in said.values.items() if said.units else ():
            units = {each: said.units[each] for each in references(value)}
            if sum(unit.members["value"].local.nbytes for unit in units.values()) <= SMALL_BYTES:
                state.units |= copy_of(State(units=units)).units
            else:
                self._large.add(name)
        state.values = {name: value for name, value in said.values.items() if name not in self._large}
        return Light(buffers, state)

    def take_over_changing(self, copy: "Light") -> None:
        """Return to what `changing` copied."""
        self.take_over_buffers(copy.buffers)
        take_over(describe(others={**self.others, **self._extras}), copy.others)

    def take_over_buffers(self, held: Mapping[str, Tensor]) -> None:
        """Write copies of buffers into those that are there."""
        with torch.no_grad():
            for name, buffer in self.buffers().items():
                if name in held:
                    buffer.copy_(held[name])

    def drop_gradients(self) -> None:
        """As `zero_grad` of every optimizer does, without what torch notes for its profiler."""
        for optimizer in self.optimizers.values():
            if type(optimizer).zero_grad is not Optimizer.zero_grad:
                optimizer.zero_grad(set_to_none=True)
                continue
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.grad = None

    def settle(self) -> None:
        """After an attempt that was broken off: nothing of it is left in scalers and FSDP2's pipelines (rule 9)."""
        for other in self.others.values():
            if isinstance(other, torch.amp.GradScaler) and other.is_enabled():  # One that is off has no such states.
                cast(Any, other)._per_optimizer_states.clear()
        for module in self.modules.values():
            for root in _sharded_roots(module):
                if was_forwarded(root):  # Before that there is nothing to reset, and torch cannot.
                    root.reset_iter_state()


def _sharded_roots(module: nn.Module) -> Iterator[Any]:
    """The outermost modules that FSDP2 shards."""
    if hasattr(module, "reset_iter_state"):
        yield module
    else:
        for child in module.children():
            yield from _sharded_roots(child)


def local(tensor: Tensor) -> Tensor:
    """This rank's part, without its gradient's history."""
    found = tensor.detach()
    return cast(Any, found).to_local() if hasattr(found, "to_local") else found


def bytes_of(tensor: Tensor) -> memoryview:
    """A tensor's bytes, in row-major order."""
    return to_host(tensor.contiguous().view(-1).view(torch.uint8)).numpy().data
