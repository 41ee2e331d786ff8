"""Measure contenders side by side: interleaved repeats, medians, spread, ratios, a table and JSON.

A contender's `sample` returns a value (seconds unless the row says otherwise), or one per try. Less is better. A
failed try is `Failed`, raised or among the values: it is counted and shown. `Missing` is raised where this machine
does not have the contender, which is then skipped. Nothing here knows what is measured.
"""

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from peers import ROOT, Missing, version_of
from rich.console import Console
from rich.table import Table


class Failed(Exception):
    """One try that gave no value; the text says why."""


Sample = Callable[[], float | Sequence[float | Failed]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One way to do what a row measures."""

    name: str
    sample: Sample
    repeat_max: int | None = None
    """For slow contenders: at most so many repeats."""
    warm_up: bool = False
    """Take one sample that does not count before the repeats; it is shown apart as `warm-up`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What a contender should reach: a value, or a ratio to another contender of the row."""

    of: str
    at_most: float | None = None
    times_of: str | None = None
    times: float = 1.0
    """`of` should be at least `times` times smaller than `times_of` (1/1.3: at most 1.3 times larger)."""
    percentile: int = 50
    tries: int | None = None
    """Instead of a value: at least so many tries, and none of them lost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One thing measured, and who takes part."""

    key: str
    title: str
    contenders: Sequence[Contender]
    base: str = "torchrun"
    """The contender that ratios are told against."""
    unit: str = "s"
    goals: Sequence[Goal] = ()
    percentile: int = 50
    """Shown beside the median where it is not 50."""


@dataclass(slots=True)
class Score:
    """What one contender did in one row."""

    values: list[float] = field(default_factory=list[float])
    first: float | None = None
    failures: list[str] = field(default_factory=list[str])
    missing: str = ""

    def at(self, percentile: int) -> float | None:
        return percentile_of(self.values, percentile)


@dataclass(frozen=True, slots=True)
class Options:
    """What the command line asked of every bench."""

    quick: bool
    repeat: int


def percentile_of(values: Sequence[float], percentile: int) -> float | None:
    """The median, or the nearest-rank percentile, so that a p99 is a value that was seen."""
    if not values:
        return None
    if percentile == 50:
        return statistics.median(values)
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percentile // 100) - 1)]


def measure(row: Row, repeat: int, say: Callable[[str], None]) -> dict[str, Score]:
    """Take the samples of a row in rounds, so that a change of the machine's mood meets all contenders."""
    scores = {contender.name: Score() for contender in row.contenders}
    for number in range(-1, repeat):
        for contender in row.contenders:
            score = scores[contender.name]
            due = contender.warm_up if number < 0 else number < (contender.repeat_max or repeat)
            if due and not score.missing:
                take(contender, score, warm_up=number < 0)
                say(f"{row.key} {contender.name}: {number + 1}/{repeat}")
    return scores


def take(contender: Contender, score: Score, *, warm_up: bool) -> None:
    try:
        taken = contender.sample()
    except Missing as missing:
        score.missing = str(missing)
        return
    except Failed as failed:
        score.failures.append(str(failed))
        return
    tries = [taken] if isinstance(taken, int | float) else taken
    values = [value for value in tries if not isinstance(value, Failed)]
    score.failures += [str(lost) for lost in tries if isinstance(lost, Failed)]
    if warm_up:
        score.first = values[0] if values else None
    else:
        score.values += values


def judge(goal: Goal, scores: dict[str, Score], unit: str) -> tuple[str, bool | None]:
    """Say what was reached of a goal, and whether it is met; None where it cannot be told."""
    score = scores.get(goal.of, Score())
    reached = score.at(goal.percentile)
    name = goal.of if goal.percentile == 50 else f"{goal.of} p{goal.percentile}"
    if goal.tries is not None:
        won, tried = len(score.values), len(score.values) + len(score.failures)
        text = f"{name} succeeds in all of {goal.tries} tries: {won} of {tried}"
        return text, False if score.failures else (True if tried >= goal.tries else None)
    if goal.times_of is None:
        assert goal.at_most is not None
        text = f"{name} at most {show_number(goal.at_most, unit)}"
        return (text, None) if reached is None else (f"{text}: {show_number(reached, unit)}", reached <= goal.at_most)
    text = f"{name} at {'least' if goal.times >= 1 else 'most'} {show_ratio(goal.times)} than {goal.times_of}"
    other = scores[goal.times_of].at(goal.percentile) if goal.times_of in scores else None
    if reached is None or other is None:
        return text, None
    return f"{text}: {show_ratio(other / reached)}", other / reached >= goal.times


def show_ratio(ratio: float) -> str:
    return f"{ratio:.3g}x less" if ratio >= 1 else f"{1 / ratio:.3g}x more"


def show_number(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s" and value < 0.1:
        return f"{value * 1000:.3g} ms"
    return f"{value:.3g} {unit}" if value < 1000 else f"{value:.0f} {unit}"


def show(row: Row, scores: dict[str, Score], console: Console) -> None:
    """Print one row's table, what was missing or lost, and what became of its goals."""
    console.print(f"\n[bold]{row.title}[/]  ({row.key})", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    tail = [] if row.percentile == 50 else [row.percentile]
    table.add_column("  contender", no_wrap=True)
    versus = [f"vs {row.base}"] if row.base in scores and len(scores) > 1 else []
    for column in ["median", *(f"p{p}" for p in tail), "min", "max", "warm-up", "tries", *versus]:
        table.add_column(column, justify="right", no_wrap=True)
    base = scores[row.base].at(50) if row.base in scores else None
    notes: list[str] = []
    for name, score in scores.items():
        middle, tried = score.at(50), len(score.values) + len(score.failures)
        lowest, highest = (min(score.values), max(score.values)) if score.values else (None, None)
        numbers = [middle, *(score.at(p) for p in tail), lowest, highest, score.first]
        count = f"{len(score.values)} of {tried}" if score.failures else str(tried)
        ratio = show_ratio(base / middle) if base and middle and middle > 0 and name != row.base else "-"
        shown = [*(show_number(number, row.unit) for number in numbers), count, *([ratio] if versus else [])]
        table.add_row(f"  {name}", *shown)
        notes += [f"  {name}: {note}" for note in ([score.missing] if score.missing else score.failures[:1])]
    console.print(table)
    for note in notes:
        console.print(note, style="dim", highlight=False, markup=False)
    for goal in row.goals:
        text, met = judge(goal, scores, row.unit)
        word = {True: "[green]met[/]", False: "[red]missed[/]", None: "not measured"}[met]
        console.print(f"  goal: {text}, {word}", highlight=False)


def describe_machine() -> dict[str, object]:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return {
        "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "commit": commit.stdout.strip(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gb": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
        "load_before": round(os.getloadavg()[0], 2),
    }


def record(row: Row, scores: dict[str, Score]) -> dict[str, object]:
    judged = [judge(goal, scores, row.unit) for goal in row.goals]
    return {
        "key": row.key,
        "title": row.title,
        "unit": row.unit,
        "scores": {name: {**asdict(score), "median": score.at(50)} for name, score in scores.items()},
        "goals": [{"goal": text, "met": met} for text, met in judged],
    }


def run_benches(
    description: str, make_rows: Callable[[Options], Sequence[Row]], argv: Sequence[str] | None = None
) -> int:
    """The command line that every bench shares. Goals missed are reported, not an error: exit code 0."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="few ranks and repeats: does it work, roughly how fast")
    parser.add_argument("--only", metavar="KEY,...", help="only these rows or `row:contender` (prefixes will do)")
    parser.add_argument("--repeat", type=int, help="repeats per contender (default 5, quick 2)")
    parser.add_argument("--json", metavar="PATH", help="also write everything measured there")
    parser.add_argument("--list", action="store_true", help="name the rows and contenders, measure nothing")
    args = parser.parse_args(argv)
    options = Options(quick=args.quick, repeat=args.repeat or (2 if args.quick else 5))
    rows = choose(make_rows(options), args.only)
    if args.quick:  # Ratios are promised for many ranks.
        rows = [replace(row, goals=[goal for goal in row.goals if goal.times_of is None]) for row in rows]
    if args.list:
        for row in rows:
            print(f"{row.key:<10} {row.title}: {', '.join(c.name for c in row.contenders)}")
        return 0
    if not rows:
        parser.error(f"no row matches: {args.only}")
    console = Console(width=None if sys.stdout.isatty() else 140)
    machine = describe_machine()
    console.print(
        "{cpus} CPUs, {memory_gb} GB, Linux {kernel}, Python {python}, torch {torch}, commit {commit}, "
        "load {load_before}".format_map(machine),
        highlight=False,
    )
    if os.getloadavg()[0] > 0.5:
        console.print("[yellow]the machine is busy: expect noise[/]")
    records: list[dict[str, object]] = []
    for row in rows:
        with console.status(row.key) as status:
            scores = measure(row, options.repeat, status.update)
        show(row, scores, console)
        records.append(record(row, scores))
        if args.json:
            Path(args.json).write_text(json.dumps({"machine": machine, "rows": records}, indent=1) + "\n")
    return 0


def choose(rows: Sequence[Row], only: str | None) -> list[Row]:
    """Keep the rows, and the contenders of a row, that `row` or `row:contender` prefixes name."""
    if only is None:
        return list(rows)
    chosen: list[Row] = []
    for row in rows:
        wanted = [part.partition(":")[2] for part in only.split(",") if row.key.startswith(part.partition(":")[0])]
        kept = [c for c in row.contenders if any(c.name.startswith(prefix) for prefix in wanted)]
        if kept:
            chosen.append(replace(row, contenders=kept))
    return chosen


if __name__ == "__main__":
    sys.exit("harness.py measures nothing by itself: run launch.py, failures.py or researcher.py")
