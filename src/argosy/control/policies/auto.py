"""Replace the failed rank alone where `argosy.Run` owns the step loop; elsewhere the first failure ends the run.

`decide_restart` tells the two cases apart itself, before it asks a policy.
"""

from collections.abc import Mapping, Sequence


def affected(failed: int, dims: Mapping[str, int], along: str) -> Sequence[int]:
    """The failed rank: asked only where that is possible."""
    return (failed,)
