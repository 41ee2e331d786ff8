"""Replace the failed rank alone."""

from collections.abc import Mapping, Sequence


def affected(failed: int, dims: Mapping[str, int], along: str) -> Sequence[int]:
    """The failed rank."""
    return (failed,)
