"""One sweep over many tensors: the sum of squares, from which the finite check follows.

An infinity or NaN anywhere makes the sum of its tensor infinite or NaN, and it cannot come from finite numbers of fp32
or less, because the sum is in fp64.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false

import torch
from torch import Tensor

from argosy.kernels.contract import Kernel
from argosy.kernels.norm.cases import cases
from argosy.kernels.norm.cost import cost
from argosy.kernels.norm.reference import reference
from argosy.kernels.rows import by_triton

BLOCK = 1 << 16
"""Numbers that are summed at once in the sum's own order, whatever the number of threads."""


def squares(value: Tensor) -> Tensor:
    """The sum of squares in fp64, by blocks, so that the bits do not depend on threads."""
    flat = value.detach().reshape(-1)
    if by_triton(flat):
        from argosy.kernels.triton_rows import squares as by_blocks

        return by_blocks(flat)
    whole = flat.numel() // BLOCK * BLOCK
    norms = [torch.linalg.vector_norm(flat[whole:], dtype=torch.float64).square()]
    if whole:
        blocks = torch.linalg.vector_norm(flat[:whole].view(-1, BLOCK), dim=1, dtype=torch.float64)
        norms.append(blocks.square().sum())
    return torch.stack(norms).sum()


@torch.library.custom_op("argosy::finite_norm", mutates_args=())
def fused(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of squares of all numbers, and whether all are finite."""
    total = torch.stack([squares(each) for each in values]).sum()
    return total, torch.isfinite(total)


@fused.register_fake
def _(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    return values[0].new_empty((), dtype=torch.float64), values[0].new_empty((), dtype=torch.bool)


def finite_norm(values: list[Tensor]) -> tuple[Tensor, Tensor]:
    """The sum of squares of all numbers in fp64, and whether all are finite."""
    return fused(values)


FINITE_NORM = Kernel(
    name="finite_norm",
    op=finite_norm,
    overload=fused,
    reference=reference,
    cases=cases,
    cost=cost,
    differentiable=False,
)
