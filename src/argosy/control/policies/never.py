"""Replace nothing: the first failure ends the run."""

from collections.abc import Mapping, Sequence


def affected(failed: int, dims: Mapping[str, int], along: str) -> Sequence[int]:
    """No rank."""
    return ()
