"""Describe the live state of modules and optimizers, with torch."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.core import ConfigError
from argosy.transfer.layout import Layout, Placement, Split, replicated, sharded
from argosy.transfer.units import (
    Adoption,
    Kind,
    Member,
    State,
    Unit,
    Value,
    blocked,
    full_name,
    kind_of,
    role_of,
)

NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.int64: "I64", torch.int32: "I32",
    torch.int16: "I16", torch.int8: "I8", torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16",
    torch.uint8: "U8", torch.bool: "BOOL", torch.complex64: "C64", torch.complex128: "C128",
}  # fmt: skip
torch_dtypes = {name: dtype for dtype, name in NAMES.items()}
FLOAT = "$float"
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def describe(
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
    *,
    others: Mapping[str, Any] | None = None,
    blocks: Mapping[str, int] | None = None,
    local: Collection[str] = (),
    ranks: tuple[int, int] | None = None,
) -> State:
    """Describe modules, their optimizers, and `others` (anything with a state_dict, tensors, JSON values).

    Plain tensors count as replicated over all ranks, DTensors as their placements say. `blocks` maps the key of an
    optimizer's tensor of scales to its block size; `local` names entries of `others` that each rank keeps for
    itself (random generators, cursors). `ranks` is (rank, size); torch.distributed's if it is initialised.

    When a stored state is adopted, plain values (numbers, strings, tuples) are replaced in the dict `others`.

    Raises:
        ConfigError: something cannot be kept, an optimizer holds a parameter that no module names, two tensors would
            have one name, or a placement is partial.
    """
    rank, size = ranks or _place()
    state = State(rank, size)
    builder = _Builder(state, dict(blocks or {}), others)
    modules = model if isinstance(model, Mapping) else {} if model is None else {"": model}
    for prefix, module in modules.items():
        builder.add_module(prefix, module)
    for name, optimizer in _named(optimizers).items():
        builder.add_optimizer(name, optimizer)
    for name, thing in (others or {}).items():
        builder.add_other(f"rank{rank}/{name}" if name in local else name, thing, is_local=name in local)
    state.adopt = builder.adopt
    return state


def _place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_available() and dist.is_initialized() else (0, 1)


def _named(optimizers: Any) -> dict[str, Optimizer]:
    if isinstance(optimizers, Mapping):
        return dict(optimizers)
    listed: list[Any] = list(optimizers) if isinstance(optimizers, Iterable) else [optimizers]
    for each in listed:
        if not isinstance(each, Optimizer):
            raise ConfigError(f"not an optimizer: {type(each).__name__}")
    return {"optimizer" if len(listed) == 1 else f"optimizer{i}": each for i, each in enumerate(listed)}


def clean(name: str) -> str:
    """A parameter's name without what wrappers put into it."""
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name


def unwrapped(module: nn.Module) -> nn.Module:
    """The module that the user wrote, inside DDP and torch.compile."""
    while isinstance(module, nn.parallel.DistributedDataParallel | nn.DataParallel) or hasattr(module, "_orig_mod"):
        module = module._orig_mod if hasattr(module, "_orig_mod") else module.module  # type: ignore[assignment]
    return module


def layout_of(tensor: Tensor, size: int) -> tuple[Layout, Tensor]:
    """The layout of a tensor and this rank's part of it."""
    from torch.distributed.tensor import DTensor

    if not isinstance(tensor, DTensor):
        return replicated(tuple(tensor.shape), tuple(range(size))), tensor
    mesh = tensor.device_mesh
    placements = tuple(_placement(placement) for placement in tensor.placements)
    ranks = tuple(int(rank) for rank in mesh.mesh.flatten().tolist())
    layout = sharded(tuple(tensor.shape), tuple(mesh.mesh.shape), placements, ranks)
    part = tensor._local_tensor
    cells = sum(piece.box.cells for piece in layout.by_rank.get(dist.get_rank(), ()))
    if cells != part.numel():
        raise ConfigError(f"the local part of a DTensor has {part.numel()} cells, its placements say {cells}")
    return layout, part


def _placement(placement: Any) -> Placement:
    if placement.is_partial():
        raise ConfigError(f"a partial DTensor has no layout: {placement}", hint="redistribute it first")
    if placement.is_replicate():
        return "replicate"
    return Split(placement.dim, int(getattr(placement, "split_factor", 1)))


def _without_memory(tensor: Tensor) -> str | None:
    """What a tensor is that has no memory with its cells one by one; None: it has."""
    if nn.parameter.is_lazy(tensor):
        return "not initialised yet"
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return "on the meta device"
    return None if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


def _detached(tensor: Tensor) -> Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


class _Builder:
    """Collects units, and remembers which live object each came from."""

    def __init__(self, state: State, blocks: dict[str, int], home: Mapping[str, Any] | None = None) -> None:
        self.state, self.blocks, self.home = state, blocks, home
        self.names: dict[int, str] = {}
        self.origins: dict[str, str] = {}
        """Where each name comes from, as errors say it."""
        self.parameters: dict[str, Tensor] = {}
        self.owners: dict[str, tuple[str, Optimizer, dict[str, Any]]] = {}
        self.others: dict[str, Any] = {}
        self.with_tensors: set[str] = set()
        """Those of `others` that are known by their tensors."""

    def member(self, unit: str, key: str, role: Any, tensor: Tensor, kind: Kind = "same") -> Member:
        name = full_name(unit, key)
        if (what := _without_memory(tensor)) is not None:
            raise ConfigError(f"{name} cannot be kept: its tensor is {what}", hint="plain tensors with memory can")
        layout, part = layout_of(_detached(tensor), self.state.size)
        if part.dtype not in NAMES:
            raise ConfigError(f"{name} cannot be kept: tensors of this dtype cannot: {part.dtype}")
        return Member(key, role, NAMES[part.dtype], layout, part, kind)

    def claim(self, name: str, origin: str) -> None:
        """A name belongs to one tensor: of two, one would be lost.

        Raises:
            ConfigError: another has it.
        """
        if name in self.origins:
            raise ConfigError(
                f"two tensors would be called {name}: {self.origins[name]} and {origin}",
                hint="call one of them something else",
            )
        self.origins[name] = origin

    def add_module(self, prefix: str, thing: object) -> None:
        if not isinstance(thing, nn.Module):
            raise ConfigError(f"what is described is a module or a dict of modules: {type(thing).__name__}")
        module = unwrapped(thing)
        dot = f"{prefix}." if prefix else ""
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_json_string"):  # A Hugging Face model: its config goes with it.
            self.state.values["$config"] = json.loads(config.to_json_string(use_diff=False))
        whose = f"of the {type(module).__name__} {prefix}".rstrip()
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._add_tensor(dot + clean(name), parameter, "parameter", whose)
        kept = {clean(name) for name in module.state_dict(keep_vars=True)}
        for name, buffer in module.named_buffers(remove_duplicate=False):
            if clean(name) in kept:
                self._add_tensor(dot + clean(name), buffer, "buffer", whose)

    def _add_tensor(self, name: str, tensor: Tensor, role: Any, whose: str) -> None:
        self.claim(name, f"a {role} {whose}")
        first = self.names.setdefault(id(tensor), name)
        if first != name:
            self.state.units[first].aliases += (name,)
            return
        key = "parameter" if role == "parameter" else "value"
        self.state.units[name] = Unit(name, {key: self.member(name, key, role, tensor)})
        self.parameters[name] = tensor

    def add_optimizer(self, title: str, optimizer: Optimizer) -> None:
        for number, group in enumerate(optimizer.param_groups):
            options = {key: value_of(value) for key, value in group.items() if key != "params" and is_value(value)}
            for parameter in group["params"]:
                name = self.names.get(id(parameter))
                if name is None:
                    shape = list(parameter.shape)
                    raise ConfigError(f"group {number} of {title} holds a parameter of no module: {shape}")
                unit = self.state.units[name]
                unit.options = {**options, "optimizer": title}
                self.owners[name] = (title, optimizer, group)
                for key, value in optimizer.state.get(parameter, {}).items():
                    self.claim(full_name(name, key), f"state of {title}")
                    self._add_state(unit, key, value, parameter)
        self.state.fences.append(lambda call: optimizer.register_step_pre_hook(_before_step(call)))

    def _add_state(self, unit: Unit, key: str, value: Any, parameter: Tensor) -> None:
        if isinstance(value, Tensor):
            if key in self.blocks:
                layout, _ = layout_of(parameter, self.state.size)
                scales = blocked(layout, self.blocks[key])
                unit.members[key] = Member(key, "moment", NAMES[value.dtype], scales, value, "blocked")
                return
            kind = kind_of(tuple(value.shape), tuple(parameter.shape))
            unit.members[key] = self.member(unit.name, key, role_of(key, tuple(value.shape)), value, kind)
        elif is_value(value):
            unit.options.setdefault("state", {})[key] = value_of(value)
        else:
            raise ConfigError(f"optimizer state of {unit.name} cannot be kept: {key} is a {type(value).__name__}")

    def add_other(self, name: str, thing: Any, *, is_local: bool) -> None:
        self.others[name] = thing
        content = thing.state_dict() if hasattr(thing, "state_dict") else thing
        if isinstance(thing, torch.Generator):
            content = thing.get_state()
        before = len(self.state.units)
        self.state.values[name] = self._tree(name, content, "local" if is_local else "buffer", f"[{name!r}]")
        if len(self.state.units) > before:
            self.with_tensors.add(name)

    def _tree(self, name: str, content: Any, role: Any, path: str) -> Value:
        """Put tensors into units; return the rest with references to them."""
        if isinstance(content, np.ndarray):
            content = torch.from_numpy(content)  # The same memory.
        if isinstance(content, Tensor):
            self.claim(name, f"that at {path}")
            member = self.member(name, "value", role, content)
            if role == "local":
                member = Member("value", role, member.dtype, replicated(member.shape, (self.state.rank,)), content)
            self.state.units[name] = Unit(name, {"value": member})
            self.parameters[name] = content
            return {"$tensor": name}
        if isinstance(content, Mapping):
            items = [
                [key, self._tree(f"{name}.{key}", value, role, f"{path}[{key!r}]")] for key, value in content.items()
            ]
            if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
                return dict(items)
            return {"$items": items}  # Also where a key could be taken for a mark of ours.
        if isinstance(content, list | tuple):
            parts = [self._tree(f"{name}.{i}", value, role, f"{path}[{i}]") for i, value in enumerate(content)]
            return parts if isinstance(content, list) else {"$tuple": parts}
        if not is_value(content):
            what = "number of more than 64 bits" if isinstance(content, int) else type(content).__name__
            raise ConfigError(
                f"{name} cannot be kept: it is a {what}",
                hint="numbers, strings, booleans, None and tensors can, and lists, tuples and dicts of them",
            )
        return value_of(content)

    def adopt(self, stored: State) -> Adoption:
        """Find or make a tensor for each stored member; nothing of the live state changes before `commit`."""
        from argosy.transfer.torch_adopt import adopt

        return adopt(self.state, stored, self)


def _before_step(call: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        call()

    return hook


def is_value(value: Any) -> bool:
    """Whether JSON can say it, or it is a tensor of one number."""
    if isinstance(value, list | tuple):
        return all(map(is_value, value))
    if isinstance(value, dict):
        return all(isinstance(key, str) and is_value(inner) for key, inner in value.items())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, int):
        return -(2**63) <= value < 2**64  # More bits JSON may lose.
    return value is None or isinstance(value, float | str) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def value_of(value: Any) -> Value:
    """The same as JSON can say it, which knows no infinity."""
    if isinstance(value, list | tuple):
        return [value_of(inner) for inner in value]
    if isinstance(value, dict):
        return {key: value_of(inner) for key, inner in value.items()}
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    return {FLOAT: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def from_value(value: Value) -> Any:
    """What `value_of` was given, but lists for tuples."""
    if isinstance(value, dict):
        found = {key: from_value(inner) for key, inner in value.items()}
        return float(found[FLOAT]) if FLOAT in found else found
    return [from_value(inner) for inner in value] if isinstance(value, list) else value
