"""Triton versions of what the kernels do to rows of logits and to long lists of numbers.

Matrix products stay torch's. These run on GPUs; with TRITON_INTERPRET=1 they run on CPU tensors, for tests of values.
No GPU has run them: `offline.py` compiles them for several, and a test pins what registers and memory they take.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportMissingTypeStubs=false, reportUntypedFunctionDecorator=false, reportMissingParameterType=false
# pyright: reportUnknownParameterType=false, reportIndexIssue=false, reportOperatorIssue=false

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

COLUMNS, NUMBERS = 2048, 4096
"""What one program takes at once: columns of a row, numbers of a list."""


@triton.jit
def row_stats(logits, targets, norms, labels, columns, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """For each row: the logarithm of the sum of exponentials, and the logit of its target."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    best = tl.full((), -float("inf"), WIDE)
    total = tl.zeros((), WIDE)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < columns, other=-float("inf")).to(WIDE)
        peak = tl.maximum(best, tl.max(x, 0))
        total = total * tl.exp(best - peak) + tl.sum(tl.exp(x - peak), 0)
        best = peak
    tl.store(norms + row, best + tl.log(total))
    tl.store(labels + row, tl.load(start + tl.load(targets + row)).to(WIDE))


@triton.jit
def row_slopes(logits, targets, norms, weights, columns, stride, BLOCK: tl.constexpr, WIDE: tl.constexpr):
    """In place: the gradient of each row's norm minus its target's logit, times the weight of the row."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * stride
    norm, weight, target = tl.load(norms + row), tl.load(weights + row), tl.load(targets + row)
    for first in range(0, columns, BLOCK):
        at = first + tl.arange(0, BLOCK)
        x = tl.load(start + at, mask=at < columns, other=0.0).to(WIDE)
        slope = tl.exp(x - norm)
        slope = tl.where(at == target, slope - 1, slope) * weight
        slope = tl.where(weight == 0, 0.0, slope)
        tl.store(start + at, slope.to(logits.dtype.element_ty), mask=at < columns)


@triton.jit
def block_squares(numbers, sums, count, BLOCK: tl.constexpr):
    """The sum of squares of each block, in fp64: the squares of fp32 numbers cannot overflow it."""
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(numbers + at, mask=at < count, other=0.0).to(tl.float64)
    tl.store(sums + block, tl.sum(x * x, 0))


def wide(dtype: torch.dtype) -> Any:
    return tl.float64 if dtype is torch.float64 else tl.float32


def stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Norms and logits of the targets, by row."""
    rows, columns = logits.shape
    dtype = torch.promote_types(logits.dtype, torch.float32)
    norms, labels = (torch.empty(rows, dtype=dtype, device=logits.device) for _ in range(2))
    launch: Any = row_stats
    launch[(rows,)](logits, targets, norms, labels, columns, logits.stride(0), BLOCK=COLUMNS, WIDE=wide(logits.dtype))
    return norms, labels


def slopes_(logits: Tensor, targets: Tensor, norms: Tensor, weights: Tensor) -> Tensor:
    """Turn logits into slopes, in place."""
    rows, columns = logits.shape
    launch: Any = row_slopes
    launch[(rows,)](logits, targets, norms, weights, columns, logits.stride(0), BLOCK=COLUMNS, WIDE=wide(logits.dtype))
    return logits


def squares(flat: Tensor) -> Tensor:
    """The sum of squares of a contiguous list of numbers, in fp64; the same bits each time."""
    blocks = triton.cdiv(flat.numel(), NUMBERS)
    sums = torch.zeros(max(blocks, 1), dtype=torch.float64, device=flat.device)
    launch: Any = block_squares
    if blocks:
        launch[(blocks,)](flat, sums, flat.numel(), BLOCK=NUMBERS)
    return sums.sum()
