"""Read and check the arguments of torch's operations: options, splits, reductions. Hide methods from Dynamo."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any

import torch
import torch.distributed as dist

from argosy.collective._torch import profiler_enabled

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_LAST_REDUCTION = 7
OPERATIONS = [
    "allreduce",
    "allreduce_coalesced",
    "reduce",
    "broadcast",
    "allgather",
    "allgather_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "reduce_scatter",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "gather",
    "scatter",
    "alltoall",
    "all_to_all_single",
    "barrier",
    "send",
    "recv",
    "recv_anysource",
]
"""The methods of a group that torch calls for an operation."""


def reduction_options(name: Any) -> Any:
    """Return all-reduce options for a reduction given by name, as an operation, or None (sum)."""
    opts = dist.AllreduceOptions()
    if isinstance(name, str):
        name = getattr(dist.ReduceOp, name)
    if name is not None:
        opts.reduceOp = name
    return opts


def reduction_code(opts: Any) -> int:
    """Return the number of the reduction in options; sum without options.

    Raises:
        RuntimeError: a reduction with a factor, which only NCCL has.
    """
    if opts is None:
        return 0
    kind = opts.reduceOp
    code = int(getattr(kind, "op", kind))
    if code > _LAST_REDUCTION:
        name = REDUCTIONS[code] if code < len(REDUCTIONS) else kind
        raise RuntimeError(f"Cannot use this reduction with argosy: {name}")
    return code


def seconds(timeout: Any, default: timedelta) -> float:
    """Return a timeout of options in seconds; zero or less means none."""
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    return given if given > 0 else default.total_seconds()


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Split along the first dimension: by `sizes`, or evenly if there are none.

    Raises:
        RuntimeError: the sizes do not fit.
    """
    if sizes:
        if sum(sizes) != tensor.size(0) or len(sizes) != count:
            raise RuntimeError(f"Split sizes doesn't match total dim 0 size: {list(sizes)}, {tensor.size(0)}")
        return list(tensor.split(list(sizes)))
    if tensor.size(0) % count:
        raise RuntimeError(f"Tensor's dim 0 does not divide equally across group size: {tensor.size(0)}")
    return list(tensor.split(tensor.size(0) // count)) if tensor.size(0) else [tensor] * count


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise if `whole` is not `size` times as large as `part`, or has another type."""
    if whole.dtype != part.dtype:
        raise RuntimeError(f"{name}: tensors must have the same dtype: {whole.dtype}, {part.dtype}")
    if whole.numel() != part.numel() * size:
        raise RuntimeError(f"{name}: {whole.numel()} elements are not {size} times {part.numel()}")


def check_one_per_rank(name: str, what: str, tensors: Sequence[Any], size: int) -> None:
    """Raise unless there is one tensor for each rank."""
    if len(tensors) != size:
        raise RuntimeError(f"{name}: {len(tensors)} {what} tensors for a group of {size} ranks")


def check_root(name: str, root: int, size: int) -> None:
    """Raise if the group has no such rank."""
    if not 0 <= root < size:
        raise RuntimeError(f"{name}: no rank {root} in a group of {size} ranks")


def hide_from_dynamo(kind: type, names: Sequence[str]) -> None:
    """Let torch.compile call these methods uncompiled. Dynamo is not imported before it is in use."""
    for name in names:
        setattr(kind, name, _hidden(getattr(kind, name)))


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Record the calls of a method in torch's profiler, while one runs."""

    @wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not profiler_enabled():
            return method(*args, **kwargs)
        with torch.autograd.profiler.record_function(f"argosy:{method.__name__.lstrip('_')}"):
            return method(*args, **kwargs)

    return recorded


def _hidden(method: Callable[..., Any]) -> Callable[..., Any]:
    disabled: Callable[..., Any] | None = None
    recorded = _recorded(method)

    @wraps(method)
    def hidden(*args: Any, **kwargs: Any) -> Any:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules:
            return recorded(*args, **kwargs)
        if disabled is None:
            disabled = torch.compiler.disable(recorded)
        return disabled(*args, **kwargs)

    hidden._torchdynamo_disable = True  # type: ignore[attr-defined]
    return hidden
