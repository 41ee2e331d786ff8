"""Run a captured step on real ranks: one graph for forward and backward, collectives joined, certificates kept.

The model keeps its parameters: sharded by FSDP2 under `fsdp=N`, so that optimizers, clipping, checkpoints and `Run` see
what they know. A call computes the loss and adds to `.grad`, as `loss.backward()` does. Whatever cannot be captured,
or differs between ranks, runs eagerly, and `reason` says why.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from argosy.core import ArgosyError, ConfigError
from argosy.cost import Chip, Recipe, load_chip
from argosy.graph import _torch
from argosy.graph.certificate import Certificate, apply_passes, order_hash
from argosy.graph.passes import PASSES, Pass
from argosy.graph.shard import Shard
from argosy.graph.step_capture import StepGraph, capture_model
from argosy.graph.training import Training, layer_lists


class CompiledStep:
    """`loss = step(*batch)`: forward and backward of a model, as one graph."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], recipe: Recipe, mesh: DeviceMesh | None) -> None:
        self.model, self.recipe = model, recipe
        self.certificates: list[Certificate] = []
        self.reason = ""
        """Why the step runs eagerly; empty if it runs as a graph."""
        self._loss, self._mesh = loss, mesh
        self._step: StepGraph | None = None
        self._shapes: list[Any] = []

    def __call__(self, *batch: Tensor) -> Tensor:
        """Compute the loss of the batch, and add to the gradients."""
        if self._step is None or [(each.shape, each.dtype) for each in batch] != self._shapes:
            return self._eager(batch)
        named = dict(self.model.named_parameters())
        shards = self._step.shards
        flat = [local_part(named[name], each) for name, each in shards.items()]
        with torch.no_grad():
            loss, *grads = self._step.module(*flat, *self.model.buffers(), *batch)
            for (name, each), grad in zip(((n, s) for n, s in shards.items() if s.trained), grads, strict=True):
                if grad is not None:
                    self._add(named[name], each, grad)
        return loss

    def _eager(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss = self._loss(self.model, *batch)
        loss.backward()
        if self.recipe.dp > 1:
            for each in self.model.parameters():
                if each.grad is not None:
                    dist.all_reduce(each.grad, group=self._mesh.get_group("dp") if self._mesh else None)
                    each.grad /= self.recipe.dp
        return loss.detach()

    def _add(self, parameter: nn.Parameter, shard: Shard, grad: Tensor) -> None:
        if isinstance(parameter, DTensor):
            local = cast(DTensor, parameter).to_local()
            grad = DTensor.from_local(
                grad[: local.shape[0]],
                parameter.device_mesh,
                parameter.placements,
                run_check=False,
                shape=parameter.shape,
                stride=parameter.stride(),
            )
        parameter.grad = grad if parameter.grad is None else parameter.grad + grad

    def adopt(self, step: StepGraph, batch: tuple[Tensor, ...]) -> None:
        """Run this graph from now on, for batches of these shapes."""
        step.module.recompile()
        self._step, self._shapes = step, [(each.shape, each.dtype) for each in batch]


def compile(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    *,
    recipe: Recipe | str | None = None,
    chip: Chip | None = None,
    passes: Mapping[str, Pass] | None = None,
) -> CompiledStep:
    """Capture `loss(model, *batch)` with its backward pass, rewrite it, and return it ready to run on this rank.

    Every rank calls this with the same model. Under `fsdp=N` the model is sharded by FSDP2 afterwards.

    Raises:
        ConfigError: the recipe asks for `tp` or `pp`, which only predictions know, or for another number of ranks.
    """
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe or Recipe()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if recipe.tp > 1 or recipe.pp > 1 or recipe.accumulate > 1:
        raise ConfigError(
            f"a compiled step knows dp, fsdp, recompute and dtype: {recipe}",
            hint="tp and pp are predicted by `argosy plan`; for accumulation, call the step several times",
        )
    if recipe.world != ranks:
        raise ConfigError(f"the recipe is for {recipe.world} ranks, there are {ranks}")
    sizes = {dim: getattr(recipe, dim) for dim in ("dp", "fsdp") if getattr(recipe, dim) > 1}
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
    compiled = CompiledStep(model, loss, recipe, mesh)
    groups = {dim: cast(Any, mesh).get_group(dim).group_name for dim in sizes}
    found = rewritten(Training(lambda: model, lambda _: batch, loss), batch, recipe, groups, chip, passes)
    if mesh is not None and recipe.fsdp > 1:
        shard_with_fsdp2(model, mesh)
    agreed = agree(found if isinstance(found, str) else order_hash(found[0].graph))
    if agreed:
        compiled.reason = agreed if isinstance(found, tuple) else found
    else:
        assert isinstance(found, tuple)
        compiled.certificates = found[1]
        compiled.adopt(found[0], batch)
    return compiled


def rewritten(
    training: Training,
    batch: tuple[Tensor, ...],
    recipe: Recipe,
    groups: dict[str, str],
    chip: Chip | None,
    passes: Mapping[str, Pass] | None,
) -> tuple[StepGraph, list[Certificate]] | str:
    """The captured step after all passes that proved themselves, or why there is none."""
    try:
        step = capture_model(training, batch, recipe, groups, _torch.FakeTensorMode())
        return apply_passes(step, PASSES if passes is None else passes, chip or load_chip("cpu"))
    except ArgosyError as error:
        return f"not captured: {error}"


def agree(mine: str) -> str:
    """Empty if all ranks have a graph with the same collectives, else what differs."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine if mine.startswith("not captured") else ""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, mine)
    failed = [f"rank {rank}: {each}" for rank, each in enumerate(found) if each.startswith("not captured")]
    if failed:
        return failed[0]
    return "" if len(set(found)) == 1 else f"the ranks have different collectives: {', '.join(found)}"


def shard_with_fsdp2(model: nn.Module, mesh: DeviceMesh) -> None:
    """Shard each of the equal layers, then the rest, as FSDP2's users do."""
    inner = mesh["fsdp"]
    whole = mesh if mesh.ndim > 1 else inner
    for layer in [each for _, layers in layer_lists(model)[:1] for each in layers.children()]:
        fully_shard(layer, mesh=whole)
    fully_shard(model, mesh=whole)


def local_part(parameter: nn.Parameter, shard: Shard) -> Tensor:
    """This rank's rows, padded to the number that every rank has."""
    if not isinstance(parameter, DTensor):
        return parameter.detach()
    local = cast(DTensor, parameter).to_local().detach()
    missing = shard.rows - local.shape[0]
    return F.pad(local, [0, 0] * (local.dim() - 1) + [0, missing]) if missing else local
