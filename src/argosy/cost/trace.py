"""A step as the cost model sees it: operations in program order, what they need, move, keep and free.

`graph` makes a Trace of a captured step. Nothing here imports torch.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

GRADIENT = ("reduce_scatter", "all_reduce")


@dataclass(frozen=True, slots=True)
class Collective:
    """What one rank takes part in."""

    kind: str
    """all_gather, reduce_scatter, all_reduce or all_to_all."""
    dim: str
    """The dimension of the recipe whose ranks take part."""
    bytes: float
    """The whole payload: what is gathered, scattered or reduced, not one rank's part."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of a step."""

    name: str
    kind: str
    """matmul, attention, memory, view or collective."""
    phase: str
    """forward, backward or optimizer."""
    flops: float = 0.0
    bytes: float = 0.0
    dtype: str = "fp32"
    needs: tuple[int, ...] = ()
    """Indices of the operations whose results it reads."""
    collective: Collective | None = None
    allocates: float = 0.0
    frees: float = 0.0
    """Bytes whose last reader this is."""
    holds: str = ""
    """What the allocated bytes are: activation, gathered, gradient or temporary."""
    path: str = ""
    line: str = ""


@dataclass(frozen=True, slots=True)
class Trace:
    """A step of one rank."""

    ops: tuple[Op, ...]
    resident: dict[str, float]
    """Bytes that are there before the step and after it, by class: parameter, buffer, batch, optimizer."""
    layers: int = 0
    """How many equal layers were captured; 0 if the model has none."""

    def total(self, value: Callable[[Op], float], phase: str | None = None) -> float:
        return sum(value(op) for op in self.ops if phase in (None, op.phase))

    @property
    def flops(self) -> float:
        return self.total(lambda op: op.flops)

    def without(self, dim: str) -> "Trace":
        """The same trace where collectives of a dimension cost nothing, as in all micro-batches but the last."""
        return replace(self, ops=tuple(skip(op) if is_of(op, dim) else op for op in self.ops))


def is_of(op: Op, dim: str) -> bool:
    return op.collective is not None and op.collective.dim == dim


def skip(op: Op) -> Op:
    return replace(op, kind="view", collective=None, flops=0.0, bytes=0.0)


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Bytes of one rank over a step."""

    peak: float
    resident: dict[str, float]
    at_peak: dict[str, float]
    """What the bytes beyond the resident ones are, at the peak."""
    peak_op: str
    between: float
    """What the forward pass leaves for the backward pass."""
    over_time: tuple[dict[str, float], ...] = ()
    """Live bytes by class while each operation runs, beyond the resident ones."""


def memory_profile(trace: Trace) -> MemoryProfile:
    """Follow live bytes over the step. A freed byte is charged to the class that allocated most recently held it."""
    base = sum(trace.resident.values())
    live, peak, where, between = 0.0, 0.0, "", 0.0
    held: dict[str, float] = {}
    at_peak: dict[str, float] = {}
    over_time: list[dict[str, float]] = []
    for op in trace.ops:
        live += op.allocates
        if op.allocates:
            held[op.holds] = held.get(op.holds, 0.0) + op.allocates
        over_time.append({name: bytes_ for name, bytes_ in held.items() if bytes_ > 0})
        if live > peak:
            peak, where, at_peak = live, f"{op.name} {op.path}".strip(), dict(held)
        live -= op.frees
        for name, freed in freed_classes(op, held):
            held[name] -= freed
        if op.phase == "forward":
            between = live
    return MemoryProfile(base + peak, dict(trace.resident), at_peak, where, between, tuple(over_time))


def freed_classes(op: Op, held: dict[str, float]) -> Iterable[tuple[str, float]]:
    """Split freed bytes over the classes in the order temporary, gathered, activation, gradient."""
    left = op.frees
    for name in ("temporary", "gathered", "activation", "gradient"):
        part = min(left, held.get(name, 0.0))
        if part > 0:
            yield name, part
            left -= part
