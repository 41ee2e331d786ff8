"""Decide from where ranks that have met again take their state. Pure.

H1  All ranks decide alike: the decision depends on nothing but what all of them said.
H2  What a living rank has is preferred to what arenas hold, and that to what is on disk.
H3  Ranks that hold parts of their own continue from one version that every one of them has: same step, same attempt.
H4  If a rank is torn, what the others made of that step may differ: all go back to a version that all hold.
H5  A vote in doubt ends the same way everywhere. Replicas: if any rank applied the step, all have it. Parts of one's
    own: if a part of the new version is missing, all go back to the one before.
"""

from collections.abc import Collection, Sequence

import msgspec


class Version(msgspec.Struct, frozen=True):
    """The state after `step` steps, as it was made in `view`: another attempt makes another version."""

    step: int = 0
    view: int = 0


class Told(msgspec.Struct, frozen=True):
    """What a rank says of itself when ranks meet."""

    fresh: bool
    """It has no state of its own: it has just begun, or replaces a lost rank."""
    version: Version = Version()
    replicated: bool = True
    """The parameters of all ranks are replicas of each other."""
    torn: bool = False
    """Its last step failed after the vote: its live state belongs to no step."""
    held: list[Version] = []
    """What its arena holds of its own state."""
    undo: bool = False
    late: bool = False


class FromPeer(msgspec.Struct, frozen=True):
    """The ranks `to` take the version that `source` has."""

    source: int
    version: Version
    to: tuple[int, ...]


class FromArenas(msgspec.Struct, frozen=True):
    """Every rank that does not have `version` takes it from its own arena."""

    version: Version


class FromDisk(msgspec.Struct, frozen=True):
    """Nobody has it in memory: the newest checkpoint, or the beginning."""


Healing = FromPeer | FromArenas | FromDisk


def decide_healing(told: Sequence[Told]) -> Healing:
    """From where the state comes."""
    torn = any(each.torn for each in told)
    if all(each.replicated for each in told):
        alive = [rank for rank, each in enumerate(told) if not each.fresh]
        if torn or not alive:
            return FromDisk()  # H4
        version = newest([told[rank].version for rank in alive])
        source = next(rank for rank in alive if told[rank].version == version)
        return FromPeer(source, version, tuple(rank for rank, each in enumerate(told) if _lacks(each, version)))  # H5
    had = [{*each.held, *([] if each.fresh or each.torn else [each.version])} for each in told]
    common = set[Version].intersection(*had)
    return FromArenas(newest(common)) if common else FromDisk()  # H3, H5


def newest(versions: Collection[Version]) -> Version:
    """The newest: what was made in a later view is newer, even if it is of an earlier step."""
    return max(versions, key=lambda version: (version.view, version.step))


def _lacks(told: Told, version: Version) -> bool:
    return told.fresh or told.version != version
