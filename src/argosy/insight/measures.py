"""Numbers about the steady part of a run, from which verdicts are drawn. Pure.

M1  The first steps of each process are warm-up and do not count.
    Nor do steps whose collectives were not recorded: their waiting would look like work.
M2  Time in which a thread was ready to run and had no core is nobody's fault but the machine's: it belongs to no class,
    and a rank that comes late because of it is no culprit. So a busy machine makes no verdict about the script.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from argosy.insight.lanes import CLASS_OF, COLLECTIVES, ONE_WAY, Class, Ints
from argosy.insight.ledger import LaunchLedger, Steps
from argosy.insight.store import LaunchData, ProcessRecords
from argosy.observe import THREADS_CPU, Columns, SpanKind

WARM_UP_STEPS = 3
STEPS_MIN = 10
STEADY_MIN_S = 1.0
"""Fewer steady steps, or a shorter time, are no basis for a verdict."""
SAMPLES_MIN = 3


@dataclass(slots=True)
class Measures:
    """Shares are of the time of all ranks in steady steps, without waiting for a core (M2)."""

    ranks: int
    steps: int
    """Steady steps of the rank that has most."""
    step_s: float
    """Median time of a step."""
    share: dict[Class, float]
    delayed: float
    """Share of time that training threads waited for a core."""
    blame: dict[tuple[int, int], float]
    """Share of time spent waiting, by (culprit, cause)."""
    stall: dict[int, float]
    """The part of it that is one wait, each rank's longest, by culprit."""
    optimizer_share: float
    forwards: float
    """Forward passes per step and rank."""
    quarters: list[float]
    """Median step time in each quarter of the steady steps."""
    compiles: int
    """Compilations after the warm-up."""
    collectives: float
    """Collectives per step and rank."""
    collective_bytes: float
    """Median size of a collective."""
    excess: dict[int, float]
    """By how much the own work of a rank (no waiting, no communication) exceeds the others' in the median step."""
    memory: list["MemoryTrend"] = field(default_factory=list["MemoryTrend"])
    threads: dict[int, "ThreadTimes"] = field(default_factory=dict[int, "ThreadTimes"])

    def caused(self, *kinds: Class) -> float:
        """The share of these classes on every rank, and of waiting for ranks that were in them."""
        waiting = sum(share for (_, cause), share in self.blame.items() if cause in kinds)
        return sum(self.share.get(kind, 0.0) for kind in kinds) + waiting


@dataclass(slots=True)
class MemoryTrend:
    """How the resident memory of a rank grows."""

    rank: int
    first: int
    last: int
    per_s: float
    correlation: float


@dataclass(slots=True)
class ThreadTimes:
    """Shares of a rank's wall time."""

    main_cpu: float
    other_cpu: float
    python_cpu: float
    """Of Python threads besides the training thread."""
    run_delay: float
    """The main thread was ready to run and had no core."""


def measure(launch: LaunchData, ledger: LaunchLedger) -> Measures | None:
    """The numbers of one launch, or None if it has too few steady steps."""
    steps = ledger.steps
    steady = np.zeros(len(steps.rank), bool)
    since: dict[int, int] = {}
    for rank in np.unique(steps.rank).tolist():
        mine = np.flatnonzero(steps.rank == rank)
        if len(mine) > WARM_UP_STEPS:
            steady[mine[WARM_UP_STEPS:]] = steps.full[mine[WARM_UP_STEPS:]]
            since[rank] = int(steps.end[mine[WARM_UP_STEPS - 1]])
    counts = np.bincount(steps.rank[steady]) if steady.any() else np.zeros(1, int)
    if counts.max() < STEPS_MIN or np.ptp(steps.end[steady]) < STEADY_MIN_S * 1e9:
        return None
    total = int(steps.lasted[steady].sum())
    own = without_core_waits(steps)
    spent = own[steady].sum(axis=0)
    until = {rank: int(steps.end[steps.rank == rank].max()) for rank in since}
    order = np.argsort(steps.end[steady])
    quarters = [float(np.median(part)) / 1e9 for part in np.array_split(steps.lasted[steady][order], 4)]
    operations = _operations(launch, since)
    blame, stall = _blame(ledger, since, total)
    delayed = float(np.minimum(steps.delayed, steps.lasted)[steady].sum()) / total
    names = _span_totals(launch, since)
    done = int(steady.sum())
    return Measures(
        ranks=launch.size,
        steps=int(counts.max()),
        step_s=float(np.median(steps.lasted[steady])) / 1e9,
        share={kind: float(spent[kind]) / total for kind in Class if spent[kind]},
        delayed=delayed,
        blame=blame,
        stall=stall,
        optimizer_share=names.get("optimizer", (0, 0))[1] / total,
        forwards=names.get("forward", (0, 0))[0] / done,
        quarters=quarters,
        compiles=names.get("compile", (0, 0))[0],
        collectives=len(operations) / done,
        collective_bytes=float(np.median(operations)) if len(operations) else 0.0,
        excess=_excess(steps, steady, own),
        memory=_memory(launch.samples.get("rank"), since, until),
        threads=_threads(launch, since),
    )


def without_core_waits(steps: Steps) -> NDArray[np.float64]:
    """Rows: steps; columns: time by class, without waits for a core. They lie in computation as far as that took longer
    than the thread ran, and what remains in all that is no waiting for others."""
    found = steps.spent.astype(np.float64)
    delayed = steps.delayed.astype(np.float64)
    computing = np.clip(found[:, Class.COMPUTE] - steps.ran, 0, np.where(steps.ran > 0, delayed, 0))
    found[:, Class.COMPUTE] -= computing
    busy = [kind for kind in Class if kind not in (Class.COMM, Class.PEER_WAIT)]
    whole = found[:, busy].sum(axis=1)
    found[:, busy] *= (1 - np.clip((delayed - computing) / np.maximum(whole, 1), 0, 1))[:, None]
    return found


def _excess(steps: Steps, steady: NDArray[np.bool_], spent: NDArray[np.float64]) -> dict[int, float]:
    numbers, column = np.unique(steps.step[steady], return_inverse=True)
    ranks, row = np.unique(steps.rank[steady], return_inverse=True)
    own = np.full((len(ranks), len(numbers)), np.nan)
    waits = spent[:, Class.PEER_WAIT] + spent[:, Class.COMM]
    own[row, column] = (spent.sum(axis=1) - waits)[steady]
    whole = own[:, ~np.isnan(own).any(axis=0)]  # Steps that all ranks did.
    if len(ranks) < 2 or not whole.shape[1]:
        return {}
    typical = float(np.median(steps.lasted[steady]))
    found: dict[int, float] = {}
    for place, rank in enumerate(ranks.tolist()):
        others = np.median(np.delete(whole, place, axis=0), axis=0)
        found[rank] = float(np.median(whole[place] - others)) / typical
    return found


def _blame(
    ledger: LaunchLedger, since: Mapping[int, int], total: int
) -> tuple[dict[tuple[int, int], float], dict[int, float]]:
    blame: dict[tuple[int, int], float] = {}
    stall: dict[int, float] = {}
    steps = ledger.steps
    done_by = zip(steps.rank.tolist(), steps.step.tolist(), strict=True)
    delays = dict(zip(done_by, steps.delayed.tolist(), strict=True))
    for (rank, _), lane in ledger.lanes.items():
        part = lane.segments
        chosen = (part.kind == Class.PEER_WAIT) & (part.begin >= since.get(rank, 1 << 62))
        waits = zip(
            part.culprit[chosen].tolist(),
            part.step[chosen].tolist(),
            part.cause[chosen].tolist(),
            (part.end - part.begin)[chosen].tolist(),
            strict=True,
        )
        longest: dict[int, float] = {}
        excused: dict[tuple[int, int], int] = {}
        for culprit, done, cause, ns in waits:
            step = culprit, done + 1
            if step not in excused:  # How much longer than this rank the culprit waited for a core (M2).
                excused[step] = max(0, delays.get(step, 0) - delays.get((rank, done + 1), 0))
            late = min(ns, excused[step])
            excused[step] -= late
            share = (ns - late) / total
            blame[culprit, cause] = blame.get((culprit, cause), 0.0) + share
            longest[culprit] = max(share, longest.get(culprit, 0.0))
        for culprit, share in longest.items():
            stall[culprit] = stall.get(culprit, 0.0) + share
    return blame, stall


def _operations(launch: LaunchData, since: Mapping[int, int]) -> Ints:
    """The sizes of all steady collectives."""
    found = [np.zeros(0, np.int64)]
    for process in launch.processes.values():
        columns = process.columns
        chosen = (
            np.isin(columns["name"], process.ids(COLLECTIVES | ONE_WAY))
            & (columns["kind"] == SpanKind.POINT)
            & (columns["time"] >= since.get(process.rank, 1 << 62))
        )
        found.append((columns["argument"][chosen] & 0xFFFFFFFF).astype(np.int64))
    return np.concatenate(found)


def _span_totals(launch: LaunchData, since: Mapping[int, int]) -> dict[str, tuple[int, int]]:
    """Count and nanoseconds of all spans of one name, of all ranks."""
    found: dict[str, tuple[int, int]] = {}
    for process in launch.processes.values():
        for name in CLASS_OF:
            begin, end = spans_of(process, name)
            late = begin >= since.get(process.rank, 1 << 62)
            count, ns = found.get(name, (0, 0))
            found[name] = count + int(late.sum()), ns + int((end - begin)[late].sum())
    return found


def spans_of(process: ProcessRecords, name: str) -> tuple[Ints, Ints]:
    """Begin and end of the spans of one name: pairs of a begin and the next record of that name, if it is an end."""
    columns, number = process.columns, process.ids([name])
    chosen = np.isin(columns["name"], number) & (columns["kind"] <= SpanKind.END)
    time, kind = columns["time"][chosen], columns["kind"][chosen]
    pairs = np.flatnonzero((kind[:-1] == SpanKind.BEGIN) & (kind[1:] == SpanKind.END))
    return time[pairs], time[pairs + 1]


def _memory(samples: Columns | None, since: Mapping[int, int], until: Mapping[int, int]) -> list[MemoryTrend]:
    found: list[MemoryTrend] = []
    for rank, begin in since.items() if samples is not None else ():
        assert samples is not None
        mine = (samples["rank"] == rank) & (samples["time"] >= begin) & (samples["time"] <= until[rank])
        time, rss = samples["time"][mine] / 1e9, samples["rss_bytes"][mine].astype(float)
        if len(time) <= SAMPLES_MIN or rss.std() == 0:
            continue
        apart = time - time.mean()
        slope = float((apart * rss).sum() / (apart * apart).sum())
        correlation = float(np.corrcoef(np.arange(len(rss)), rss.argsort().argsort())[0, 1])  # Of ranks: it just rises.
        found.append(MemoryTrend(rank, int(rss[0]), int(rss[-1]), slope, correlation))
    return found


def _threads(launch: LaunchData, since: Mapping[int, int]) -> dict[int, ThreadTimes]:
    found: dict[int, ThreadTimes] = {}
    samples = launch.samples.get("rank")
    if samples is None:
        return found
    for (rank, generation), process in launch.processes.items():
        mine = (samples["rank"] == rank) & (samples["generation"] == generation)
        at = np.flatnonzero(mine & (samples["time"] >= since.get(rank, 1 << 62)))
        if len(at) < SAMPLES_MIN:
            continue
        first, last = at[0], at[-1]
        wall = float(samples["time"][last] - samples["time"][first])
        main, every, delay = (
            float(samples[name][last] - samples[name][first]) for name in ("main_cpu_ns", "cpu_ns", "run_delay_ns")
        )
        python = _python_threads(process, since.get(rank, 0))
        found[rank] = ThreadTimes(main / wall, max(0.0, every - main) / wall, python, delay / wall)
    return found


def _python_threads(process: ProcessRecords, since: int) -> float:
    """CPU time of the other Python threads, as a share of wall time."""
    columns = process.columns
    chosen = np.isin(columns["name"], process.ids([THREADS_CPU])) & (columns["kind"] == SpanKind.COUNT)
    chosen &= columns["time"] >= since
    time, value = columns["time"][chosen], columns["argument"][chosen].astype(np.int64)
    return float(value[-1] - value[0]) / float(time[-1] - time[0]) if len(time) > 1 else 0.0
