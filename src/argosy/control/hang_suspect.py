"""Decide from the ranks' progress whether a run hangs, and who is to blame. Pure.

It sees progress only and finds a suspicion. `supervise/evidence` measures the progress, and takes stacks to tell a
hang from a rank that works at something long.

H1  A rank that still moves, or is still starting, holds up nobody unjustly: no alarm.
H2  Who has not arrived is who issued fewer collectives of the group than those who wait.
H3  Blame follows the waits to their end: a rank that itself waits for another is not the culprit.
H4  A rank that ended well without ever joining a group is suspected of being waited for by those that never began.
H5  While a rank is at a breakpoint nobody hangs.
H6  A hang in which no rank moves is a failure after `--hang-timeout`; it is over when all have moved.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from argosy.core import WaitStatus

CulpritKind = Literal["stopped", "exited", "blocked", "spinning", "ending", "elsewhere"]
SPINNING_SHARE = 0.5


class GroupView(msgspec.Struct, frozen=True):
    """A rank's part in one process group: how many collectives it issued, and if it waits for the last."""

    name: str
    size: int
    issued: int
    p2p: int = 0
    waiting: bool = False
    op: str = ""
    site: str = ""
    members: range | None = None

    @property
    def is_p2p(self) -> bool:
        """Whether the last operation was a send or a receive: its count says nothing about the others."""
        return self.op.removeprefix("i").startswith(("send", "recv"))


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's progress as one value; `changed_at` is when it last moved, `interval_s` its usual rhythm."""

    index: int
    changed_at: float
    exited: WaitStatus | None = None
    state: str = "S"
    starting: bool = False
    ending: bool = False
    """The script is over; what is left are threads, atexit functions and destructors."""
    debugged: bool = False
    """It is at a breakpoint."""
    steps: int = 0
    pulse: int = 0
    groups: tuple[GroupView, ...] = ()
    interval_s: float = 0.0
    cpu_share: float = 0.0

    def group(self, name: str) -> GroupView | None:
        return next((group for group in self.groups if group.name == name), None)


class HangPolicy(msgspec.Struct, frozen=True, kw_only=True):
    """When silence is suspicious; compiling and saving excuse it for `busy_max_s` at most."""

    hang_after_s: float = 30.0
    intervals: float = 10.0
    moves_min: int = 3
    busy_max_s: float = 1800.0


class Wait(msgspec.Struct, frozen=True):
    """Ranks that wait in one collective, and the members of its group that have not entered it."""

    ranks: tuple[int, ...]
    group: str
    op: str
    number: int
    site: str = ""
    absent: tuple[int, ...] = ()

    def __str__(self) -> str:
        return f"{self.op or 'a collective'} #{self.number}" if self.number else self.op


class Culprit(msgspec.Struct, frozen=True):
    """A rank that others wait for and that itself waits for none of them."""

    index: int
    kind: CulpritKind
    status: WaitStatus | None = None


class Healthy(msgspec.Struct, frozen=True):
    """No hang; `reason` says why silent ranks are no reason to worry, if there are any."""

    reason: str = ""


class Suspect(msgspec.Struct, frozen=True):
    """Nothing has moved since `since`. `stuck` are the silent ranks, `culprits` may be empty."""

    since: float
    quiet_s: float
    stuck: tuple[int, ...]
    culprits: tuple[Culprit, ...]
    waits: tuple[Wait, ...]
    policy: HangPolicy
    ended: tuple[int, ...] = ()
    """Those that ended with exit code 0."""


def decide_hang(views: Sequence[RankView], policy: HangPolicy, now: float) -> Healthy | Suspect:
    """Return who is silent for too long and whom they wait for, or why all is well."""
    by_index = {view.index: view for view in views}
    debugged = [view.index for view in views if view.debugged and view.exited is None]
    if debugged:  # H5
        return Healthy(f"rank {debugged[0]} is at a breakpoint")
    stuck = [view for view in views if _is_stuck(view, views, policy, now)]
    if not stuck:
        return _left_early(views, policy, now)
    waits = _waits(stuck, views)
    held_up_by = {index for wait in waits for index in wait.absent}
    silent = {view.index for view in stuck}
    for index in sorted(held_up_by - silent):
        if by_index[index].exited is None:  # H1
            return Healthy(f"rank {index} {'is starting' if by_index[index].starting else 'still moves'}")
    return Suspect(
        since=max(view.changed_at for view in stuck),
        quiet_s=now - max(view.changed_at for view in stuck),
        stuck=tuple(sorted(silent)),
        culprits=_culprits(stuck, waits, by_index),
        waits=tuple(waits),
        policy=policy,
        ended=_ended_well(views),
    )


def decide_hang_end(
    since: float, moved: Sequence[bool], timeout_s: float | None, now: float
) -> Literal["lasts", "over", "failure"]:
    """Return what became of a hang; `moved` is for each rank that hung whether it has moved since (H6)."""
    if all(moved):
        return "over"
    return "failure" if timeout_s is not None and not any(moved) and now - since >= timeout_s else "lasts"


def _left_early(views: Sequence[RankView], policy: HangPolicy, now: float) -> Healthy | Suspect:
    """H4: only stacks can tell if the silent ones wait for a group to form."""
    left = [view for view in views if view.exited is not None and view.exited.ok and not view.groups]
    rest = [view for view in views if view.exited is None]
    if not left or not rest or any(view.starting or view.state == "t" for view in rest):
        return Healthy()
    since = max(view.changed_at for view in rest)
    if now - since < policy.hang_after_s or any(view.cpu_share >= SPINNING_SHARE for view in rest):
        return Healthy()
    return Suspect(
        since=since,
        quiet_s=now - since,
        stuck=tuple(view.index for view in rest),
        culprits=tuple(_culprit(view) for view in left),
        waits=(),
        policy=policy,
        ended=_ended_well(views),
    )


def _ended_well(views: Sequence[RankView]) -> tuple[int, ...]:
    return tuple(view.index for view in views if view.exited is not None and view.exited.ok)


def _is_stuck(view: RankView, views: Sequence[RankView], policy: HangPolicy, now: float) -> bool:
    if view.exited is not None or view.state == "t":  # t: under a debugger
        return False
    after_s = max(policy.hang_after_s, policy.intervals * view.interval_s)
    if now - view.changed_at < after_s:
        return False
    if view.state == "T":  # whoever stopped it knows, everybody else should hear of it
        return True
    return not view.starting and _has_begun(view, views, policy.moves_min)


def _has_begun(view: RankView, views: Sequence[RankView], moves_min: int) -> bool:
    if view.steps >= moves_min or any(group.issued >= moves_min for group in view.groups):
        return True
    if view.ending and any(other.exited is not None and other.exited.ok for other in views):
        return True
    names = {group.name for group in view.groups}
    return any(g.issued >= moves_min for other in views for g in other.groups if g.name in names)


def _waits(stuck: Sequence[RankView], views: Sequence[RankView]) -> list[Wait]:
    """The collectives that stuck ranks wait in, those that others are absent from first."""
    ranks: dict[tuple[str, int, str], list[int]] = {}
    groups: dict[tuple[str, int, str], GroupView] = {}
    for view in stuck:
        for group in view.groups:
            if group.waiting:
                key = (group.name, group.p2p if group.is_p2p else group.issued, group.op)
                ranks.setdefault(key, []).append(view.index)
                groups[key] = group
    waits = [
        Wait(tuple(ranks[key]), group.name, group.op, key[1], group.site, _absent(group, views))
        for key, group in groups.items()
    ]
    return sorted(waits, key=lambda wait: (not wait.absent, -len(wait.ranks), wait.ranks))


def _absent(waited_for: GroupView, views: Sequence[RankView]) -> tuple[int, ...]:
    if waited_for.is_p2p:
        return ()
    everybody = waited_for.size == len(views)
    absent: list[int] = []
    for view in views:
        group = view.group(waited_for.name)
        member = group is not None or everybody or view.index in (waited_for.members or ())
        if member and (group.issued if group else 0) < waited_for.issued:  # H2
            absent.append(view.index)
    return tuple(sorted(absent))


def _culprits(
    stuck: Sequence[RankView], waits: Sequence[Wait], by_index: Mapping[int, RankView]
) -> tuple[Culprit, ...]:
    """H3: those at the end of the waits; without waits, all who are stuck."""
    blocked_by_another = {index for wait in waits if wait.absent for index in wait.ranks}
    waiting = {index for wait in waits for index in wait.ranks}
    absent = {index for wait in waits for index in wait.absent}
    ends = {index for index in absent if index not in blocked_by_another}
    ends |= {view.index for view in stuck if view.state in "TD" or view.index not in waiting}
    return tuple(_culprit(by_index[index]) for index in sorted(ends))


def _culprit(view: RankView) -> Culprit:
    if view.exited is not None:
        return Culprit(view.index, "exited", view.exited)
    kinds: dict[str, CulpritKind] = {"T": "stopped", "D": "blocked"}
    waiting: CulpritKind = "ending" if view.ending else "elsewhere"
    return Culprit(view.index, kinds.get(view.state, "spinning" if view.cpu_share >= SPINNING_SHARE else waiting))
