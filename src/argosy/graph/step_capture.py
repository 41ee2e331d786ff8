"""Capture a whole training step as one graph, for any number of ranks, in one process, without allocating the model.

The step runs once on fake tensors under make_fx. Its inputs are the local shards of the parameters, the buffers and
the batch; its outputs the loss and the local shards of the gradients. Whatever depends on values is refused with the
line of the user's code.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import linecache
import traceback as python_traceback
from collections.abc import Generator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import argosy
from argosy.cost import Recipe
from argosy.graph import _torch
from argosy.graph.errors import CannotCapture
from argosy.graph.shard import Shard, compute_dtype, fake_world, plan_shards, spread
from argosy.graph.training import Training, layer_lists, with_layers

INNER = (str(Path(torch.__file__).parent), str(Path(argosy.__file__).parent), "<frozen", "<eval_with_key>", "<string>")
"""Files whose lines are not the user's."""


@dataclass(slots=True)
class StepGraph:
    """A captured step. `module` takes `inputs` in order and returns the loss, then one gradient per trained shard."""

    module: fx.GraphModule
    inputs: list[str]
    """`parameter:NAME`, `buffer:NAME` or `batch:NUMBER`, one per placeholder."""
    shards: dict[str, Shard]
    recipe: Recipe
    groups: dict[str, str]
    """Dimension of the recipe → name of the process group in the graph."""
    layers: int = 0
    """Equal layers of the model, also those that were not captured; 0 if there are none."""
    layers_captured: int = 0
    optimizer: fx.GraphModule | None = None
    notes: list[str] = field(default_factory=list[str])

    @property
    def graph(self) -> fx.Graph:
        return self.module.graph

    def copy(self) -> "StepGraph":
        """The same step with a graph that can be changed."""
        graph = fx.Graph()
        copied = graph.graph_copy(self.graph, {}, return_output_node=True)
        assert isinstance(copied, tuple)
        graph.output(copied[0])
        for old, new in zip(self.graph.nodes, graph.nodes, strict=True):
            new.name, new.meta = old.name, dict(old.meta)
        module = fx.GraphModule(self.module, graph)
        return StepGraph(
            module,
            self.inputs,
            self.shards,
            self.recipe,
            self.groups,
            self.layers,
            self.layers_captured,
            self.optimizer,
        )


def capture(training: Training, recipe: Recipe | None = None, *, layers: int | None = None) -> StepGraph:
    """Capture the step of one rank under `recipe`, of at most `layers` of the model's equal layers.

    Raises:
        CannotCapture: a part of the step has no place in a graph; the error names the line.
        ConfigError: the recipe does not fit the model.
    """
    recipe = recipe or Recipe()
    fake_mode = _torch.FakeTensorMode()
    with ExitStack() as stack:
        groups = stack.enter_context(fake_world(recipe)) if recipe.world > 1 else {}
        with explain():
            with torch.device("meta"):
                model = training.model()
            total = with_layers(model, layers) if layers else len_layers(model)
            with fake_mode:
                batch = training.batch(recipe.micro)
        step = capture_model(training.of_model(model), batch, recipe, groups, fake_mode)
    step.layers, step.layers_captured = total, min(layers or total, total)
    return step


def len_layers(model: nn.Module) -> int:
    return next((len(list(layers.children())) for _, layers in layer_lists(model)), 0)


def capture_model(
    training: Training, batch: tuple[Any, ...], recipe: Recipe, groups: dict[str, str], fake_mode: Any
) -> StepGraph:
    """Capture the step of a model that exists, with fake tensors in place of its own."""
    model = training.model()
    refuse_wrappers(model)
    shards = plan_shards(model, recipe)
    with fake_mode:
        locals_ = {
            name: torch.empty(each.local_shape(recipe), dtype=each.dtype, requires_grad=each.trained)
            for name, each in shards.items()
        }
        buffers = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in model.named_buffers()}
        batch = tuple(torch.empty(each.shape, dtype=each.dtype) for each in batch)

    def step(*flat: Tensor) -> Any:
        named = dict(zip(shards, flat, strict=False))
        rest = [compute_dtype(each, recipe) for each in flat[len(shards) :]]
        swapped, rows = dict(zip(buffers, rest, strict=False)), rest[len(buffers) :]
        trained = [named[name] for name, each in shards.items() if each.trained]
        with ExitStack() as stack:
            stack.enter_context(spread(model, shards, named, recipe, groups))
            stack.enter_context(_torch.swap_in_buffers(model, swapped))
            stack.enter_context(paths(model))
            stack.enter_context(recomputed(model, recipe))
            loss = training.loss(model, *rows)
            if not loss.requires_grad or loss.dim():
                raise CannotCapture(f"the loss has no gradient or is no scalar: {tuple(loss.shape)}")
            stack.enter_context(_torch.traceback.annotate({"phase": "backward"}))
            _torch.number_backward_nodes([loss.grad_fn])  # pyright: ignore[reportArgumentType]
            return loss.detach(), *torch.autograd.grad(loss, trained, allow_unused=True)

    flat = (*locals_.values(), *buffers.values(), *batch)
    with explain():
        module = trace(step, flat, fake_mode)
    copy_paths(module.graph)
    inputs = [f"parameter:{name}" for name in shards] + [f"buffer:{name}" for name in buffers]
    inputs += [f"batch:{number}" for number in range(len(batch))]
    return StepGraph(module, inputs, shards, recipe, groups)


def trace(function: Any, inputs: tuple[Any, ...], fake_mode: Any) -> fx.GraphModule:
    """Run the function once on fake inputs, recording every operation."""
    with (
        fake_mode,
        _torch.tracing(_torch.TracingContext(fake_mode)),
        _torch.traceback.preserve_node_meta(),
        torch.autograd.set_multithreading_enabled(False),
        _torch.non_strict_tracing(),
    ):
        return _torch.make_fx(function, record_stack_traces=True)(*inputs)


def refuse_wrappers(model: nn.Module) -> None:
    """Refuse models whose wrapper communicates behind autograd's back: the graph would lack that."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if kind in ("DistributedDataParallel", "FullyShardedDataParallel") or kind.startswith("FSDP"):
            raise CannotCapture(
                f"a model wrapped in {kind} cannot be captured: {name or 'the whole model'}",
                hint="hand over the plain model, and say dp=N or fsdp=N in the recipe",
            )


@contextmanager
def paths(model: nn.Module) -> Generator[None]:
    """Note on each operation in which module it was called."""
    names = {id(module): name for name, module in model.named_modules()}
    open_: list[Any] = []

    def enter(module: nn.Module, _args: Any) -> None:
        inside = _torch.traceback.annotate({"path": names[id(module)]} if id(module) in names else {})
        inside.__enter__()
        open_.append(inside)

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        open_.pop().__exit__(None, None, None)

    hooks = [_torch.register_module_forward_pre_hook(enter), _torch.register_module_forward_hook(leave)]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        while open_:  # A module that raised is never left.
            open_.pop().__exit__(None, None, None)


@contextmanager
def recomputed(model: nn.Module, recipe: Recipe) -> Generator[None]:
    """With `recompute=full`, let each of the equal layers keep its input only and run again in the backward pass."""
    layers = [each for _, found in layer_lists(model)[:1] for each in found.children()]
    if recipe.recompute != "full" or not layers:
        yield
        return
    kept = [(layer, layer.__class__) for layer in layers]

    def around(cls: type[nn.Module]) -> Any:
        return lambda self, *args, **kw: checkpoint(  # pyright: ignore
            cls.forward, self, *args, use_reentrant=False, preserve_rng_state=False, **kw
        )

    try:
        for layer, cls in kept:
            layer.__class__ = type(cls.__name__, (cls,), {"forward": around(cls)})
        with set_checkpoint_early_stop(False):  # Hooks that opened a module must see it close.
            yield
    finally:
        for layer, cls in kept:
            layer.__class__ = cls


def copy_paths(graph: fx.Graph) -> None:
    """Give each operation its phase, and each operation of the backward pass the module and line of its forward one."""
    forward: dict[int, fx.Node] = {}
    phase = "forward"
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        custom: dict[str, Any] = node.meta.get("custom") or {}
        if custom.get("phase") == "backward":
            phase = "backward"
        number = node.meta.get("seq_nr")
        if phase == "forward" and number is not None:
            forward[number] = node
        origin = forward.get(number) if phase == "backward" and number is not None else None
        known = {**((origin.meta.get("custom") or {}) if origin else {}), **custom}
        node.meta["argosy"] = {
            "phase": phase,
            "path": known.get("path", ""),
            "line": line_of(node) or (line_of(origin) if origin else ""),
        }


def line_of(node: fx.Node) -> str:
    """The innermost line of the user's code that led to this operation, as `file:number`."""
    text: str = node.meta.get("stack_trace") or ""
    for line in reversed(text.splitlines()):
        stripped = line.strip()
        if stripped.startswith('File "'):
            file, _, rest = stripped.removeprefix('File "').partition('", line ')
            if not file.startswith(INNER):
                return f"{file}:{rest.partition(',')[0]}"
    return ""


@contextmanager
def explain() -> Generator[None]:
    """Turn what torch raises while a step is captured into a refusal that names the line."""
    try:
        yield
    except CannotCapture:
        raise
    except _torch.DATA_DEPENDENT as error:
        raise CannotCapture(
            "the course of the step depends on the values of tensors",
            user_line(error),
            hint="replace the branch, loop or .item() by torch.where or masking",
        ) from error
    except _torch.UnknownOperator as error:
        raise CannotCapture(
            f"an operation has no fake implementation: {error}",
            user_line(error),
            hint="register one with torch.library.register_fake",
        ) from error
    except (RuntimeError, NotImplementedError, ValueError, TypeError, AttributeError, AssertionError) as error:
        first = (str(error).strip().splitlines() or [""])[0]
        raise CannotCapture(
            f"the step failed on fake tensors: {type(error).__name__}: {first}", user_line(error)
        ) from error


def user_line(error: BaseException) -> str:
    """The innermost line of the user's code in a traceback, with its text."""
    frames = [each for each in python_traceback.extract_tb(error.__traceback__) if not each.filename.startswith(INNER)]
    if not frames:
        return ""
    last = frames[-1]
    return f"{last.filename}:{last.lineno}: {linecache.getline(last.filename, last.lineno or 0).strip()}"


def capture_optimizer(training: Training, step: StepGraph, fake_mode: Any = None) -> fx.GraphModule:
    """Capture one update of the trained shards: parameters, then gradients, then the optimizer's state; in place.

    Raises:
        CannotCapture: the training names no optimizer, or it cannot be captured.
    """
    if training.optimizer is None:
        raise CannotCapture(
            "the training names no optimizer", hint="Training(optimizer=lambda p: torch.optim.AdamW(p))"
        )
    fake_mode = fake_mode or _torch.FakeTensorMode()
    make = training.optimizer
    trained = {name: each for name, each in step.shards.items() if each.trained}
    with explain(), fake_mode:
        params = [nn.Parameter(torch.empty(s.local_shape(step.recipe), dtype=s.dtype)) for s in trained.values()]
        optimizer = make(params)
        for each in params:
            each.grad = torch.empty_like(each)
        optimizer.step()  # Makes the state.
        state = optimizer.state_dict()
        flat, spec = _torch.tree_flatten(state)  # pyright: ignore
    tensors = [each for each in flat if isinstance(each, Tensor)]

    def update(*inputs: Tensor) -> None:
        count = len(params)
        moving = iter(inputs[2 * count :])
        swapped = [next(moving) if isinstance(each, Tensor) else each for each in flat]
        loaded = _torch.tree_unflatten(swapped, spec)  # pyright: ignore
        with _torch.swap_in_optimizer(optimizer, dict(zip(trained, inputs[:count], strict=True)), loaded):
            for target, grad in zip(inputs[:count], inputs[count : 2 * count], strict=True):
                target.grad = grad
            optimizer.step()

    with explain(), torch.no_grad():
        return trace(update, (*params, *[each.grad for each in params], *tensors), fake_mode)


def fake_inputs(step: StepGraph) -> Mapping[str, Any]:
    """The fake value of each input."""
    holders = [node for node in step.graph.nodes if node.op == "placeholder"]
    return {name: node.meta["val"] for name, node in zip(step.inputs, holders, strict=True)}
