"""Decide which part of a global batch each rank gets. Pure.

S1  The shares of all ranks are the batch, each sample once, in rank order.
S2  With `micro`, the batch is cut the same way for any number of ranks; only their assignment differs.
"""

from argosy.core import ConfigError


def check_share(batch: int, micro: int | None, size: int, rank: int = 0) -> None:
    """Refuse sizes that cannot be shared, or that would leave a rank without samples in every step."""
    if not 0 <= rank < size:
        raise ConfigError(f"ranks are numbered from 0: rank {rank} of {size}")
    if batch < 1 or (micro is not None and micro < 1):
        raise ConfigError(f"batch and micro must be at least 1: batch {batch}, micro {micro}")
    if micro is not None and batch % micro:
        raise ConfigError(f"batch must be a multiple of micro: batch {batch}, micro {micro}")
    pieces = batch if micro is None else batch // micro
    if pieces < size:
        what = "samples" if micro is None else f"microbatches of {micro}"
        raise ConfigError(
            f"{size} ranks cannot share a batch of {pieces} {what}",
            hint="use a larger batch, a smaller micro, or fewer ranks",
        )


def share(count: int, micro: int | None, rank: int, size: int) -> list[tuple[int, int]]:
    """Return this rank's microbatches as (start, stop) inside a global batch of `count` samples.

    The batch at the end of the last epoch may be short: then its last microbatch is short, or, if there would be
    fewer microbatches than ranks, the batch is divided evenly.
    """
    pieces = size if micro is None else -(-count // micro)
    if micro is None or pieces < size:
        bounds = [count * piece // size for piece in range(size + 1)]
        pieces = size
    else:
        bounds = [min(piece * micro, count) for piece in range(pieces + 1)]
    mine = range(pieces * rank // size, pieces * (rank + 1) // size)
    return [(bounds[i], bounds[i + 1]) for i in mine if bounds[i] < bounds[i + 1]]
