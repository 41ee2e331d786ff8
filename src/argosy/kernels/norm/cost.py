"""What the op costs."""

from torch import Tensor


def cost(values: list[Tensor]) -> tuple[float, float]:
    """Two operations per number, each read once."""
    count = sum(each.numel() for each in values)
    return 2.0 * count, float(sum(each.numel() * each.element_size() for each in values))
