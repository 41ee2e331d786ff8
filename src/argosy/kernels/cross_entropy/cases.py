"""Inputs that the op is tested with."""

import torch
from torch import Tensor


def case(rows: int, width: int, vocabulary: int, dtype: torch.dtype, scale: float = 1.0) -> tuple[Tensor, ...]:
    draw = torch.Generator().manual_seed(rows * width + vocabulary)
    hidden = torch.randn(rows, width, generator=draw, dtype=dtype) * scale
    weight = torch.randn(vocabulary, width, generator=draw, dtype=dtype) / width**0.5
    return hidden, weight, torch.randint(vocabulary, (rows,), generator=draw)


def cases(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Small; one row; odd sizes; skipped targets; huge logits; more rows than a chunk."""
    skipped = case(7, 5, 11, dtype)
    skipped[2][::2] = -100
    return [
        case(3, 4, 6, dtype),  # Three rows: a third is not exact, so that a factor in fp32 shows in fp64.
        case(1, 1, 2, dtype),
        case(33, 17, 101, dtype),
        skipped,
        case(5, 4, 9, dtype, scale=1e4),
        case(80, 8, 70_000, dtype),
    ]
