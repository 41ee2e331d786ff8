"""Linear layer and cross-entropy in one op that never holds all logits: rows go through in chunks.

The forward pass computes the gradients too, chunk by chunk, so the backward pass only scales them: two products of the
logits are saved, and the peak is one chunk of logits.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingParameterType=false, reportUnknownParameterType=false

from typing import Any

import torch
from torch import Tensor

from argosy.kernels.contract import Kernel
from argosy.kernels.cross_entropy.cases import cases
from argosy.kernels.cross_entropy.cost import cost
from argosy.kernels.cross_entropy.reference import reference
from argosy.kernels.rows import chunk_rows, row_slopes_, row_stats

IGNORED = -100


@torch.library.custom_op("argosy::linear_cross_entropy", mutates_args=())
def fused(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The mean loss, and its gradients with respect to `hidden` and `weight`."""
    kept = targets != IGNORED
    count = kept.sum()
    total = torch.zeros((), dtype=torch.float64, device=hidden.device)
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    rows = chunk_rows(weight.shape[0], weight)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        logits = hidden[part] @ weight.t()
        label = targets[part].clamp_min(0)
        norm, chosen = row_stats(logits, label)
        total += torch.where(kept[part], norm - chosen, 0.0).double().sum()
        slope = row_slopes_(logits, label, norm, kept[part].to(norm.dtype) / count)
        torch.mm(slope, weight, out=d_hidden[part])
        d_weight.addmm_(slope.t(), hidden[part])
    return (total / count).to(hidden.dtype), d_hidden, d_weight


@fused.register_fake
def _(hidden: Tensor, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return hidden.new_empty(()), torch.empty_like(hidden), torch.empty_like(weight)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)


def backward(ctx: Any, grad: Any, _hidden: Any, _weight: Any) -> Any:
    if grad is None:
        return None, None, None
    d_hidden, d_weight = ctx.saved_tensors
    return d_hidden * grad, d_weight * grad, None


fused.register_autograd(backward, setup_context=save)


def linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """The mean cross-entropy of `hidden @ weight.T`, without holding the logits.

    `hidden` may have any number of leading dimensions, as `targets` has. A target of -100 is skipped.
    """
    return fused(hidden.reshape(-1, hidden.shape[-1]), weight, targets.reshape(-1))[0]


LINEAR_CROSS_ENTROPY = Kernel(
    name="linear_cross_entropy",
    op=linear_cross_entropy,
    overload=fused,
    reference=reference,
    cases=cases,
    cost=cost,
)
