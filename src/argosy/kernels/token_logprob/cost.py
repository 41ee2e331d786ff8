"""What the op costs."""

from torch import Tensor


def cost(hidden: Tensor, weight: Tensor, tokens: Tensor) -> tuple[float, float]:
    """Forward and backward: four matrix products, and a chunk of logits moved six times."""
    rows, width, vocabulary = hidden.shape[0], hidden.shape[1], weight.shape[0]
    moved = 3 * hidden.numel() + 4 * weight.numel() + 6 * rows * vocabulary
    return 8.0 * rows * width * vocabulary, float(moved * hidden.element_size())
