"""Judge with stacks whether a suspicious silence is a hang, and say in one line who holds up whom. Pure.

A rank that compiles, saves, or is being debugged is no hang, for a while.
"""

from collections.abc import Mapping, Sequence

import msgspec

from argosy.control import Culprit, CulpritKind, RankView, Suspect, Wait
from argosy.core import WaitStatus, format_ranks
from argosy.supervise.evidence.frames import Stack, place


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
    since: float = 0.0
    stuck: tuple[int, ...] = ()

    def moved(self, views: Sequence[RankView]) -> list[bool]:
        """For each rank that hung: whether it has moved since, or ended well."""
        stuck = [view for view in views if view.index in self.stuck]
        return [view.changed_at > self.since or (view.exited is not None and view.exited.ok) for view in stuck]


def judge(suspect: Suspect, stacks: Mapping[int, Stack]) -> Busy | Hang:
    """Say with the stacks whether the suspicion is a hang, and describe it in one line."""
    blamed = [culprit.index for culprit in suspect.culprits] or suspect.stuck
    certain = any(culprit.kind in ("stopped", "exited") for culprit in suspect.culprits)
    if suspect.quiet_s < suspect.policy.busy_max_s and not certain:
        for index in blamed:
            doing = activity(stacks[index]) if index in stacks else ""
            if doing:
                return Busy(f"rank {index} {doing}", 2 * max(suspect.quiet_s, suspect.policy.hang_after_s))
    culprits, waits = _unmask(suspect, stacks)
    if not waits and culprits and all(culprit.kind == "exited" for culprit in culprits):
        waits = _rendezvous(suspect, stacks)
        if not waits:
            return Busy("the others do not wait for those that ended", 2 * suspect.quiet_s)
    kinds = {culprit.kind for culprit in culprits}
    kind = next((kind for kind in _GRAVEST_FIRST if kind in kinds), "collective")
    return Hang(
        headline=_headline(culprits, waits, stacks) + _ended(suspect, culprits),
        kind=kind,
        culprits=tuple(culprit.index for culprit in culprits),
        details=_details(culprits, waits, stacks),
        since=suspect.since,
        stuck=suspect.stuck,
    )


_FORMS = "init_process_group"
_GRAVEST_FIRST: tuple[CulpritKind, ...] = ("stopped", "exited", "blocked", "spinning", "ending", "elsewhere")
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
_INSTALLED = ("/site-packages/", "/dist-packages/")


def activity(stack: Stack) -> str:
    """What long but honest work a rank is at, seen from its main thread; "" if none."""
    frames = stack.frames
    if _hidden_wait(stack) == "backward":  # on accelerators a thread of its own runs it, and may compile it
        frames = tuple(frame for thread in stack.threads for frame in thread.frames)
    for doing, marks in _LONG_WORK:
        for frame in frames:
            if any(mark in frame.file for mark in marks) and frame.function != "run":
                return doing
    imports = any(frame.function == "<module>" and any(mark in frame.file for mark in _INSTALLED) for frame in frames)
    return "imports a package" if imports else ""


def _unmask(suspect: Suspect, stacks: Mapping[int, Stack]) -> tuple[list[Culprit], list[Wait]]:
    """Find waits that no page shows (in C++, inside backward) in the stacks, as long as a culprit remains."""
    hidden: dict[str, list[int]] = {}
    for culprit in suspect.culprits:
        if culprit.kind == "elsewhere" and culprit.index in stacks:
            hidden.setdefault(_hidden_wait(stacks[culprit.index]), []).append(culprit.index)
    seen = {index for op, ranks in hidden.items() if op for index in ranks}
    culprits = [culprit for culprit in suspect.culprits if culprit.index not in seen]
    if not culprits:
        return list(suspect.culprits), list(suspect.waits)
    found = [Wait(tuple(ranks), "", op, 0) for op, ranks in sorted(hidden.items()) if op]
    return culprits, [*suspect.waits, *found]


def _rendezvous(suspect: Suspect, stacks: Mapping[int, Stack]) -> list[Wait]:
    """Those that wait for a process group to form, if all of them do."""
    calls = [stacks[index].frames if index in stacks else () for index in suspect.stuck]
    if not all(any(frame.function == _FORMS and "/torch/" in frame.file for frame in frames) for frames in calls):
        return []
    return [Wait(suspect.stuck, "", _FORMS, 0, absent=tuple(culprit.index for culprit in suspect.culprits))]


def _hidden_wait(stack: Stack) -> str:
    innermost = stack.frames[0] if stack.frames else None
    if innermost is None:
        return ""
    if innermost.function.endswith("_engine_run_backward"):
        return "backward"
    return innermost.function if "/torch/distributed/" in innermost.file else ""


def _headline(culprits: Sequence[Culprit], waits: Sequence[Wait], stacks: Mapping[int, Stack]) -> str:
    gone = [culprit for culprit in culprits if culprit.kind in ("stopped", "exited")]
    if gone:
        waiting = sorted({index for wait in waits for index in wait.ranks})
        whom = "it" if len(gone) == 1 else "them"
        tail = [f"{_ranks(waiting)} for {whom} in {waits[0]}"] if waiting else []
        return "; ".join([_blame(gone, stacks), *tail])
    parts = [f"{_ranks(wait.ranks)} in {wait}" for wait in waits[:2]]
    if culprits:
        parts.append(_blame(culprits, stacks))
    elif len(waits) == 1 and "recv" not in waits[0].op:
        parts.append("all have entered it")
    return "; ".join(parts)


def _ended(suspect: Suspect, culprits: Sequence[Culprit]) -> str:
    """Who was done already, unless the headline has said so."""
    done = sorted({*suspect.ended} - {culprit.index for culprit in culprits})
    return f"; rank{'s' * (len(done) > 1)} {format_ranks(done)} had ended with exit code 0" if done else ""


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
            ended = f"exited with code {status.code}" if status.code is not None else f"is gone ({status})"
            return ended, ended
        case "blocked":
            wchan = f" ({stack.proc.wchan})" if stack and stack.proc and stack.proc.wchan else ""
            text = f"in an uninterruptible system call{wchan}"
            return f"is {text}", f"are {text}"
        case "spinning":
            text = f"at {where}" if where else "somewhere"
            return f"spins {text}", f"spin {text}"
        case "ending":
            text = f" at {where}" if where else ""
            return f"hangs at its exit{text}", f"hang at their exits{text}"
        case "elsewhere":
            text = f"at {where}" if where else "at an unknown line"
            return text, text


def _details(culprits: Sequence[Culprit], waits: Sequence[Wait], stacks: Mapping[int, Stack]) -> tuple[str, ...]:
    lines: list[str] = []
    for wait in waits[:4]:
        group = f" of group {wait.group}" if wait.group else ""
        issued = f", issued at {wait.site}" if wait.site else ""
        many = "s" if len(wait.absent) > 1 else ""
        missing = f"; not entered by rank{many} {format_ranks(wait.absent)}" if wait.absent else ""
        lines.append(f"{_ranks(wait.ranks)} in {wait}{group}{issued}{missing}")
    for culprit in culprits[:4]:
        stack = stacks.get(culprit.index)
        if stack and (where := place(stack)):
            lines.append(f"rank {culprit.index}: {where}")
    return tuple(lines)
