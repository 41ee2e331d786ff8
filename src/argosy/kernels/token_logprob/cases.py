"""Inputs that the op is tested with."""

import torch
from torch import Tensor


def cases(dtype: torch.dtype) -> list[tuple[Tensor, ...]]:
    """Small; one row; odd sizes; huge logits; more rows than a chunk."""
    found: list[tuple[Tensor, ...]] = []
    for rows, width, vocabulary, scale in (
        *((4, 3, 6, 1.0), (1, 1, 2, 1.0), (33, 17, 101, 1.0)),
        *((5, 4, 9, 1e4), (80, 8, 70_000, 1.0)),
    ):
        draw = torch.Generator().manual_seed(rows * width + vocabulary)
        hidden = torch.randn(rows, width, generator=draw, dtype=dtype) * scale
        weight = torch.randn(vocabulary, width, generator=draw, dtype=dtype) / width**0.5
        found.append((hidden, weight, torch.randint(vocabulary, (rows,), generator=draw)))
    return found
