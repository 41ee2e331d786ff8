"""Hand the regions of a step to Inductor: equal regions are compiled once, and each is checked before it is used.

Compiled code is cached on disk by torch, under the cache directory of Argosy, so that the next process only loads it.
A region that does not compile, or errs more than eager does, stays as it was, and the reason is kept.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import contextlib
import os
from collections.abc import Callable, Collection, Generator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from argosy.fabric import cache_dir
from argosy.graph import _torch
from argosy.graph.file_lock import locked
from argosy.graph.lowering import nbytes
from argosy.graph.regions import find_regions, region_key, with_compiled
from argosy.graph.simulate import widen
from argosy.graph.step_capture import StepGraph

FACTOR, ALLOWED = 4.0, 1e-5
"""A compiled region may err so many times as much as eager, and so much more relative to the largest number."""


CHECKED_BYTES_MAX = 1 << 30
"""Inputs and results of a region; checking it takes about four times as much."""


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of the regions of a step."""

    functions: dict[str, Callable[..., Any]]
    """Region key → compiled code."""
    failures: dict[str, str]
    """Region key → why it stays eager."""
    difference: float
    """The largest difference between compiled and eager results on random numbers, relative to their largest."""
    unchecked: int = 0
    """Regions that are compiled but were too large to be run on random numbers."""

    @property
    def notes(self) -> list[str]:
        """What a user should know."""
        found = [f"a part of the graph is not compiled: {each}" for each in self.failures.values()]
        if self.unchecked:
            found.append(f"compiled parts that were too large to be compared with eager: {self.unchecked}")
        return found


def compile_regions(step: StepGraph) -> Compiled:
    """Compile each distinct region of a step. Needs a C++ compiler on CPUs; without one, every region fails."""
    functions: dict[str, Callable[..., Any]] = {}
    failures: dict[str, str] = {}
    worst, unchecked = 0.0, 0
    for region in find_regions(step.graph):
        module = region.module()
        key = region_key(region, module)
        if key in functions or key in failures:
            continue
        try:
            with one_at_a_time(key):
                functions[key] = compile_module(module)
            if sum(nbytes(each.meta["val"]) for each in (*region.inputs, *region.outputs)) > CHECKED_BYTES_MAX:
                unchecked += 1
            else:
                worst = max(worst, check_region(module, functions[key]))
        except Exception as error:  # The compiler may fail in any way; the step must not.
            functions.pop(key, None)
            failures[key] = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    return Compiled(functions, failures, worst, unchecked)


def use_compiled(step: StepGraph, compiled: Compiled, keys: Collection[str]) -> tuple[fx.GraphModule, int]:
    """The step with the regions of these keys replaced by their compiled code, and how many they are."""
    keyed = [(each, region_key(each, each.module())) for each in find_regions(step.graph)]
    used = [(each, compiled.functions[key]) for each, key in keyed if key in keys]
    graph = with_compiled(step.graph, [each for each, _ in used], [function for _, function in used])
    return fx.GraphModule(step.module, graph), len(used)


def compile_module(module: fx.GraphModule) -> Callable[..., Any]:
    """Decompose and compile a graph of plain operations; the results have the strides of the eager ones."""
    mode = _torch.FakeTensorMode()
    with mode:
        inputs = [blank(node.meta["val"]) for node in module.graph.nodes if node.op == "placeholder"]
    with mode, _torch.tracing(_torch.TracingContext(mode)), torch.no_grad():
        pure = torch.func.functionalize(module, remove="mutations")
        decomposed = _torch.make_fx(pure, decomposition_table=_torch.select_decomp_table())(*inputs)
        _torch.view_to_reshape(decomposed)
        output = next(node for node in decomposed.graph.nodes if node.op == "output")
        values = [each.meta["val"] for each in output.args[0]]
        output.meta["user_visible_output_idxs"] = list(range(len(values)))
        output.meta["original_output_strides"] = [tuple(each.stride()) for each in values]
        code: Any = _torch.compile_fx_inner(decomposed, inputs, is_inference=True)

    def run(*args: Tensor) -> Any:
        return code(list(args))

    return run


def blank(value: Tensor) -> Tensor:
    """A tensor of the same look that owns its storage: compiled code does not depend on where a view begins."""
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)


def check_region(module: fx.GraphModule, compiled: Callable[..., Any]) -> float:
    """Run a region on random numbers, compiled, eager, and eager in fp64; return how far the first two are apart.

    Raises:
        ValueError: a result has another look, or errs much more than eager does.
    """
    draw = torch.Generator().manual_seed(0)
    inputs = [numbers(node.meta["val"], draw) for node in module.graph.nodes if node.op == "placeholder"]
    with torch.no_grad():
        expected, found = module(*inputs), compiled(*inputs)
        exact = widened(module)(*[each.double() if each.dtype is torch.float32 else each for each in inputs])
    worst = 0.0
    for index, (true, a, b) in enumerate(zip(exact, expected, found, strict=True)):
        if (a.shape, a.stride(), a.dtype) != (b.shape, b.stride(), b.dtype):
            raise ValueError(f"compiled result {index} has another shape, stride or dtype")
        if not torch.equal(torch.isfinite(a), torch.isfinite(b)):
            raise ValueError(f"compiled result {index} is finite in other places")
        good = torch.isfinite(a) & torch.isfinite(true)
        if not bool(good.any()):
            continue
        true, a, b = (each[good].double() for each in (true, a, b))
        scale = max(float(true.abs().max()), 1e-30)
        eager, ours = (float((each - true).abs().max()) / scale for each in (a, b))
        if ours > FACTOR * eager + ALLOWED:
            raise ValueError(f"compiled result {index} errs by {ours:.2g}, eager by {eager:.2g}")
        worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def widened(module: fx.GraphModule) -> fx.GraphModule:
    """The same computation in fp64 where it computes in fp32."""
    graph = fx.Graph()
    graph.graph_copy(module.graph, known := {})
    graph.output(tuple(known[each] for each in next(n for n in module.graph.nodes if n.op == "output").args[0]))
    widen(graph)
    return fx.GraphModule(torch.nn.Module(), graph)


def numbers(value: Tensor, draw: torch.Generator) -> Tensor:
    """Random numbers of this look, of the size of a fresh model's; whole numbers are 0 or 1, which every table has."""
    made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype)
    if value.dtype.is_floating_point:
        width = value.shape[-1] if value.dim() > 1 else 1
        return made.copy_(torch.randn(value.shape, generator=draw) / max(width, 1) ** 0.5)
    return made.copy_(torch.randint(0, 2, value.shape, generator=draw))


@contextlib.contextmanager
def one_at_a_time(key: str) -> Generator[None]:
    """Let one process of this host compile a region, in Argosy's cache, so that the others find the result on disk."""
    directory, name = cache_dir() / "inductor", "TORCHINDUCTOR_CACHE_DIR"
    before = os.environ.get(name)
    if before in (None, _torch.default_cache_dir()):  # torch itself sets it to its default, below /tmp.
        os.environ[name] = str(directory)
    try:
        with locked(directory / f"{key}.lock"):
            yield
    finally:
        os.environ.pop(name, None)
        if before is not None:
            os.environ[name] = before
