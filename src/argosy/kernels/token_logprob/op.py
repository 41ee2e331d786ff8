"""Linear layer and log-probability of given tokens in one op that never holds all logits.

The backward pass computes the logits again, chunk by chunk; the forward pass saves one number per row.
"""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportUntypedFunctionDecorator=false, reportMissingParameterType=false, reportUnknownParameterType=false

from typing import Any

import torch
from torch import Tensor

from argosy.kernels.contract import Kernel
from argosy.kernels.rows import chunk_rows, row_slopes_, row_stats
from argosy.kernels.token_logprob.cases import cases
from argosy.kernels.token_logprob.cost import cost
from argosy.kernels.token_logprob.reference import reference


@torch.library.custom_op("argosy::linear_token_logprob", mutates_args=())
def fused(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    """The log-probabilities, and the logarithm of each row's normaliser."""
    found, norms = hidden.new_empty(hidden.shape[0]), hidden.new_empty(hidden.shape[0])
    rows = chunk_rows(weight.shape[0], weight)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        norm, chosen = row_stats(hidden[part] @ weight.t(), tokens[part])
        norms[part], found[part] = norm, chosen - norm
    return found, norms


@fused.register_fake
def _(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[Tensor, Tensor]:
    return hidden.new_empty(hidden.shape[0]), hidden.new_empty(hidden.shape[0])


@torch.library.custom_op("argosy::linear_token_logprob_backward", mutates_args=())
def slopes(grad: Tensor, hidden: Tensor, weight: Tensor, tokens: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients with respect to `hidden` and `weight`."""
    d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
    rows = chunk_rows(weight.shape[0], weight)
    for first in range(0, hidden.shape[0], rows):
        part = slice(first, first + rows)
        slope = row_slopes_(hidden[part] @ weight.t(), tokens[part], norms[part], -grad[part])
        torch.mm(slope, weight, out=d_hidden[part])
        d_weight.addmm_(slope.t(), hidden[part])
    return d_hidden, d_weight


@slopes.register_fake
def _(grad: Tensor, hidden: Tensor, weight: Tensor, tokens: Tensor, norms: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(hidden), torch.empty_like(weight)


def save(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])


def backward(ctx: Any, grad: Any, _norms: Any) -> Any:
    hidden, weight, tokens, norms = ctx.saved_tensors
    return *slopes(grad.contiguous(), hidden, weight, tokens, norms), None


fused.register_autograd(backward, setup_context=save)


def linear_token_logprob(hidden: Tensor, weight: Tensor, tokens: Tensor) -> Tensor:
    """The log-probability of each of `tokens` under softmax(`hidden @ weight.T`), without holding the logits."""
    flat = fused(hidden.reshape(-1, hidden.shape[-1]), weight, tokens.reshape(-1))[0]
    return flat.view(tokens.shape)


LINEAR_TOKEN_LOGPROB = Kernel(
    name="linear_token_logprob",
    op=linear_token_logprob,
    overload=fused,
    reference=reference,
    cases=cases,
    cost=cost,
)
