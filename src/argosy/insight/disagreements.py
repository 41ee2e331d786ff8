"""Find the collective in which the members of a group parted ways: one skipped it, or brought another shape. Pure.

N1  Only processes of one generation are compared: a replaced rank counts its collectives from 1.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Literal

import numpy as np

from argosy.core import format_ranks
from argosy.insight.lanes import COLLECTIVES, Ints
from argosy.insight.store import LaunchData, ProcessRecords
from argosy.insight.verdicts import Verdict
from argosy.observe import SpanKind

SAME_SIZE = frozenset({"all_reduce", "broadcast", "reduce_scatter"})
"""Operations in which all members bring tensors of one size."""
SYNCHRONISING = COLLECTIVES | {"broadcast"}


@dataclass(frozen=True, slots=True)
class Disagreement:
    """The first collective of a group that its members did not issue alike."""

    kind: Literal["missing_collective", "mismatched_shape", "mismatched_collective"]
    number: int
    ranks: list[int]
    """The minority."""
    theirs: str
    others: str


def judge_collectives(launch: LaunchData) -> list[Verdict]:
    """A verdict for each group whose members disagree."""
    generations = {rank: max(g for r, g in launch.processes if r == rank) for rank, _ in launch.processes}
    if len(set(generations.values())) != 1:  # N1
        return []
    names = {group.name: group.size for known in launch.groups.values() for group in known.values()}
    found: list[Verdict] = []
    for name, size in names.items():
        issued = {
            rank: issues
            for rank, generation in generations.items()
            if (issues := _issued(launch, rank, generation, name)) is not None
        }
        if size > 1 and len(issued) == size and (differs := find_disagreement(issued)) is not None:
            found.append(_verdict(differs, name))
    return found


def find_disagreement(issued: dict[int, dict[int, tuple[str, int]]]) -> Disagreement | None:
    """Compare what the ranks issued, operation and bytes by number; None if they agree on what they have in common."""
    ranks = sorted(issued)
    common = sorted(number for number in issued[ranks[0]] if all(number in issued[rank] for rank in ranks))
    for number in common:
        column = [issued[rank][number] for rank in ranks]
        if len(set(column)) == 1:
            continue
        usual = Counter(column).most_common(1)[0][0]
        odd = [rank for rank, each in zip(ranks, column, strict=True) if each != usual]
        theirs = issued[odd[0]][number]
        majority = next(rank for rank in ranks if rank not in odd)
        following = issued[majority].get(number + 1)
        if theirs == following if following is not None else _was_issued(issued[odd[0]], theirs, number):
            return Disagreement("missing_collective", number, odd, describe(theirs), describe(usual))
        same_op = theirs[0] == usual[0]
        kind = "mismatched_shape" if same_op else "mismatched_collective"
        return Disagreement(kind, number, odd, describe(theirs), describe(usual))
    return None


def _was_issued(mine: dict[int, tuple[str, int]], what: tuple[str, int], before: int) -> bool:
    """Whether a rank did the same earlier: then it went on to its next collective, and brought no new shape."""
    return any(issue == what for number, issue in mine.items() if number < before)


def describe(issue: tuple[str, int]) -> str:
    """`all_reduce of 4 bytes`."""
    return f"{issue[0]} of {issue[1]:,} bytes" if issue[1] else issue[0]


def _issued(launch: LaunchData, rank: int, generation: int, name: str) -> dict[int, tuple[str, int]] | None:
    process = launch.processes[rank, generation]
    known = launch.groups.get((rank, generation), {})
    numbers = [number for number, group in known.items() if group.name == name]
    return _of_group(process, numbers[-1]) if numbers and process.columns else None


def _of_group(process: ProcessRecords, group: int) -> dict[int, tuple[str, int]]:
    columns = process.columns
    chosen = np.isin(columns["name"], process.ids(SYNCHRONISING)) & (columns["kind"] == SpanKind.POINT)
    argument, name = columns["argument"][chosen], columns["name"][chosen]
    mine = (argument >> np.uint64(56)).astype(np.int64) == group
    numbers: Ints = (argument[mine] >> np.uint64(32) & np.uint64(0xFFFFFF)).astype(np.int64)
    sizes: Ints = (argument[mine] & np.uint64(0xFFFFFFFF)).astype(np.int64)
    return {
        number: (process.names[each], size if process.names[each] in SAME_SIZE else 0)
        for number, each, size in zip(numbers.tolist(), name[mine].tolist(), sizes.tolist(), strict=True)
        if number
    }


def _verdict(found: Disagreement, group: str) -> Verdict:
    who = f"rank{'s' * (len(found.ranks) > 1)} {format_ranks(found.ranks)}"
    if found.kind == "missing_collective":
        what = f"{who} skipped a collective"
        why = f"#{found.number} of group {group} is {found.others} on the other ranks; {who} did {found.theirs} instead"
        do = "look for a collective inside `if rank == ...`, or after an early return or break: all ranks must call it"
    elif found.kind == "mismatched_shape":
        what = f"{who} brought another shape to a collective"
        why = f"#{found.number} of group {group} is {found.theirs} on {who}, {found.others} on the other ranks"
        do = "look for a tensor whose size depends on the rank or its batch: pad it, or gather sizes first"
    else:
        what = f"{who} called another collective"
        why = f"#{found.number} of group {group} is {found.theirs} on {who}, {found.others} on the other ranks"
        do = "look for branches that depend on the rank: all ranks must call the same collectives in the same order"
    query = f"SELECT rank, op, bytes FROM collectives WHERE \"group\" = '{group}' AND number = {found.number}"
    return Verdict(kind=found.kind, what=what, why=why, query=query, do=do, ranks=found.ranks)
