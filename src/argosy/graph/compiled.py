"""Run a captured step on real ranks: one graph for forward and backward, collectives joined, certificates kept.

The model keeps its parameters: sharded by FSDP2 under `fsdp=N`, so that optimizers, clipping, checkpoints and `Run` see
what they know. A call computes the loss and adds to `.grad`, as `loss.backward()` does. Whatever cannot be captured,
or differs between ranks, runs eagerly, and `reason` says why.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from argosy.core import ArgosyError, ConfigError
from argosy.cost import Chip, Recipe, load_chip
from argosy.graph import _torch
from argosy.graph.certificate import Certificate, order_hash
from argosy.graph.certificate_cache import apply_passes_once
from argosy.graph.inductor import compile_regions, use_compiled
from argosy.graph.passes import PASSES, Pass
from argosy.graph.shard import Shard
from argosy.graph.step_capture import StepGraph, capture_model
from argosy.graph.track_record import TrackRecord, predicted_step
from argosy.graph.training import Training, layer_lists


class CompiledStep:
    """`loss = step(*batch)`: forward and backward of a model, as one graph."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], recipe: Recipe, mesh: DeviceMesh | None) -> None:
        self.model, self.recipe = model, recipe
        self.certificates: list[Certificate] = []
        self.reason = ""
        """Why the step runs eagerly; empty if it runs as a graph."""
        self.notes: list[str] = []
        """What did not go as asked but does not matter to the result, as a part that the compiler refused."""
        self.regions = 0
        """How many parts of the graph run as compiled code."""
        self.record: TrackRecord | None = None
        """Compares the first steps with their prediction, in the journal of the run."""
        self._loss, self._mesh = loss, mesh
        self._run: Callable[..., Any] | None = None
        self._shapes: list[Any] = []
        self._shards: list[Shard] = []
        self._places: list[tuple[nn.Module, str]] = []
        self._buffers: list[tuple[nn.Module, str]] = []

    def __call__(self, *batch: Tensor) -> Tensor:
        """Compute the loss of the batch, and add to the gradients."""
        if self._run is None or [(each.shape, each.dtype) for each in batch] != self._shapes:
            return self._eager(batch)
        if self.record is not None:
            value = self.record.watch(lambda: self._graph(batch))
            self.record = None if self.record.done else self.record
            return value
        return self._graph(batch)

    def _graph(self, batch: tuple[Tensor, ...]) -> Tensor:
        assert self._run is not None
        parameters = [cast(nn.Parameter, module._parameters[key]) for module, key in self._places]
        with torch.no_grad():
            flat = [local_part(each, shard) for each, shard in zip(parameters, self._shards, strict=True)]
            loss, *grads = self._run(*flat, *[module._buffers[key] for module, key in self._buffers], *batch)
            trained = (each for each, shard in zip(parameters, self._shards, strict=True) if shard.trained)
            for parameter, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    add_gradient(parameter, grad)
        return loss

    def _eager(self, batch: tuple[Tensor, ...]) -> Tensor:
        loss = self._loss(self.model, *batch)
        loss.backward()
        if self.recipe.dp > 1 and self.recipe.fsdp == 1:
            for each in self.model.parameters():
                if each.grad is not None:
                    dist.all_reduce(each.grad, group=self._mesh.get_group("dp") if self._mesh else None)
                    each.grad /= self.recipe.dp
        return loss.detach()

    def adopt(self, step: StepGraph, module: fx.GraphModule, batch: tuple[Tensor, ...]) -> None:
        """Run this module, which is the step's or equal to it, from now on, for batches of these shapes."""
        module.recompile()
        self._shards = list(step.shards.values())
        places = {name: place for name, place in named_places(self.model, "_parameters")}
        self._places = [places[name] for name in step.shards]
        buffers = {name: place for name, place in named_places(self.model, "_buffers")}
        self._buffers = [buffers[name] for name, _ in self.model.named_buffers()]
        self._run, self._shapes = module, [(each.shape, each.dtype) for each in batch]


def named_places(model: nn.Module, kind: str) -> Iterator[tuple[str, tuple[nn.Module, str]]]:
    """Where each parameter or buffer is kept, by its name: looking them up by name at each step takes long."""
    for path, module in model.named_modules():
        for key in getattr(module, kind):
            yield f"{path}.{key}" if path else key, (module, key)


def add_gradient(parameter: nn.Parameter, grad: Tensor) -> None:
    """Add to `.grad` as autograd does: in place if there is one."""
    if isinstance(parameter, DTensor):
        rows = _torch.local_of(parameter).shape[0] if grad.dim() else 0
        grad = grad[:rows] if grad.dim() and rows != grad.shape[0] else grad
        if parameter.grad is None:
            parameter.grad = _torch.sharded_like(grad, parameter)
        else:
            _torch.local_of(parameter.grad).add_(grad)
    elif parameter.grad is None:
        parameter.grad = grad
    else:
        parameter.grad.add_(grad)


def compile(
    model: nn.Module,
    loss: Callable[..., Tensor],
    batch: tuple[Tensor, ...],
    *,
    recipe: Recipe | str | None = None,
    chip: Chip | None = None,
    passes: Mapping[str, Pass] | None = None,
    inductor: bool = True,
) -> CompiledStep:
    """Capture `loss(model, *batch)` with its backward pass, rewrite it, and return it ready to run on this rank.

    Every rank calls this with the same model. Under `fsdp=N` the model is sharded by FSDP2 afterwards. With `inductor`,
    torch's compiler takes what is between the collectives; the first time this takes a minute, later seconds.

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
        return compiled
    assert isinstance(found, tuple)
    step, compiled.certificates = found
    module = step.module
    if inductor:
        made = compile_regions(step)
        keys = agree_on(made.functions.keys())
        module, compiled.regions = use_compiled(step, made, keys)
        compiled.notes += [f"a part of the graph is not compiled: {each}" for each in made.failures.values()]
    compiled.adopt(step, module, batch)
    used = chip or load_chip("cpu")
    compiled.record = TrackRecord(predicted_step(step, used), str(recipe), used.name, compiled.regions)
    return compiled


def agree_on(keys: Iterable[str]) -> set[str]:
    """What all ranks have: replicas must compute with the same code, or they would drift apart by rounding."""
    mine = set(keys)
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return mine
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, sorted(mine))
    return mine.intersection(*found)


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
        after, certificates, _ = apply_passes_once(step, PASSES if passes is None else passes, chip or load_chip("cpu"))
        return after, certificates
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
    local = _torch.local_of(parameter)
    missing = shard.rows - local.shape[0] if isinstance(parameter, DTensor) and local.dim() else 0
    return F.pad(local, [0, 0] * (local.dim() - 1) + [0, missing]) if missing else local
