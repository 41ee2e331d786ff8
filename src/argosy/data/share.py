"""Which part of a global batch a rank works on. Pure.

S1  The shares of all ranks are the batch, each sample once, in rank order.
S2  Microbatches are cut alike for any number of ranks; only who works on them differs.
"""

from argosy.core import ConfigError


def check_share(batch: int, micro: int | None, size: int) -> None:
    """Refuse what would leave a rank without work in every step."""
    if batch < 1 or (micro is not None and micro < 1):
        raise ConfigError(f"a batch and a microbatch hold at least 1 sample: batch {batch}, micro {micro}")
    if micro is not None and batch % micro:
        raise ConfigError(f"the batch must be a multiple of the microbatch: batch {batch}, micro {micro}")
    pieces = batch if micro is None else batch // micro
    if pieces < size:
        what = "samples" if micro is None else f"microbatches of {micro}"
        raise ConfigError(
            f"{size} ranks cannot share a batch of {pieces} {what}",
            hint="use a larger batch, a smaller micro, or fewer ranks",
        )


def share(count: int, micro: int | None, rank: int, size: int) -> list[tuple[int, int]]:
    """Return this rank's microbatches as (start, stop) inside a global batch of `count` samples.

    The batch that ends the last epoch may be short: then its last microbatch is, and where there are fewer
    microbatches than ranks it is cut evenly instead.
    """
    pieces = size if micro is None else -(-count // micro)
    if micro is None or pieces < size:
        bounds = [count * piece // size for piece in range(size + 1)]
        pieces = size
    else:
        bounds = [min(piece * micro, count) for piece in range(pieces + 1)]
    mine = range(pieces * rank // size, pieces * (rank + 1) // size)
    return [(bounds[i], bounds[i + 1]) for i in mine if bounds[i] < bounds[i + 1]]
