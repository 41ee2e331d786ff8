"""Describe the live state of modules and optimizers, with torch."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false, reportPrivateUsage=false

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from argosy.core import ConfigError
from argosy.transfer.layout import Layout, Placement, Split, blocked, replicated, sharded
from argosy.transfer.torch_extra import check_modules, extras_of
from argosy.transfer.torch_inner import Owner, holder_of, inner_of, rank_of
from argosy.transfer.torch_values import DEPTH, SURROGATE, is_option, is_value, key_of, value_of
from argosy.transfer.torch_whole import KINDS, Whole
from argosy.transfer.torch_wrapped import BOOK, PLAIN, bare, is_dtensor, is_short, noted, opened
from argosy.transfer.units import (
    WRAPPED_NOTE,
    Adoption,
    Kind,
    Member,
    State,
    Unit,
    Value,
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
META, LAZY = "on the meta device", "not initialised yet"
_WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.")


def describe(
    model: nn.Module | Mapping[str, nn.Module] | None = None,
    optimizers: Optimizer | Iterable[Optimizer] | Mapping[str, Optimizer] = (),
    *,
    others: Mapping[str, Any] | None = None,
    local: Collection[str | Tensor] = (),
    ranks: tuple[int, int] | None = None,
    transient: bool = False,
) -> State:
    """Describe modules, their optimizers, and `others` (anything with a state_dict, tensors, JSON values).

    Plain tensors count as replicated over all ranks, DTensors as their placements say. `local` names
    entries of `others` that each rank keeps for itself (random generators, cursors). It may also hold parameters of
    which each rank has its own: they are kept under the rank's name, with their optimizer state. `ranks` is (rank,
    size); torch.distributed's if it is initialised. A `transient` state is for copies that no process outlives:
    it has also buffers that are not persistent, and no config.

    When a stored state is adopted, plain values (numbers, strings, tuples) are replaced in the dict `others`.

    Raises:
        ConfigError: something cannot be kept, an optimizer holds a parameter that no module names, two tensors would
            have one name, or a placement is partial.
    """
    rank, size = ranks or _place()
    state = State(rank, size)
    builder = _Builder(state, others)
    builder.own = {id(each) for each in local if isinstance(each, Tensor)}
    local = [each for each in local if isinstance(each, str)]
    modules = model if isinstance(model, Mapping) else {} if model is None else {"": model}
    for prefix, module in modules.items():
        builder.add_module(prefix, module, transient=transient)
    state.modules = {key: f"{key}." for key in modules if key}
    for name, thing in (others or {}).items():
        if isinstance(thing, nn.Parameter):
            builder.add_parameter(name, thing)
    for name, optimizer in _named(optimizers).items():
        if isinstance(optimizer, KINDS):
            builder.add_other(name, Whole(name, optimizer, builder.names), is_local=False)
        else:
            builder.add_optimizer(name, optimizer)
        builder.fence(optimizer)
    for name, thing in (others or {}).items():
        if not isinstance(thing, nn.Parameter):
            builder.add_other(f"rank{rank}/{name}" if name in local else name, thing, is_local=name in local)
    # Another state than the builder's: one that refers to itself would keep tensors until garbage is collected.
    return replace(state, adopt=builder.adopt)


def tensors_state(tensors: Mapping[str, Tensor]) -> State:
    """A state of plain tensors of this rank, by name."""
    rank, size = _place()
    units = {
        name: Unit(
            name, {"value": Member("value", "buffer", NAMES.get(each.dtype, ""), replicated(tuple(each.shape)), each)}
        )
        for name, each in tensors.items()
    }
    return State(rank, size, units)


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
    if "_orig_mod." in name or "_wrapped_module." in name:
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
    if not is_dtensor(tensor):
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
    if type(tensor) not in PLAIN and nn.parameter.is_lazy(tensor):
        return LAZY
    if tensor.is_nested:
        return "nested"
    if tensor.is_meta:
        return META
    return None if tensor.layout is torch.strided else str(tensor.layout).removeprefix("torch.")


class _Builder:
    """Collects units, and remembers which live object each came from."""

    def __init__(self, state: State, home: Mapping[str, Any] | None = None) -> None:
        self.state, self.home = state, home
        self._plain: dict[torch.Size, Layout] = {}
        self.own: set[int] = set()
        """The parameters, by identity, of which each rank has another one."""
        self.names: dict[int, str] = {}
        self.origins: dict[str, str] = {}
        """Where each name comes from, as errors say it."""
        self.parameters: dict[str, Tensor] = {}
        self.owners: dict[str, Owner] = {}
        self.others: dict[str, Any] = {}
        self.with_tensors: set[str] = set()
        """Those of `others` that are known by their tensors."""
        self.arrays: dict[str, np.ndarray[Any, Any]] = {}
        """Those of `others` that are numpy's."""
        self.around: list[int] = []
        """The containers, by identity, around what is described just now."""

    def member(self, unit: str, key: str, role: Any, tensor: Tensor, kind: Kind = "same") -> Member:
        if type(tensor) in PLAIN and _without_memory(tensor) is None:  # As most are.
            layout, dtype = self._plain.get(tensor.shape), NAMES.get(tensor.dtype)
            if layout is not None and dtype is not None and not is_short(tensor):
                return Member(key, role, dtype, layout, tensor.detach() if tensor.requires_grad else tensor, kind)
        if (what := _without_memory(tensor)) is not None:
            name = full_name(unit, key)
            hints = {META: "module.to_empty(device='cpu') gives it memory", LAZY: "call the module once before"}
            hint = hints.get(what, "plain tensors with memory can")
            raise ConfigError(f"{name} cannot be kept: its tensor is {what}", hint=hint)
        layout, part = self._layout(tensor.detach() if tensor.requires_grad else tensor)
        if type(part) not in PLAIN:
            part = bare(part)
            if opened(part) is not None:
                name, what = full_name(unit, key), type(part).__name__
                raise ConfigError(f"{name} cannot be kept: a {what} consists of other tensors", hint="keep those")
        if is_short(part):
            name, bytes_ = full_name(unit, key), part.untyped_storage().nbytes()
            raise ConfigError(
                f"{name} cannot be kept: its memory was freed, {bytes_} of its {part.nbytes} bytes are left"
            )
        dtype = NAMES.get(part.dtype)
        if dtype is None:
            name = full_name(unit, key)
            raise ConfigError(f"{name} cannot be kept: tensors of this dtype cannot: {part.dtype}")
        return Member(key, role, dtype, layout, part, kind)

    def _layout(self, tensor: Tensor) -> tuple[Layout, Tensor]:
        """As `layout_of`; that of plain tensors is made once for each shape."""
        if type(tensor) not in PLAIN:
            return layout_of(tensor, self.state.size)
        layout = self._plain.get(tensor.shape)
        if layout is None:
            layout = self._plain[tensor.shape] = layout_of(tensor, self.state.size)[0]
        return layout, tensor

    def claim(self, name: str, origin: str) -> None:
        """A name belongs to one tensor: of two, one would be lost.

        Raises:
            ConfigError: another has it.
        """
        if name == "__metadata__" or (not name.isascii() and SURROGATE.search(name)):
            raise ConfigError(f"a tensor cannot be called {name!r}: {origin}", hint="files could not say it")
        if name in self.origins:
            raise ConfigError(
                f"two tensors would be called {name}: {self.origins[name]} and {origin}",
                hint="call one of them something else",
            )
        self.origins[name] = origin

    def add_module(self, prefix: str, thing: object, *, transient: bool) -> None:
        if not isinstance(thing, nn.Module):
            raise ConfigError(f"what is described is a module or a dict of modules: {type(thing).__name__}")
        module = unwrapped(thing)
        if not transient:
            check_modules(module)
        dot = f"{prefix}." if prefix else ""
        config: Any = getattr(module, "config", None)
        if hasattr(config, "to_json_string") and not transient:  # A Hugging Face model: its config goes with it.
            self.state.values["$config"] = json.loads(config.to_json_string(use_diff=False))
        whose = [f"a {role} of the {type(module).__name__} {prefix}".rstrip() for role in ("parameter", "buffer")]
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._add_tensor(dot + clean(name), parameter, "parameter", whose[0])
        for name, extra in extras_of(module):
            self.add_other(dot + clean(name), extra, is_local=False)
        buffers = list(module.named_buffers(remove_duplicate=False))
        is_asked = bool(buffers) and not transient
        kept = {clean(name) for name in module.state_dict(keep_vars=True)} if is_asked else set[str]()
        for name, buffer in buffers:
            if transient or clean(name) in kept:
                self._add_tensor(dot + clean(name), buffer, "buffer", whose[1])

    def _add_tensor(self, name: str, tensor: Tensor, role: Any, origin: str) -> None:
        name = f"rank{self.state.rank}/{name}" if id(tensor) in self.own else name
        self.claim(name, origin)
        first = self.names.setdefault(id(tensor), name)
        if first != name:
            self.state.units[first].aliases += (name,)
            return
        key = "parameter" if role == "parameter" else "value"
        self.state.units[name] = Unit(name, {key: self.member(name, key, role, tensor)})
        if id(tensor) in self.own:
            self._only_on(self.state.rank, self.state.units[name], key)
        self.parameters[name] = tensor

    def add_parameter(self, name: str, parameter: nn.Parameter) -> None:
        """One that belongs to no module."""
        self._add_tensor(name, parameter, "parameter", f"[{name!r}]")

    def add_optimizer(self, title: str, optimizer: Optimizer) -> None:
        owner: dict[str, Value] = {"optimizer": title, "class": lineage(optimizer)}
        holder = holder_of(optimizer)
        origin = f"state of {title}"
        for number, group in enumerate(optimizer.param_groups):
            options = {
                key: value_of(value)
                for key, value in group.items()
                if is_option(f"group {number} of {title}", key, value)
            }
            for parameter in group["params"]:
                name = self.names.get(id(parameter))
                if name is None:
                    raise ConfigError(
                        f"group {number} of {title} holds a parameter that is not in the state, of shape "
                        f"{list(parameter.shape)}",
                        hint="give its module to the state too, or the parameter itself under a name",
                    )
                if name in self.owners:
                    name = self._beside(name, title, parameter)
                unit = self.state.units[name]
                unit.options = {**options, **owner}
                rank = self.state.rank if id(parameter) in self.own else rank_of(optimizer, parameter)
                self.owners[name] = Owner(title, optimizer, group, holder, rank)
                for key, value in holder.state.get(parameter, {}).items():
                    if not isinstance(key, str):
                        raise ConfigError(f"optimizer state of {name} cannot be kept: one of its keys is {key!r}")
                    self.claim(full_name(name, key), origin)
                    self._add_state(unit, key, value, parameter)
                    if rank is not None and (key in unit.members or id(parameter) not in self.own):
                        self._only_on(rank, unit, key)

    def _beside(self, name: str, title: str, parameter: Tensor) -> str:
        """Make a unit for what a further optimizer keeps of a parameter, and return its name."""
        beside = f"{name}@{title}"
        self.claim(beside, f"state of {title}")
        self.state.units[beside], self.parameters[beside] = Unit(beside, {}), parameter
        return beside

    def _only_on(self, rank: int, unit: Unit, key: str) -> None:
        """State that one rank has for all."""
        if key not in unit.members:
            name = full_name(unit.name, key)
            raise ConfigError(f"{name} cannot be kept: one rank has it for all, and it is no tensor")
        member = unit.members[key]
        unit.members[key] = msgspec.structs.replace(member, layout=replicated(member.shape, (rank,)))

    def fence(self, optimizer: Optimizer) -> None:
        if not hasattr(optimizer, "_optimizer_step_pre_hooks"):  # A wrapper that has none of its own, as accelerate's.
            optimizer = inner_of(optimizer)
        self.state.fences.append(lambda call: optimizer.register_step_pre_hook(_before_step(call)))

    def _add_state(self, unit: Unit, key: str, value: Any, parameter: Tensor) -> None:
        if isinstance(value, Tensor):
            if type(value) not in PLAIN and self._add_wrapped(unit, key, value):
                return
            is_cut = is_dtensor(parameter) and not is_dtensor(value) and value.numel() > 1
            if is_cut and len(layout_of(parameter, self.state.size)[0].replicas) > 1:
                raise ConfigError(
                    f"{full_name(unit.name, key)} cannot be kept: its parameter is cut over ranks, it does not say how",
                    hint="an optimizer whose state are DTensors can be kept",
                )
            kind = "same" if value.is_nested else kind_of(value.shape, parameter.shape)
            unit.members[key] = self.member(unit.name, key, role_of(key, value.shape), value, kind)
        elif is_value(value):
            unit.options.setdefault("state", {})[key] = value_of(value)
        else:
            raise ConfigError(f"optimizer state of {unit.name} cannot be kept: {key} is a {type(value).__name__}")

    def _add_wrapped(self, unit: Unit, key: str, value: Tensor) -> bool:
        """A tensor that consists of others is known by these; False: it does not."""
        if value.is_nested:
            return False
        layout, part = layout_of(value, self.state.size)
        inner = opened(part)
        if inner is None:
            return False
        name = full_name(unit.name, key)
        note = noted(name, part)
        for each, tensor in inner.items():
            self.claim(f"{name}.{each}", f"a part of {name}")
            member = self.member(unit.name, f"{key}.{each}", role_of(key, tensor.shape), tensor, "reduced")
            if each in note["blocks"]:
                member = msgspec.structs.replace(member, layout=blocked(layout, note["blocks"][each]), kind="blocked")
            elif tensor.shape == part.shape:
                member = msgspec.structs.replace(member, layout=layout, kind="same")
            elif part.shape != value.shape and each != BOOK:
                raise ConfigError(
                    f"{name} cannot be kept: it is cut over ranks, and nobody says how its {each} goes with it"
                )
            unit.members[f"{key}.{each}"] = member
        unit.options.setdefault(WRAPPED_NOTE, {})[key] = note
        return True

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
            self.arrays[name] = content
            try:  # The same memory.
                content = torch.from_numpy(content if content.flags.writeable else content.copy())
            except (TypeError, ValueError) as error:
                is_odd = isinstance(error, TypeError)
                what = f"arrays of this dtype cannot: {content.dtype}" if is_odd else str(error).partition("\n")[0]
                raise ConfigError(f"{name} cannot be kept: {what}", hint="numbers that torch knows can") from None
        if isinstance(content, Tensor):
            self.claim(name, f"that at {path}")
            member = self.member(name, "value", role, content)
            if role == "local":
                member = Member("value", role, member.dtype, replicated(member.shape, (self.state.rank,)), content)
            self.state.units[name] = Unit(name, {"value": member})
            self.parameters[name] = content
            return {"$tensor": name}
        if isinstance(content, Mapping | list | tuple):
            return self._container(name, content, role, path)
        if not is_value(content):
            what = "text that is no Unicode" if isinstance(content, str) else type(content).__name__
            raise ConfigError(
                f"{name} cannot be kept: it is a {what}",
                hint="numbers, strings, booleans, None and tensors can, and lists, tuples and dicts of them",
            )
        return value_of(content)

    def _container(self, name: str, content: Any, role: Any, path: str) -> Value:
        if id(content) in self.around or len(self.around) == DEPTH:
            what = "it contains itself" if id(content) in self.around else f"it is nested more than {DEPTH} deep"
            raise ConfigError(f"{name[:100]} cannot be kept: {what}, at {path[:100]}")
        self.around.append(id(content))
        pairs = content.items() if isinstance(content, Mapping) else enumerate(content)
        items = [(key, self._tree(f"{name}.{key}", value, role, f"{path}[{key!r}]")) for key, value in pairs]
        self.around.pop()
        if not isinstance(content, Mapping):
            parts = [part for _, part in items]
            return parts if isinstance(content, list) else {"$tuple": parts}
        if all(isinstance(key, str) and not key.startswith("$") for key, _ in items):
            return dict(items)
        # Also where a key could be taken for a mark of ours.
        return {"$items": [(key_of(name, key), value) for key, value in items]}

    def adopt(self, stored: State) -> Adoption:
        """Find or make a tensor for each stored member; nothing of the live state changes before `commit`."""
        from argosy.transfer.torch_adopt import adopt

        return adopt(self.state, stored, self)


def lineage(optimizer: Optimizer) -> list[str]:
    """The names of an optimizer's class and of those that it derives from: who shares one understands its state.

    Without modules, as a script's classes have another one when it is imported.
    """
    kinds = type(inner_of(optimizer)).__mro__  # Wrappers keep no state of their own.
    return [kind.__name__ for kind in kinds if issubclass(kind, Optimizer) and kind is not Optimizer]


def _before_step(call: Callable[[], None]) -> Callable[..., None]:
    def hook(*_: Any) -> None:
        call()

    return hook
