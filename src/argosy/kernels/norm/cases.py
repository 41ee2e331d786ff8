"""Inputs that the op is tested with."""

import torch
from torch import Tensor


def cases(dtype: torch.dtype) -> list[tuple[list[Tensor]]]:
    """Usual; a single number; blocks and a rest; an infinity; a NaN; numbers whose squares overflow fp32; strides."""
    draw = torch.Generator().manual_seed(0)

    def some(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw, dtype=dtype)

    return [
        ([some(3, 4), some(5)],),
        ([torch.tensor(2.0, dtype=dtype)],),
        ([some(200_001)],),
        ([some(7), torch.tensor([1.0, float("inf")], dtype=dtype)],),
        ([torch.tensor([float("nan"), 1.0], dtype=dtype), some(9)],),
        ([torch.full((11,), 1e30, dtype=dtype)],),
        ([some(6, 8).t(), some(0)],),
    ]
