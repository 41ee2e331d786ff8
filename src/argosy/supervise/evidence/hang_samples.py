"""Turn samples of the ranks' progress into views, and say once per silence that it is suspicious. Pure.

Samples come about four times a second; times are the caller's. What is suspicious is decided in
`control/hang_suspect.py`.
"""

import os
from collections import deque
from collections.abc import Sequence
from statistics import median

import msgspec

from argosy.control import GroupView, HangPolicy, Healthy, RankView, Suspect, decide_hang
from argosy.core import WaitStatus
from argosy.observe import Flag, Phase, RankProgress
from argosy.supervise.evidence.hang_verdict import Busy, Hang
from argosy.supervise.evidence.proc_sample import ProcSample

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_RHYTHMS = 32
_CPU_WINDOW_S = 3.0


class Tracker:
    """The latest view of each rank."""

    def __init__(self) -> None:
        self._views: dict[int, RankView] = {}
        self._rhythms: dict[int, _Rhythm] = {}

    def started(self, index: int, now: float) -> None:
        """A new process has this index: forget its predecessor."""
        self._views[index] = RankView(index=index, changed_at=now, starting=True)
        self._rhythms[index] = _Rhythm(now)

    def update(self, index: int, progress: RankProgress | None, proc: ProcSample | None, now: float) -> None:
        """Take a sample; None where the page or the process could not be read."""
        if index not in self._views:
            self.started(index, now)
        view, rhythm = self._views[index], self._rhythms[index]
        if progress is not None:
            groups = tuple(
                GroupView(g.name, g.size, g.issued, g.p2p, g.waiting, g.op, g.site, g.members())
                for g in progress.groups
            )
            moved = rhythm.moved(progress.steps, progress.collectives, now)
            # Leaving or entering a wait is movement too: the last collective has come to its end.
            moved = moved or progress.pulse != view.pulse or groups != view.groups
            debugged = progress.has(Flag.BREAKPOINT)
            moved = moved or debugged != view.debugged
            view = msgspec.structs.replace(
                view,
                changed_at=now if moved else view.changed_at,
                debugged=debugged,
                steps=progress.steps,
                pulse=progress.pulse,
                starting=progress.phase == Phase.START,
                ending=progress.phase == Phase.END,
                groups=groups,
                interval_s=rhythm.interval_s(),
            )
        if proc is not None:
            resumed = view.state in "Tt" and proc.state not in "Tt"  # its silence begins anew
            view = msgspec.structs.replace(
                view,
                state=proc.state,
                cpu_share=rhythm.cpu_share(proc.ticks, now),
                changed_at=now if resumed else view.changed_at,
            )
        self._views[index] = view

    def exited(self, index: int, status: WaitStatus) -> None:
        """The rank's process ended; its last counts stay, since others may wait for it."""
        if index in self._views:
            self._views[index] = msgspec.structs.replace(self._views[index], exited=status)

    def views(self) -> list[RankView]:
        return [self._views[index] for index in sorted(self._views)]


class HangWatch:
    """Asks `decide_hang`, remembers what was answered: one report per silence, excuses for busy ranks."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._after_s = policy.hang_after_s
        self._answered: dict[int, float] = {}
        self._reported = False

    def look(self, views: Sequence[RankView], now: float) -> Suspect | None:
        """Return a suspicion that is new and worth taking stacks for."""
        if self.went_on(views):
            self._answered, self._reported, self._after_s = {}, False, self._policy.hang_after_s
        if self._reported:
            return None
        policy = msgspec.structs.replace(self._policy, hang_after_s=self._after_s)
        match decide_hang(views, policy, now):
            case Healthy():
                return None
            case Suspect() as suspect:
                self._answered = {v.index: v.changed_at for v in views if v.index in suspect.stuck}
                return suspect

    def went_on(self, views: Sequence[RankView]) -> bool:
        """Whether a rank that was silent at the last suspicion has moved since."""
        return any(self._moved(view) for view in views)

    def answer(self, verdict: Busy | Hang) -> None:
        """Take note of the judgement on the last suspicion."""
        match verdict:
            case Busy(again_after_s=after_s):
                self._after_s = after_s
            case Hang():
                self._reported = True

    def take_over(self, views: Sequence[RankView]) -> None:
        """An earlier agent has reported that these ranks hang."""
        self._answered, self._reported = {view.index: view.changed_at for view in views}, True

    def _moved(self, view: RankView) -> bool:
        before = self._answered.get(view.index)
        return before is not None and (view.changed_at > before or view.exited is not None)


class _Rhythm:
    """How often a rank usually steps and issues collectives, and how busy it is."""

    def __init__(self, now: float) -> None:
        self._steps = self._collectives = 0
        self._stepped_at = self._issued_at = now
        self._step_gaps: deque[float] = deque(maxlen=_RHYTHMS)
        self._issue_gaps: deque[float] = deque(maxlen=_RHYTHMS)
        self._ticks: deque[tuple[float, int]] = deque()

    def moved(self, steps: int, collectives: int, now: float) -> bool:
        stepped, issued = steps - self._steps, collectives - self._collectives
        if stepped > 0:
            if self._steps:  # the first gap is start-up
                self._step_gaps.append((now - self._stepped_at) / stepped)
            self._steps, self._stepped_at = steps, now
        if issued > 0:
            if self._collectives:
                self._issue_gaps.append((now - self._issued_at) / issued)
            self._collectives, self._issued_at = collectives, now
        return stepped > 0 or issued > 0

    def interval_s(self) -> float:
        """The longer of both rhythms: a step of a minute may end in a burst of a hundred collectives."""
        return max(median(self._step_gaps or (0.0,)), median(self._issue_gaps or (0.0,)))

    def cpu_share(self, ticks: int, now: float) -> float:
        """Share of one core over the last seconds."""
        self._ticks.append((now, ticks))
        while len(self._ticks) > 2 and now - self._ticks[1][0] >= _CPU_WINDOW_S:
            self._ticks.popleft()
        since, before = self._ticks[0]
        return (ticks - before) / _TICKS_PER_S / (now - since) if now > since else 0.0
