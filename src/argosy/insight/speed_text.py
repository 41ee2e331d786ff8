"""Say how fast a run is and what holds it back, in a few lines for a terminal. Pure."""

from argosy.insight.lanes import Class
from argosy.insight.ledger import LaunchLedger
from argosy.insight.measures import Measures
from argosy.insight.opened import OpenedRun, Speed
from argosy.insight.verdicts import Verdict, saving

VERDICTS_MAX = 3
SHARES_MAX = 6


def speed_line(speed: Speed, measures: Measures | None) -> str:
    """`150 steps · 45.2 ms per step · 22.1 steps/s · goodput 87%`."""
    parts = [f"{speed.steps:,} step{'s' * (speed.steps != 1)}"]
    if measures is not None and speed.step_s and speed.steps_per_s:
        parts += [f"{speed.step_s * 1e3:.3g} ms per step", f"{speed.steps_per_s:.3g} steps/s"]
    if speed.tokens_per_s:
        parts.append(f"{speed.tokens_per_s:,.0f} tokens/s")
    elif speed.samples_per_s:
        parts.append(f"{speed.samples_per_s:,.3g} samples/s")
    if speed.mfu is not None:
        parts.append(f"MFU {speed.mfu:.1%}")
    return " · ".join([*parts, f"goodput {speed.goodput:.0%}"])


def ledger_line(ledger: LaunchLedger) -> str:
    """`compute 61% · startup 20% · peer_wait 12% · ...`, the largest first."""
    totals = ledger.totals()
    whole = max(1, sum(totals.values()))
    order = sorted(totals.items(), key=lambda each: -each[1])[:SHARES_MAX]
    return " · ".join(f"{Class(kind).name.lower()} {ns / whole:.0%}" for kind, ns in order if ns / whole >= 0.005)


def verdict_lines(verdict: Verdict, measures: Measures | None) -> list[str]:
    """What is wrong, why, the gain, and what to do."""
    gain = f"gain: {saving(measures, verdict.gain)}" if measures is not None and verdict.gain else ""
    return [
        line
        for line in (verdict.what, f"  why: {verdict.why}", f"  {gain}" if gain else "", f"  do: {verdict.do}")
        if line
    ]


def speed_lines(run: OpenedRun) -> list[str]:
    """All of it; nothing if the run recorded no steps."""
    if not run.has_steps:
        return []
    verdicts = run.verdicts()
    lines = [speed_line(run.speed(), run.measures), ledger_line(run.ledgers[-1])]
    for verdict in verdicts[:VERDICTS_MAX]:
        lines += verdict_lines(verdict, run.measures)
    if len(verdicts) > VERDICTS_MAX:
        lines.append(f"{len(verdicts) - VERDICTS_MAX} more: argosy report")
    if not verdicts and run.measures is not None:
        lines.append("nothing holds it back")
    return lines
