"""Decide from the ranks' progress whether a run hangs, and who is to blame. Pure.

`decide_hang` sees only progress and finds a suspicion; the caller then takes stacks (`stacks.py`), and `judge`
says with them whether it is a hang or a rank that compiles, saves or is being debugged.

H1  A rank that still moves, or is in a phase that may take long, holds up nobody unjustly: no alarm.
H2  Who has not arrived is who issued fewer collectives of the group than those who wait.
H3  Blame follows the waits to their end: a rank that itself waits for another is not the culprit.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

import msgspec

from argosy.core import WaitStatus, format_ranks
from argosy.core.status import signal_name
from argosy.process.frames import Stack, place

Kind = Literal["stopped", "exited", "blocked", "spinning", "elsewhere"]
LONG_PHASES = frozenset({"start", "compile", "evaluate", "checkpoint"})
SPINNING_SHARE = 0.5


class GroupView(msgspec.Struct, frozen=True):
    """A rank's part in one process group: how many collectives it issued, and if it waits for the last."""

    name: str
    size: int
    issued: int
    waiting: bool = False
    op: str = ""
    site: str = ""


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """A rank's progress as one value; `changed_at` is when it last moved, `interval_s` its usual rhythm."""

    index: int
    changed_at: float
    exited: WaitStatus | None = None
    state: str = "S"
    phase: str = ""
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
        return f"{self.op or 'collective'} #{self.number}"


class Culprit(msgspec.Struct, frozen=True):
    """A rank that others wait for and that itself waits for none of them."""

    index: int
    kind: Kind
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


class Busy(msgspec.Struct, frozen=True):
    """No hang: somebody works at something long. Look again when the silence has lasted `again_after_s`."""

    reason: str
    again_after_s: float


class Hang(msgspec.Struct, frozen=True):
    """A hang: `headline` is one line, `details` a few more."""

    headline: str
    kind: str
    culprits: tuple[int, ...]
    details: tuple[str, ...] = ()


def decide_hang(views: Sequence[RankView], policy: HangPolicy, now: float) -> Healthy | Suspect:
    """Return who is silent for too long and whom they wait for, or why all is well."""
    by_index = {view.index: view for view in views}
    stuck = [view for view in views if _is_stuck(view, views, policy, now)]
    if not stuck:
        return Healthy()
    waits = _waits(stuck, views)
    held_up_by = {index for wait in waits for index in wait.absent}
    silent = {view.index for view in stuck}
    for index in sorted(held_up_by - silent):
        if by_index[index].exited is None:  # H1
            phase = by_index[index].phase
            doing = f"is in phase {phase}" if phase in LONG_PHASES else "still moves"
            return Healthy(f"rank {index} {doing}")
    return Suspect(
        since=max(view.changed_at for view in stuck),
        quiet_s=now - max(view.changed_at for view in stuck),
        stuck=tuple(sorted(silent)),
        culprits=_culprits(stuck, waits, by_index),
        waits=tuple(waits),
        policy=policy,
    )


def judge(suspect: Suspect, stacks: Mapping[int, Stack]) -> Busy | Hang:
    """Say with the stacks whether the suspicion is a hang, and describe it in one line."""
    blamed = [culprit.index for culprit in suspect.culprits]
    if suspect.quiet_s < suspect.policy.busy_max_s:
        for index in blamed or suspect.stuck:
            doing = activity(stacks[index]) if index in stacks else ""
            if doing:
                return Busy(f"rank {index} {doing}", 2 * max(suspect.quiet_s, suspect.policy.hang_after_s))
    kinds = {culprit.kind for culprit in suspect.culprits}
    kind = next(
        (k for k in ("stopped", "exited", "blocked", "spinning", "elsewhere") if k in kinds), "collective"
    )
    return Hang(_headline(suspect, stacks), kind, tuple(blamed), _details(suspect, stacks))


_LONG_WORK = (
    # Not all of _dynamo and _inductor: a compiled model that merely runs shows their wrappers too.
    ("compiles", ("/torch/_dynamo/convert_frame.py", "/torch/_inductor/compile_fx.py", "/triton/compiler/")),
    ("builds an extension", ("/torch/utils/cpp_extension.py",)),
    (
        "saves or loads a checkpoint",
        ("/torch/distributed/checkpoint/", "/torch/serialization.py", "/safetensors/"),
    ),
    ("is in the debugger", ("/bdb.py", "/debugpy/", "/pydevd/")),
)


def activity(stack: Stack) -> str:
    """What long but honest work a rank is at, seen from its main thread; "" if none."""
    for doing, marks in _LONG_WORK:
        for frame in stack.frames:
            if any(mark in frame.file for mark in marks) and frame.function != "run":
                return doing
    return ""


def _is_stuck(view: RankView, views: Sequence[RankView], policy: HangPolicy, now: float) -> bool:
    if view.exited is not None or view.state == "t":  # t: under a debugger
        return False
    after_s = max(policy.hang_after_s, policy.intervals * view.interval_s)
    if now - view.changed_at < after_s:
        return False
    if view.state == "T":  # whoever stopped it knows, everybody else should hear of it
        return True
    return view.phase not in LONG_PHASES and _has_begun(view, views, policy.moves_min)


def _has_begun(view: RankView, views: Sequence[RankView], moves_min: int) -> bool:
    if view.steps >= moves_min or any(group.issued >= moves_min for group in view.groups):
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
                key = (group.name, group.issued, group.op)
                ranks.setdefault(key, []).append(view.index)
                groups[key] = group
    waits = [
        Wait(tuple(ranks[key]), group.name, group.op, group.issued, group.site, _absent(group, views))
        for key, group in groups.items()
    ]
    return sorted(waits, key=lambda wait: (not wait.absent, -len(wait.ranks), wait.ranks))


def _absent(waited_for: GroupView, views: Sequence[RankView]) -> tuple[int, ...]:
    members = {view.index: group for view in views if (group := view.group(waited_for.name))}
    absent = [index for index, group in members.items() if group.issued < waited_for.issued]  # H2
    if waited_for.size == len(views):  # everybody belongs to it, also those who never used it
        absent += [view.index for view in views if view.index not in members]
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
    kinds: dict[str, Kind] = {"T": "stopped", "D": "blocked"}
    spinning: Kind = "spinning" if view.cpu_share >= SPINNING_SHARE else "elsewhere"
    return Culprit(view.index, kinds.get(view.state, spinning))


def _headline(suspect: Suspect, stacks: Mapping[int, Stack]) -> str:
    gone = [c for c in suspect.culprits if c.kind in ("stopped", "exited")]
    waits = "; ".join(f"{_ranks(wait.ranks)} in {wait}" for wait in suspect.waits[:2])
    if gone:
        parts = [_blame(gone, stacks)]
        waiting = sorted({index for wait in suspect.waits for index in wait.ranks})
        if waiting:
            whom = "it" if len(gone) == 1 else "them"
            parts.append(f"{_ranks(waiting)} for {whom} in {suspect.waits[0]}")
        return "; ".join(parts)
    if suspect.culprits:
        return "; ".join(filter(None, [waits, _blame(suspect.culprits, stacks)]))
    if len(suspect.waits) == 1:
        return f"{waits}; all have entered it"
    return waits


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]} waits" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} wait"


def _blame(culprits: Sequence[Culprit], stacks: Mapping[int, Stack]) -> str:
    """`rank 3 at data.py:41`; ranks of the same fate together, at most three fates."""
    fates: dict[tuple[str, str], list[int]] = {}
    for culprit in culprits:
        fates.setdefault(_fate(culprit, stacks.get(culprit.index)), []).append(culprit.index)
    parts: list[str] = []
    for (one, many), ranks in list(fates.items())[:3]:
        parts.append(f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {format_ranks(ranks)} {many}")
    if len(fates) > 3:
        parts.append(f"{len(fates) - 3} more")
    return ", ".join(parts)


def _fate(culprit: Culprit, stack: Stack | None) -> tuple[str, str]:
    """What to say of one such rank, and of several."""
    where = place(stack).partition(" in ")[0] if stack else ""
    match culprit.kind:
        case "stopped":
            return "is stopped (SIGSTOP)", "are stopped (SIGSTOP)"
        case "exited":
            status = culprit.status or WaitStatus()
            ended = f"exited with code {status.code}" if status.code is not None else str(status)
            if status.signal is not None:
                ended = f"was killed by {signal_name(status.signal)}"
            return ended, ended
        case "blocked":
            wchan = f" ({stack.proc.wchan})" if stack and stack.proc and stack.proc.wchan else ""
            text = f"in an uninterruptible system call{wchan}"
            return f"is {text}", f"are {text}"
        case "spinning":
            text = f"at {where}" if where else "somewhere"
            return f"spins {text}", f"spin {text}"
        case "elsewhere":
            text = f"at {where}" if where else "at an unknown line"
            return text, text


def _details(suspect: Suspect, stacks: Mapping[int, Stack]) -> tuple[str, ...]:
    lines: list[str] = []
    for wait in suspect.waits[:4]:
        issued = f" issued at {wait.site}" if wait.site else ""
        missing = f"; not entered by rank{'s' * (len(wait.absent) > 1)} {format_ranks(wait.absent)}"
        lines.append(
            f"{_ranks(wait.ranks)} in {wait} of group {wait.group}{issued}{missing * bool(wait.absent)}"
        )
    for culprit in suspect.culprits[:4]:
        stack = stacks.get(culprit.index)
        if stack and (where := place(stack)):
            lines.append(f"rank {culprit.index}: {where}")
    return tuple(lines)
