"""Decide who keeps whom waiting, from the progress pages of all ranks.

Pure. A page tells how many collectives of each group a rank has issued: in a group that hangs, whoever has
issued fewest has not arrived. Where that rank is instead (its stack) is on no page: the caller passes it in.
"""

from collections.abc import Mapping

import msgspec

from argosy.core import format_ranks
from argosy.observe.progress import P2P_OPS, GroupProgress, Progress


class Absence(msgspec.Struct, frozen=True):
    """One group in which some ranks have issued a collective that others have not."""

    group: str
    op: str
    number: int
    """Of the collective that the waiting ranks are in, counted from 1 within the group."""
    site: str
    """Where the lowest waiting rank issued it."""
    waiting: tuple[int, ...]
    absent: tuple[int, ...]
    """Ranks that have not arrived; in a mismatch, those that are in another operation."""
    other: str = ""
    """In a mismatch: what the absent ranks issued as the same number."""
    other_site: str = ""
    elsewhere: tuple[int, ...] = ()
    """Those of `absent` that themselves wait in another group: more victim than culprit."""

    def line(self, places: Mapping[int, str] | None = None) -> str:
        """`ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41`; `places` are of stacks, by rank."""
        who = _ranks(self.waiting)
        verb = "waits" if len(self.waiting) == 1 else "wait"
        parts = [f"{who} {verb} in {self.op or 'a collective'} #{self.number}"]
        found = places or {}
        by_place: dict[str, list[int]] = {}
        for rank in self.absent:
            by_place.setdefault(found.get(rank, ""), []).append(rank)
        for place, ranks in by_place.items():
            parts.append(self._absent_part(ranks, place))
        return "; ".join(parts)

    def _absent_part(self, ranks: list[int], place: str) -> str:
        if self.other:
            at = place or self.other_site
            return f"{_ranks(ranks)} in {self.other} #{self.number}" + (f" at {at}" if at else "")
        if place:
            return f"{_ranks(ranks)} at {place}"
        return f"{_ranks(ranks)} {'has' if len(ranks) == 1 else 'have'} not arrived"


def absentees(pages: Mapping[int, Progress]) -> list[Absence]:
    """Return the groups in which not everybody has arrived, by name, those with a free culprit first."""
    waiting_in: dict[int, set[str]] = {}
    groups: dict[str, dict[int, GroupProgress]] = {}
    for rank, progress in sorted(pages.items()):
        for group in progress.groups:
            groups.setdefault(group.name, {})[rank] = group
            if group.waiting:
                waiting_in.setdefault(rank, set()).add(group.name)
    found: list[Absence] = []
    for name, seen in groups.items():
        absence = _lagging(name, _with_missing(seen, pages)) or _mismatched(name, seen)
        if absence is not None:
            busy = (r for r in absence.absent if waiting_in.get(r, set()) - {name})
            found.append(msgspec.structs.replace(absence, elsewhere=tuple(busy)))
    return sorted(found, key=lambda a: (len(a.elsewhere) == len(a.absent), a.group))


def _with_missing(seen: dict[int, GroupProgress], pages: Mapping[int, Progress]) -> dict[int, GroupProgress]:
    """Add the members that have a page but never heard of the group: they have issued nothing in it."""
    known = next(iter(seen.values()))
    members = known.members()
    if members is None or len(seen) >= known.size:
        return seen
    return seen | {r: GroupProgress(known.name, known.size) for r in members if r in pages and r not in seen}


def _lagging(name: str, seen: dict[int, GroupProgress]) -> Absence | None:
    lowest = min(group.issued for group in seen.values())
    ahead = {rank: group for rank, group in seen.items() if group.issued > lowest}
    if not ahead:
        return None
    # Those one ahead are in the very collective that the absent have not issued; others ran on.
    nearest = min(group.issued for group in ahead.values())
    witness = min(rank for rank, group in ahead.items() if group.issued == nearest)
    return Absence(
        name,
        ahead[witness].op,
        nearest,
        ahead[witness].site,
        tuple(sorted(ahead)),
        tuple(sorted(rank for rank, group in seen.items() if group.issued == lowest)),
    )


def _mismatched(name: str, seen: dict[int, GroupProgress]) -> Absence | None:
    """All are equally far, wait, and do different things: the rarest thing is named as the odd one."""
    kinds: dict[str, list[int]] = {}
    for rank, group in seen.items():
        kinds.setdefault(group.op, []).append(rank)
    stuck = all(group.waiting and group.issued and group.op not in P2P_OPS for group in seen.values())
    if len(kinds) < 2 or not stuck:
        return None
    most, *_, fewest = sorted(kinds.values(), key=lambda ranks: (-len(ranks), ranks))
    witness, odd = seen[most[0]], seen[fewest[0]]
    return Absence(name, witness.op, witness.issued, witness.site, tuple(most), tuple(fewest), odd.op, odd.site)


def _ranks(ranks: tuple[int, ...] | list[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"
