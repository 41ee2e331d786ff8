"""A certificate says what a pass did: the same values on simulated ranks, the same rules kept, time and memory.

C1  Inputs and outputs have the same number, shapes and dtypes.
C2  Every collective is waited for before it is read, and nothing else reads it.
C3  Every rank issues the same collectives in the same order.
C4  Loss and gradients are equal on every simulated rank, bitwise or within a tolerance, in fp64.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from argosy.core import ArgosyError
from argosy.cost import Chip, memory_profile
from argosy.graph.errors import BadGraph
from argosy.graph.lowering import lower
from argosy.graph.passes import WAIT, Pass, is_collective, look, seconds
from argosy.graph.simulate import RANKS_MAX, run_ranks, world_of
from argosy.graph.step_capture import StepGraph

TOLERANCE = 1e-10
VALUES_BYTES_MAX = 2 << 30
"""Larger steps are not run: their values would take too much memory and time."""


@dataclass(frozen=True, slots=True)
class Certificate:
    """What was found about one pass."""

    name: str
    verdict: str
    """kept, unchanged or dropped."""
    reason: str
    difference: float | None
    """The largest relative difference of loss and gradients; 0 is bitwise equal, None if values were not run."""
    calls: tuple[int, int]
    collectives: tuple[int, int]
    seconds: tuple[float, float]
    """Predicted, before and after."""
    peak_bytes: tuple[float, float]

    @property
    def kept(self) -> bool:
        return self.verdict == "kept"


def apply_passes(
    step: StepGraph, passes: Mapping[str, Pass], chip: Chip, *, values: bool = True, seed: int = 0
) -> tuple[StepGraph, list[Certificate]]:
    """Apply passes one after the other; one that breaks a rule, changes values or does not pay is dropped."""
    inputs = random_inputs(step, seed) if values and values_bytes(step) <= VALUES_BYTES_MAX else None
    found: list[Certificate] = []
    with world_of(step):
        expected = run_ranks(step.copy(), *inputs) if inputs else None
        for name, each in passes.items():
            after, certificate = certify(name, each, step, chip, (inputs, expected))
            found.append(certificate)
            if certificate.kept:
                step = after
    return step, found


def certify(
    name: str, run: Pass, before: StepGraph, chip: Chip, known: tuple[Any, Any]
) -> tuple[StepGraph, Certificate]:
    """Run one pass on a copy and check what it returns; `known` are inputs and the results of the first graph."""
    difference: float | None = None
    after = before
    try:
        after = run(before.copy(), chip)
        after.graph.lint()
        check_rules(before, after)
        if order_of(run(before.copy(), chip).graph) != order_of(after.graph):
            raise BadGraph("C3: the pass gives different collectives when it runs again, as on another rank")
        if graph_text(after.graph) == graph_text(before.graph):
            return before, report(name, "unchanged", "nothing to do", 0.0, before, before, chip)
        after.module.recompile()
        inputs, expected = known
        if inputs is not None:
            difference = largest_difference(expected, run_ranks(after, *inputs))
            if difference > TOLERANCE:
                raise BadGraph(f"C4: values differ by {difference:.2g}")
        verdict, reason = pays(before, after, chip)
    except (ArgosyError, RuntimeError, AssertionError, KeyError, ValueError, TypeError, AttributeError) as error:
        verdict, reason = "dropped", str(error).splitlines()[0] if str(error) else type(error).__name__
        return before, report(name, verdict, reason, difference, before, before, chip)
    return after, report(name, verdict, reason, difference, before, after, chip)


def pays(before: StepGraph, after: StepGraph, chip: Chip) -> tuple[str, str]:
    """Whether the predicted time or the peak gets better, or neither gets worse."""
    times = seconds(before, chip), seconds(after, chip)
    peaks = memory_profile(lower(before)).peak, memory_profile(lower(after)).peak
    if times[1] > times[0] * 1.001 and peaks[1] > peaks[0] * 0.999:
        return "dropped", f"does not pay: {times[0]:.4g} s before, {times[1]:.4g} s after"
    return "kept", ""


def report(
    name: str, verdict: str, reason: str, difference: float | None, before: StepGraph, after: StepGraph, chip: Chip
) -> Certificate:
    return Certificate(
        name,
        verdict,
        reason,
        difference,
        (calls(before), calls(after)),
        (len(order_of(before.graph)), len(order_of(after.graph))),
        (seconds(before, chip), seconds(after, chip)),
        (memory_profile(lower(before)).peak, memory_profile(lower(after)).peak),
    )


def calls(step: StepGraph) -> int:
    return sum(node.op == "call_function" for node in step.graph.nodes)


def check_rules(before: StepGraph, after: StepGraph) -> None:
    """Check C1 and C2.

    Raises:
        BadGraph: one is broken; the message names it.
    """
    if ends(before.graph) != ends(after.graph):
        raise BadGraph("C1: the inputs or outputs of the graph changed")
    for node in after.graph.nodes:
        if is_collective(node) and not str(node.target).endswith("_out.default"):
            readers = list(node.users)
            if not readers or any(user.target is not WAIT for user in readers):
                raise BadGraph(f"C2: nothing waits for {node.name} before it is read")


def ends(graph: fx.Graph) -> list[Any]:
    """Shapes and dtypes of the inputs, and of the outputs."""
    found: list[Any] = []
    for node in graph.nodes:
        if node.op == "placeholder":
            found.append(look(node))
        elif node.op == "output":
            results: Any = node.args[0]
            found.append([look(each) if isinstance(each, fx.Node) else each for each in results])
    return found


def order_of(graph: fx.Graph) -> list[str]:
    """The collectives in program order: kind, shape, group."""
    return [f"{node.target} {look(node)} {node.args[1:]}" for node in graph.nodes if is_collective(node)]


def graph_text(graph: fx.Graph) -> str:
    """The graph as text that does not depend on the names of nodes."""
    number = {node: index for index, node in enumerate(graph.nodes)}

    def text(value: Any) -> str:
        return str(fx.node.map_arg(value, lambda n: f"%{number[n]}"))  # pyright: ignore

    return "\n".join(f"{node.op} {node.target} {text(node.args)} {text(node.kwargs)}" for node in graph.nodes)


def order_hash(graph: fx.Graph) -> str:
    """Equal on all ranks that issue the same collectives in the same order; other operations may know their rank."""
    return hashlib.sha256("\n".join(order_of(graph)).encode()).hexdigest()[:16]


def values_bytes(step: StepGraph) -> float:
    """What running the step in fp64 on all its ranks would take, roughly."""
    if step.recipe.world > RANKS_MAX:
        return float("inf")
    return memory_profile(lower(step)).peak * 2 * step.recipe.world


def random_inputs(step: StepGraph, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor], list[list[Tensor]]]:
    """Parameters, buffers and batches in fp64 that look like those of a fresh model; whole numbers stay small."""
    generator = torch.Generator().manual_seed(seed)
    holders = [node for node in step.graph.nodes if node.op == "placeholder"]
    values = dict(zip(step.inputs, (node.meta["val"] for node in holders), strict=True))

    def draw(shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        shape = tuple(shape)
        if dtype.is_floating_point:
            width = shape[-1] if len(shape) > 1 else 4
            return torch.randn(shape, generator=generator, dtype=torch.float64) / width**0.5
        if dtype is torch.bool:
            return torch.rand(shape, generator=generator) < 0.5
        return torch.randint(0, smallest_vocabulary(step), shape, generator=generator, dtype=dtype)

    parameters = {name: draw(each.shape, each.dtype) for name, each in step.shards.items()}
    buffers = {n[7:]: draw(v.shape, v.dtype) for n, v in values.items() if n.startswith("buffer:")}
    rows = [v for n, v in values.items() if n.startswith("batch:")]
    ranks = step.recipe.dp * step.recipe.fsdp
    return parameters, buffers, [[draw(v.shape, v.dtype) for v in rows] for _ in range(ranks)]


def smallest_vocabulary(step: StepGraph) -> int:
    """A bound for whole numbers in a batch, as indices into the smallest embedding."""
    tables = [
        node.args[0].meta["val"].shape[0]
        for node in step.graph.nodes
        if node.op == "call_function" and "aten.embedding.default" in str(node.target)
    ]
    return min([*tables, 1 << 15]) if tables else 2


def largest_difference(expected: list[list[Tensor | None]], found: list[list[Tensor | None]]) -> float:
    """The largest difference over all ranks, relative to the largest number of each tensor."""
    worst = 0.0
    for rank, (wanted, got) in enumerate(zip(expected, found, strict=True)):
        for a, b in zip(wanted, got, strict=True):
            if (a is None) != (b is None):
                raise BadGraph(f"C4: a gradient is missing on rank {rank}")
            if a is None or b is None or torch.equal(a, b):
                continue
            if not bool(torch.isfinite(b).all()):
                raise BadGraph(f"C4: values on rank {rank} are not finite")
            scale = max(float(a.abs().max()), 1e-30)
            worst = max(worst, float((a - b).abs().max()) / scale)
    return worst


def bisect(step: StepGraph, passes: Mapping[str, Pass], chip: Chip, *, tolerance: float = TOLERANCE) -> str | None:
    """The name of the first pass after which loss or gradients differ, found by halving; None if all agree.

    Raises:
        ConfigError: the step is too large to run here.
    """
    names = list(passes)
    inputs = random_inputs(step, 0)

    def agrees(count: int) -> bool:
        try:
            now = step.copy()
            for name in names[:count]:
                now = passes[name](now, chip)
            now.module.recompile()
            return largest_difference(expected, run_ranks(now, *inputs)) <= tolerance
        except (ArgosyError, RuntimeError, AssertionError, TypeError, ValueError):
            return False

    with world_of(step):
        expected = run_ranks(step.copy(), *inputs)
        good, bad = 0, len(names)
        if agrees(bad):
            return None
        while bad - good > 1:
            middle = (good + bad) // 2
            good, bad = (middle, bad) if agrees(middle) else (good, middle)
        return names[bad - 1]
