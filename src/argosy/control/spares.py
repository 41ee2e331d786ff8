"""Decide how many spare processes a zygote keeps for each run.

While ranks are being replaced none is forked: the ranks have the cores.
"""

from collections.abc import Mapping

import msgspec

QUIET_S = 0.25
"""Spares are forked when nothing was asked of the zygote for so long."""
ORPHANED_S = 60.0
"""Without a living rank for this long a run has ended, whether or not somebody said so."""


class SpareWish(msgspec.Struct, frozen=True):
    """How many spares a run wants, and since when it has had no rank (None: it has some)."""

    count: int
    bare_since: float | None = None


def decide_spares(
    wishes: Mapping[str, SpareWish], have: Mapping[str, int], asked_at: float, now: float
) -> dict[str, int]:
    """Per run how many spares to fork (above zero) or to let go; nothing where all is as it should be."""
    changes: dict[str, int] = {}
    for run in {*wishes, *have}:
        wish = wishes.get(run, SpareWish(0))
        over = wish.bare_since is not None and now - wish.bare_since >= ORPHANED_S
        missing = (0 if over else wish.count) - have.get(run, 0)
        if missing < 0 or (missing > 0 and now - asked_at >= QUIET_S):
            changes[run] = missing
    return changes
