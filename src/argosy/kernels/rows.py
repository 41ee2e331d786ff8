"""What the kernels do to rows of logits: by Triton on a GPU, by torch elsewhere."""

import os
from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

LOGITS_BYTES = 16 << 20
"""What one chunk of logits may take on a CPU, whose caches are small."""
LOGITS_BYTES_GPU = 256 << 20


def chunk_rows(columns: int, like: Tensor) -> int:
    """Rows of a chunk, by sizes and kind of device alone: the bits must not depend on the machine."""
    limit = LOGITS_BYTES if like.device.type == "cpu" else LOGITS_BYTES_GPU
    return max(32, limit // max(1, columns * like.element_size()))


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None


def by_triton(value: Tensor) -> bool:
    """Whether Triton runs on this tensor: on a GPU, or in its interpreter."""
    return (value.is_cuda or os.environ.get("TRITON_INTERPRET") == "1") and has_triton()


def row_stats(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """For each row: the logarithm of the sum of exponentials, and the logit of its target."""
    if by_triton(logits):
        from argosy.kernels.triton_rows import stats

        return stats(logits, targets)
    return logits.logsumexp(-1), logits.gather(1, targets[:, None])[:, 0]


def row_slopes_(logits: Tensor, targets: Tensor, norms: Tensor, weights: Tensor) -> Tensor:
    """In place: the gradient of each row's norm minus its target's logit, times the row's weight; 0 where that is."""
    if by_triton(logits):
        from argosy.kernels.triton_rows import slopes_

        return slopes_(logits, targets, norms, weights)
    slope = logits.sub_(norms[:, None]).exp_()
    label = targets[:, None]
    slope.scatter_add_(1, label, torch.full_like(label, -1, dtype=slope.dtype))
    slope.mul_(weights[:, None])
    return slope.masked_fill_((weights == 0)[:, None], 0.0)
