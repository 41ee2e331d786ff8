"""Run a captured step on real ranks: one graph for forward and backward, collectives joined, certificates kept.

The model keeps its parameters: sharded by FSDP2 under `fsdp=N`, split by torch's tensor parallelism under `tp=N`, so
that optimizers, checkpoints and `Run` see what they know. A call computes the loss and adds to `.grad`, as
`loss.backward()` does. Whatever cannot be captured, or differs between ranks, runs eagerly, and `reason` says why.
"""

# pyright: reportPrivateUsage=false, reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from argosy.core import ArgosyError, ConfigError
from argosy.cost import Chip, Recipe, load_chip
from argosy.graph import _torch
from argosy.graph.agreement import agree
from argosy.graph.certificate import Certificate, order_hash
from argosy.graph.certificate_cache import apply_passes_once
from argosy.graph.inductor import Compiled, compile_regions, use_compiled
from argosy.graph.passes import PASSES, Pass
from argosy.graph.shard import Shard, split_kind
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

    def __call__(self, *batch: Tensor, scale: float = 1.0) -> Tensor:
        """Compute the loss of the batch, and add `scale` times its gradients, as `(loss * scale).backward()` does."""
        if self._run is None or [(each.shape, each.dtype) for each in batch] != self._shapes:
            return self._eager(batch, scale)
        if self.record is not None:
            value = self.record.watch(lambda: self._graph(batch, scale))
            self.record = None if self.record.done else self.record
            return value
        return self._graph(batch, scale)

    def _graph(self, batch: tuple[Tensor, ...], scale: float) -> Tensor:
        assert self._run is not None
        parameters = [cast(nn.Parameter, module._parameters[key]) for module, key in self._places]
        with torch.no_grad():
            flat = [local_part(each, shard) for each, shard in zip(parameters, self._shards, strict=True)]
            loss, *grads = self._run(*flat, *[module._buffers[key] for module, key in self._buffers], *batch)
            trained = (each for each, shard in zip(parameters, self._shards, strict=True) if shard.trained)
            for parameter, grad in zip(trained, grads, strict=True):
                if grad is not None:
                    add_gradient(parameter, grad if scale == 1.0 else grad * scale)
        return loss

    def _eager(self, batch: tuple[Tensor, ...], scale: float) -> Tensor:
        before = {id(each): each.grad for each in self.model.parameters()} if self._sums_by_hand else {}
        if before:
            self.model.zero_grad()
        loss = self._loss(self.model, *batch)
        (loss * scale).backward()
        for each in self.model.parameters() if before else ():
            if each.grad is not None:
                assert self._mesh is not None
                dist.all_reduce(each.grad, group=self._mesh.get_group("dp"))
                each.grad /= self.recipe.dp
            if (kept := before[id(each)]) is not None:
                each.grad = kept if each.grad is None else kept + each.grad
        return loss.detach()

    @property
    def _sums_by_hand(self) -> bool:
        """Whether nobody else sums gradients over `dp` when the step runs eagerly."""
        return self.recipe.dp > 1 and self.recipe.fsdp == 1

    def adopt(self, step: StepGraph, module: fx.GraphModule, batch: tuple[Tensor, ...]) -> None:
        """Run this module, which is the step's or equal to it, from now on, for batches of these shapes."""
        module.recompile()
        self._shards = list(step.shards.values())
        places = dict(named_places(self.model, "_parameters"))
        self._places = [places[name] for name in step.shards]
        buffers = dict(named_places(self.model, "_buffers"))
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
        ConfigError: the recipe asks for `pp`, which only predictions know, or for another number of ranks.
    """
    recipe = Recipe.parse(recipe) if isinstance(recipe, str) else recipe or Recipe()
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if recipe.pp > 1 or recipe.accumulate > 1:
        raise ConfigError(
            f"a compiled step knows dp, fsdp, tp, recompute and dtype: {recipe}",
            hint="pp is predicted by `argosy plan`; for accumulation, call the step several times",
        )
    if recipe.world != ranks:
        raise ConfigError(f"the recipe is for {recipe.world} ranks, there are {ranks}")
    sizes = {dim: getattr(recipe, dim) for dim in ("dp", "fsdp", "tp") if getattr(recipe, dim) > 1}
    device = device_of(model)
    mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes)) if sizes else None
    compiled = CompiledStep(model, loss, recipe, mesh)
    groups = {dim: cast(Any, mesh).get_group(dim).group_name for dim in sizes}
    found = rewritten(Training(lambda: model, lambda _: batch, loss), batch, recipe, groups, chip, passes)
    if mesh is not None:
        shard_model(model, mesh, recipe)
    if isinstance(found, str):
        compiled.reason = agree("", (), found).reason or found
        return compiled
    step, compiled.certificates = found
    made = compile_regions(step) if inductor else Compiled({}, {}, 0.0)
    agreed = agree(order_hash(step.graph), made.functions.keys(), "")
    if agreed.reason:
        compiled.reason = agreed.reason
        return compiled
    module, compiled.regions = use_compiled(step, made, agreed.regions) if agreed.regions else (step.module, 0)
    compiled.notes += made.notes
    compiled.adopt(step, module, batch)
    used = chip or load_chip("cpu")
    compiled.record = TrackRecord(predicted_step(step, used), str(recipe), used.name, compiled.regions)
    return compiled


def device_of(model: nn.Module) -> str:
    return next((each.device.type for each in model.parameters()), "cpu")


def rewritten(
    training: Training,
    batch: tuple[Tensor, ...],
    recipe: Recipe,
    groups: dict[str, str],
    chip: Chip | None,
    passes: Mapping[str, Pass] | None,
) -> tuple[StepGraph, list[Certificate]] | str:
    """The captured step after all passes that proved themselves, or why there is none."""
    if (device := device_of(training.model())) != "cpu":
        return f"not captured: compiled steps run on CPUs so far, and the model is on {device}"
    try:
        step = capture_model(training, batch, recipe, groups, _torch.FakeTensorMode())
        after, certificates, _ = apply_passes_once(step, PASSES if passes is None else passes, chip or load_chip("cpu"))
        return after, certificates
    except ArgosyError as error:
        return f"not captured: {error}"


def shard_model(model: nn.Module, mesh: DeviceMesh, recipe: Recipe) -> None:
    """Split linear layers by torch's tensor parallelism, then shard by FSDP2: the equal layers each, then the rest."""
    if recipe.tp > 1:
        kinds = {path: split_kind(path, module) for path, module in model.named_modules()}
        styles = {"column": ColwiseParallel, "row": RowwiseParallel}
        parallelize_module(model, mesh["tp"], {path: styles[kind]() for path, kind in kinds.items() if kind})
    if recipe.fsdp > 1:
        whole = mesh["dp", "fsdp"] if recipe.dp > 1 else mesh["fsdp"]
        for layer in [each for _, layers in layer_lists(model)[:1] for each in layers.children()]:
            fully_shard(layer, mesh=whole)
        fully_shard(model, mesh=whole)


def local_part(parameter: nn.Parameter, shard: Shard) -> Tensor:
    """This rank's rows, padded to the number that every rank has."""
    local = _torch.local_of(parameter)
    missing = shard.rows - local.shape[0] if isinstance(parameter, DTensor) and local.dim() else 0
    return F.pad(local, [0, 0] * (local.dim() - 1) + [0, missing]) if missing else local
