"""Spread a model over ranks while it is captured, without changing its code.

A parameter is a local shard, gathered when the model reads it; the backward pass scatters its gradient. A linear layer
named as the first or second half of a pair is split over the ranks of tensor parallelism. The model's classes are
replaced for the time of a `with` block and restored after it.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false, reportMissingParameterType=false, reportUnknownParameterType=false

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from argosy.core import ConfigError
from argosy.cost import Recipe
from argosy.graph._torch import FakeStore, c10d

DIMS = ("pp", "dp", "fsdp", "tp")
"""Outermost first: neighbours in rank share a tensor-parallel group, which should be within a host."""
COLUMN = frozenset(
    "q_proj k_proj v_proj gate_proj up_proj wq wk wv w1 w3 c_fc fc1 query key value".split()  # noqa: SIM905
)
"""Names of linear layers whose outputs are split over `tp`."""
ROW = frozenset("o_proj down_proj wo w2 c_proj fc2 out_proj dense_4h_to_h".split())  # noqa: SIM905
"""Names of linear layers whose inputs are split, so that their outputs are partial sums."""


@dataclass(frozen=True, slots=True)
class Shard:
    """How one parameter is cut: over `tp` along a dimension, then over `fsdp` along rows, padded to equal parts."""

    name: str
    shape: tuple[int, ...]
    tp_dim: int | None
    rows: int
    """Rows of the local part, padding included."""
    dtype: torch.dtype
    trained: bool

    def split_shape(self, recipe: Recipe) -> tuple[int, ...]:
        """The shape of one tensor-parallel part."""
        if self.tp_dim is None:
            return self.shape
        return tuple(n // recipe.tp if d == self.tp_dim else n for d, n in enumerate(self.shape))

    def local_shape(self, recipe: Recipe) -> tuple[int, ...]:
        shape = self.split_shape(recipe)
        return (self.rows, *shape[1:]) if shape else shape

    def local(self, full: Tensor, recipe: Recipe, rank: int) -> Tensor:
        """Cut the part of `rank` out of the whole parameter, with zeros as padding."""
        place = coordinates(recipe, rank)
        part = full if self.tp_dim is None else full.chunk(recipe.tp, self.tp_dim)[place["tp"]]
        if not self.shape or recipe.fsdp == 1:
            return part
        first = place["fsdp"] * self.rows
        part = part[first : first + self.rows]
        return F.pad(part, [0, 0] * (part.dim() - 1) + [0, self.rows - part.shape[0]])


def coordinates(recipe: Recipe, rank: int) -> dict[str, int]:
    """The place of a rank in each dimension."""
    place: dict[str, int] = {}
    for dim in reversed(DIMS):
        rank, place[dim] = divmod(rank, getattr(recipe, dim))
    return place


def group_ranks(recipe: Recipe, dim: str) -> list[int]:
    """The ranks that share all coordinates but `dim` with rank 0."""
    stride = 1
    for inner in reversed(DIMS):
        if inner == dim:
            break
        stride *= getattr(recipe, inner)
    return [index * stride for index in range(getattr(recipe, dim))]


def compute_dtype(value: Tensor, recipe: Recipe) -> Tensor:
    """Cast to what the recipe computes in."""
    return value.to(torch.bfloat16) if recipe.dtype == "bf16" and value.is_floating_point() else value


@contextmanager
def fake_world(recipe: Recipe) -> Generator[dict[str, str]]:
    """A process group of `recipe.world` ranks that exist in name only; yields the name of each dimension's group.

    Raises:
        ConfigError: this process has a process group already.
    """
    if dist.is_initialized():
        raise ConfigError("this process already has a process group", hint="capture in a process of its own")
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=recipe.world)
    try:
        names: dict[str, str] = {}
        for dim in DIMS:
            if getattr(recipe, dim) > 1:
                group: Any = dist.new_group(group_ranks(recipe, dim))
                names[dim] = group.group_name
        yield names
    finally:
        dist.destroy_process_group()


def plan_shards(model: nn.Module, recipe: Recipe) -> dict[str, Shard]:
    """Decide how each parameter is cut. A tied parameter is there once, under its first name."""
    split: dict[int, int | None] = {}
    for name, module in model.named_modules():
        kind = split_kind(name, module) if recipe.tp > 1 else None
        if kind is not None:
            assert isinstance(module, nn.Linear)
            split[id(module.weight)] = dim = 0 if kind == "column" else 1
            if module.weight.shape[dim] % recipe.tp:
                raise ConfigError(f"tp={recipe.tp} does not divide {name}: {module.weight.shape[dim]}")
            if kind == "column" and module.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
                split[id(module.bias)] = 0
    if recipe.tp > 1 and not split:
        raise ConfigError(
            f"tp={recipe.tp}: no linear layer of this model has a name that says how to split it",
            hint=f"names that do: {', '.join(sorted(COLUMN | ROW))}",
        )
    return {name: plan_shard(name, each, split.get(id(each)), recipe) for name, each in model.named_parameters()}


def plan_shard(name: str, parameter: Tensor, tp_dim: int | None, recipe: Recipe) -> Shard:
    shape = tuple(parameter.shape)
    rows = shape[0] // (recipe.tp if tp_dim == 0 else 1) if shape else 1
    return Shard(name, shape, tp_dim, -(-rows // recipe.fsdp), parameter.dtype, parameter.requires_grad)


def split_kind(name: str, module: nn.Module) -> str | None:
    last = name.rpartition(".")[2]
    if not isinstance(module, nn.Linear):
        return None
    return "column" if last in COLUMN else "row" if last in ROW else None


class Gather(torch.autograd.Function):
    """The whole parameter from its shards; backward, the shard of the mean gradient."""

    @staticmethod
    def forward(ctx: Any, local: Tensor, rows: int, recipe: Recipe, groups: Mapping[str, str]) -> Tensor:
        ctx.rows, ctx.recipe, ctx.groups, ctx.dtype, ctx.local_rows = rows, recipe, groups, local.dtype, local.shape[:1]
        full = compute_dtype(local, recipe)
        if recipe.fsdp > 1 and local.dim():
            full = c10d.wait_tensor(c10d.all_gather_into_tensor(full, recipe.fsdp, groups["fsdp"]))
            full = full[:rows] if full.shape[0] != rows else full
        return full if full is not local else full.view_as(full)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,), recipe, groups = grads, ctx.recipe, ctx.groups
        if recipe.fsdp > 1 and grad.dim():
            missing = ctx.local_rows[0] * recipe.fsdp - ctx.rows
            grad = F.pad(grad, [0, 0] * (grad.dim() - 1) + [0, missing]) if missing else grad
            grad = c10d.wait_tensor(c10d.reduce_scatter_tensor(grad.contiguous(), "sum", recipe.fsdp, groups["fsdp"]))
        elif recipe.fsdp > 1:
            grad = c10d.wait_tensor(c10d.all_reduce(grad, "sum", groups["fsdp"]))
        if recipe.dp > 1:
            grad = c10d.wait_tensor(c10d.all_reduce(grad.contiguous(), "sum", groups["dp"]))
        grad = grad.to(ctx.dtype)
        copies = recipe.fsdp * recipe.dp
        return grad / copies if copies > 1 else grad, None, None, None


class CopyIn(torch.autograd.Function):
    """Enter a split layer: the same input on each rank; backward, the sum of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return c10d.wait_tensor(c10d.all_reduce(grads[0].contiguous(), "sum", ctx.group)), None


class SumOut(torch.autograd.Function):
    """Leave a split layer: the sum of the ranks' partial outputs; backward, the same gradient on each rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: str) -> Tensor:
        return c10d.wait_tensor(c10d.all_reduce(x.contiguous(), "sum", group))

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


def _column(group: str) -> Callable[..., Tensor]:
    return lambda self, x: F.linear(CopyIn.apply(x, group), self.weight, self.bias)  # pyright: ignore


def _row(group: str) -> Callable[..., Tensor]:
    def forward(self: Any, x: Tensor) -> Tensor:
        total = SumOut.apply(F.linear(x, self.weight), group)
        return total if self.bias is None else total + self.bias  # pyright: ignore

    return forward


@contextmanager
def spread(
    model: nn.Module, shards: Mapping[str, Shard], locals_: Mapping[str, Tensor], recipe: Recipe, groups: dict[str, str]
) -> Generator[None]:
    """Let the modules of `model` read gathered parameters instead of their own; each is gathered at its first use."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    gathered: dict[str, Any] = {}

    def read(name: str) -> Tensor:
        if name not in gathered:
            shape = shards[name].split_shape(recipe)
            gathered[name] = Gather.apply(locals_[name], shape[0] if shape else 1, recipe, groups)
        return gathered[name]

    def reader(name: str) -> property:
        return property(lambda _self: read(name))

    changed: list[tuple[nn.Module, type[nn.Module]]] = []
    try:
        for path, module in model.named_modules():
            own = {key: reader(names[id(p)]) for key, p in module._parameters.items() if p is not None}
            body: dict[str, Any] = dict(own)
            kind = split_kind(path, module) if recipe.tp > 1 else None
            if kind is not None:
                body["forward"] = (_column if kind == "column" else _row)(groups["tp"])
            if body:
                changed.append((module, module.__class__))
                module.__class__ = type(module.__class__.__name__, (module.__class__,), body)
        yield
    finally:
        for module, kept in changed:
            module.__class__ = kept
