"""Run a captured step for all its ranks in this process, on real numbers, with collectives done by copying."""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, fx

from argosy.core import ConfigError
from argosy.graph import _torch
from argosy.graph.shard import coordinates, fake_world
from argosy.graph.step_capture import StepGraph

RANKS_MAX = 16
"""More ranks than this take too long, one after the other."""


def rename_groups(graph: fx.Graph, old: Mapping[str, str], new: Mapping[str, str]) -> None:
    """Let the collectives of a graph use other process groups; both mappings are from dimension to name."""
    names = {name: new[dim] for dim, name in old.items() if name != new[dim]}
    for node in graph.nodes if names else ():
        if node.op == "call_function" and any(isinstance(each, str) and each in names for each in node.args):
            node.args = tuple(names.get(each, each) if isinstance(each, str) else each for each in node.args)


def in_fp64(step: StepGraph) -> StepGraph:
    """A copy that computes in fp64 where the step computes in fp32, also inside what it allocates and casts."""
    copied = step.copy()
    widen(copied.graph)
    return copied


def widen(graph: fx.Graph) -> None:
    """Let the operations of a graph allocate and cast to fp64 where they name fp32."""

    def wide(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(wide(each) for each in value)
        return torch.float64 if value is torch.float32 else value

    for node in graph.nodes:
        if node.op == "call_function":
            node.args = wide(node.args)
            node.kwargs = {name: wide(value) for name, value in node.kwargs.items()}


@contextmanager
def world_of(step: StepGraph) -> Generator[None]:
    """Let the groups that a step names exist: those of this process if it has any, fake ones otherwise."""
    if step.recipe.world == 1 or dist.is_initialized():
        yield
        return
    with fake_world(step.recipe) as groups:
        rename_groups(step.graph, step.groups, groups)
        step.groups = groups
        yield


def run_ranks(
    step: StepGraph,
    parameters: Mapping[str, Tensor],
    buffers: Mapping[str, Tensor],
    batches: Sequence[Sequence[Tensor]],
) -> list[list[Tensor | None]]:
    """Run the step of every rank; return each rank's loss and gradients.

    `parameters` are whole, `batches` has one entry per data-parallel rank (`dp` times `fsdp`).

    Raises:
        ConfigError: there are too many ranks for one process.
    """
    recipe = step.recipe
    if recipe.world > RANKS_MAX:
        raise ConfigError(f"too many ranks for one process: {recipe.world}", hint=f"at most {RANKS_MAX}")
    if recipe.world == 1:
        flat = [
            *(parameters[name].clone() for name in step.shards),
            *(b.clone() for b in buffers.values()),
            *batches[0],
        ]
        with torch.no_grad():
            return [list(step.module(*flat))]
    locals_: list[dict[int, Tensor]] = [{} for _ in step.inputs]
    for rank in range(recipe.world):
        place = coordinates(recipe, rank)
        rows = batches[place["dp"] * recipe.fsdp + place["fsdp"]]
        mine = [each.local(parameters[name], recipe, rank).clone() for name, each in step.shards.items()]
        for slot, value in zip(locals_, [*mine, *(b.clone() for b in buffers.values()), *rows], strict=True):
            slot[rank] = value
    with world_of(step):
        if all(each.dtype is torch.float64 for each in parameters.values()):
            step = in_fp64(step)
        step.module.recompile()
        with torch.no_grad(), _torch.LocalTensorMode(recipe.world):
            results: Any = step.module(*[_torch.LocalTensor(slot) for slot in locals_])
    return [[None if each is None else rank_part(each, rank) for each in results] for rank in range(recipe.world)]


def rank_part(value: Any, rank: int) -> Tensor:
    """What one rank has of a result; a result that is no LocalTensor is the same on all."""
    if isinstance(value, _torch.AsyncCollectiveTensor):
        value = value.trigger_wait()
    return value._local_tensors[rank] if isinstance(value, _torch.LocalTensor) else value
