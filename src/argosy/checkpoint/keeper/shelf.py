"""What a keeper holds, and which memory it gives to whom. Pure: the caller makes and closes the memory.

H1  The newest two whole versions stay, as far as `bytes_max` lets them; what is being written stays anyway.
H2  A slot that is lent is nobody else's, and what is in it does not count.
H3  The memory of all slots is at most `bytes_max`, not counting what readers still hold of slots that were given up.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from argosy.checkpoint.format import era_of

HELD = 2


@dataclass(slots=True)
class Slot:
    """One arena: of a rank, and what it holds."""

    id: int
    rank: int
    bytes: int
    phase: Literal["free", "lent", "held"] = "free"
    name: str = ""
    step: int = -1
    size: int = 0
    users: int = 0
    """How many write it now."""
    readers: int = 0
    """Others who read it as long as they like: its memory stays theirs, and is not used again."""
    durable: bool = False
    order: int = 0
    """Versions are numbered as they come: a step may be saved again."""


@dataclass(frozen=True, slots=True)
class Reuse:
    """Lend this slot."""

    slot: int


@dataclass(frozen=True, slots=True)
class Make:
    """Make a slot of so many bytes, after closing these."""

    bytes: int
    close: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Later:
    """All memory holds snapshots that are being written; something will be free."""


@dataclass(frozen=True, slots=True)
class Never:
    """It does not fit."""

    reason: str


def versions(slots: Iterable[Slot]) -> list[tuple[int, str]]:
    """The versions of which every rank's part is held, as (step, name), newest first."""
    found: dict[tuple[int, str], set[int]] = {}
    sizes: dict[tuple[int, str], int] = {}
    for slot in slots:
        if slot.phase == "held":
            found.setdefault((slot.step, slot.name), set()).add(slot.rank)
            sizes[slot.step, slot.name] = slot.size
    whole = (key for key, ranks in found.items() if len(ranks) == sizes[key])
    return sorted(whole, key=lambda key: (era_of(key[1]), *key), reverse=True)


def surplus(slots: Collection[Slot]) -> list[Slot]:
    """Held slots that nobody needs any more: older than the newest two whole versions, and not in use."""
    whole = versions(slots)
    kept = {name for _, name in whole[:HELD]}
    complete = {name for _, name in whole}
    newest = max((slot.order for slot in slots if slot.name in complete), default=-1)
    return [
        slot
        for slot in slots
        if slot.phase == "held" and not slot.users and slot.name not in kept and slot.order <= newest
    ]


def mismatch(name: str, rank: int, others: Iterable[tuple[int, str]]) -> tuple[int, str] | None:
    """The part of another rank, of `others`, that is of the same save by its number and of another step, if any."""
    attempt = name.rpartition("-")[2]
    found = ((r, other) for r, other in others if r != rank and other != name and other.rpartition("-")[2] == attempt)
    return min(found, default=None)


def choose_slot(slots: Collection[Slot], rank: int, size: int, bytes_max: int) -> Reuse | Make | Later | Never:
    """Which memory a rank gets for a snapshot of `size` bytes."""
    if size > bytes_max:
        return Never(f"a snapshot takes {size:,} bytes, bytes_max is {bytes_max:,}")
    free = [slot for slot in slots if slot.phase == "free"]
    fitting = [slot for slot in free if slot.rank == rank and slot.bytes >= size and not slot.readers]
    if fitting:
        return Reuse(min(fitting, key=lambda slot: (slot.bytes, slot.id)).id)
    # In the place of own memory that is too small, then also of memory of ranks that no longer are, then of this rank's
    # own older version: better one in memory than none.
    if sum(slot.rank == rank and slot.phase != "free" for slot in slots) <= HELD:
        used = sum(slot.bytes for slot in slots)
        for closed in ([slot for slot in free if slot.rank == rank], free):
            if used - sum(slot.bytes for slot in closed) + size <= bytes_max:
                return Make(size, tuple(slot.id for slot in closed))
    return _give_up_oldest(slots, rank, size, bytes_max)


def _give_up_oldest(slots: Collection[Slot], rank: int, size: int, bytes_max: int) -> Reuse | Make | Later | Never:
    own = [slot for slot in slots if slot.rank == rank and slot.phase != "free"]
    mine = sorted((slot for slot in own if slot.phase == "held"), key=lambda slot: slot.order)
    complete = {name for _, name in versions(slots)}
    newest = max((slot.order for slot in slots if slot.name in complete), default=-1)
    # The newest whole version goes only where there is room for one; parts of later ones wait for their other ranks.
    ready = [slot for slot in mine if not slot.users and (slot.order < newest or (slot.durable and len(own) == 1))]
    if ready:
        oldest = ready[0]
        if oldest.bytes >= size and not oldest.readers:
            return Reuse(oldest.id)
        freed = [slot for slot in slots if slot.phase == "free"] + [oldest]
        if sum(slot.bytes for slot in slots) - sum(slot.bytes for slot in freed) + size <= bytes_max:
            return Make(size, tuple(slot.id for slot in freed))
    if any(slot.users or slot.phase == "lent" or not slot.durable for slot in slots if slot.phase != "free"):
        return Later()
    return Never(f"{size:,} bytes more than other ranks' snapshots do not fit in bytes_max {bytes_max:,}")
