"""Decide from where a crew that has met again takes its state. Pure.

H1  All ranks decide alike: the decision depends on nothing but what all of them said.
H2  What a living rank has is preferred to what pockets hold, and that to what is on disk.
H3  Ranks whose parameters are no copies of each other go on from a step that every one of them has.
"""

from collections.abc import Sequence

import msgspec


class Told(msgspec.Struct, frozen=True):
    """What a rank says of itself when ranks meet."""

    fresh: bool
    """It has no state of its own: it has just begun, or replaces a lost rank."""
    step: int = 0
    copies: bool = True
    """The parameters of all ranks are copies of each other, as far as it knows."""
    full: list[int] = []
    """The steps of which its pocket holds all of its state."""
    undo: bool = False
    late: bool = False


class FromPeer(msgspec.Struct, frozen=True):
    """The fresh ranks take what `source` has; with `pocketed` it first takes that from its own pocket."""

    source: int
    step: int
    fresh: tuple[int, ...]
    pocketed: bool = False


class FromPockets(msgspec.Struct, frozen=True):
    """Every rank that is not at `step` takes that from its own pocket."""

    step: int


class FromDisk(msgspec.Struct, frozen=True):
    """Nobody has it in memory: the newest checkpoint, or the beginning."""


Healing = FromPeer | FromPockets | FromDisk


def decide_healing(told: Sequence[Told]) -> Healing:
    """From where the state comes."""
    alive = [rank for rank, each in enumerate(told) if not each.fresh]
    fresh = tuple(rank for rank, each in enumerate(told) if each.fresh)
    if alive and told[alive[0]].copies:
        return FromPeer(alive[0], told[alive[0]].step, fresh)
    # A rank that lives and did not pocket its newest step still has it.
    had = [{*each.full, *([] if each.fresh else [each.step])} for each in told]
    common = [step for step in had[0] if all(step in each for each in had)]
    if common:
        return FromPockets(max(common))
    pocketed = [(max(each.full), -rank) for rank, each in enumerate(told) if each.fresh and each.full and each.copies]
    if not alive and pocketed:
        step, rank = max(pocketed)
        others = tuple(each for each in fresh if each != -rank)
        return FromPeer(-rank, step, others, pocketed=True)
    return FromDisk()
