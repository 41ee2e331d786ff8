"""Torch's argument forms, read: options, splits, reductions. What torch may rename is here."""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false

import sys
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import wraps
from typing import Any, cast

import torch
import torch.distributed as dist

REDUCTIONS = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
_LAST_REDUCTION = 7


def reduction_options(name: Any) -> Any:
    """All-reduce options for a reduction given by name, as an operation, or not at all (sum)."""
    opts = dist.AllreduceOptions()
    if isinstance(name, str):
        name = getattr(dist.ReduceOp, name)
    if name is not None:
        opts.reduceOp = name
    return opts


def reduction_code(opts: Any) -> int:
    """The number of the reduction in options; sum without options.

    Raises:
        RuntimeError: a reduction that carries a factor, which is NCCL's alone.
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
    """A timeout of options in seconds; torch says "none given" by zero or less."""
    given = timeout.total_seconds() if isinstance(timeout, timedelta) else 0.0
    return given if given > 0 else default.total_seconds()


def split(tensor: torch.Tensor, sizes: Sequence[int], count: int) -> list[torch.Tensor]:
    """Cut along the first dimension: as `sizes` say, or evenly if they say nothing.

    Raises:
        RuntimeError: it cannot be cut so.
    """
    if sizes:
        if sum(sizes) != tensor.size(0) or len(sizes) != count:
            raise RuntimeError(f"Split sizes doesn't match total dim 0 size: {list(sizes)}, {tensor.size(0)}")
        return list(tensor.split(list(sizes)))
    if tensor.size(0) % count:
        raise RuntimeError(f"Tensor's dim 0 does not divide equally across group size: {tensor.size(0)}")
    return list(tensor.split(tensor.size(0) // count)) if tensor.size(0) else [tensor] * count


def check_whole(name: str, whole: torch.Tensor, part: torch.Tensor, size: int) -> None:
    """Raise if `whole` is not `size` times `part`, or of another type."""
    if whole.dtype != part.dtype:
        raise RuntimeError(f"{name}: tensors must have the same dtype: {whole.dtype}, {part.dtype}")
    if whole.numel() != part.numel() * size:
        raise RuntimeError(f"{name}: {whole.numel()} elements are not {size} times {part.numel()}")


def check_one_per_rank(name: str, what: str, tensors: Sequence[Any], size: int) -> None:
    """Raise if a list that holds a tensor for each rank does not."""
    if len(tensors) != size:
        raise RuntimeError(f"{name}: {len(tensors)} {what} tensors for a group of {size} ranks")


def check_root(name: str, root: int, size: int) -> None:
    """Raise if there is no such rank."""
    if not 0 <= root < size:
        raise RuntimeError(f"{name}: no rank {root} in a group of {size} ranks")


def hide_from_dynamo(kind: type, names: Sequence[str]) -> None:
    """Let torch.compile call these methods as they are. Nothing of dynamo is imported before it is in use."""
    for name in names:
        setattr(kind, name, _hidden(getattr(kind, name)))


def _recorded(method: Callable[..., Any]) -> Callable[..., Any]:
    """Seen by torch's profiler, where one runs."""

    @wraps(method)
    def recorded(*args: Any, **kwargs: Any) -> Any:
        if not cast(Any, torch.autograd)._profiler_enabled():
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
