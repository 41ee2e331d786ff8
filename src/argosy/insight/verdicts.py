"""What holds a run back: verdicts with numbers, the query behind them, what to do, and the gain. Pure.

V1  A run in which nothing is wrong gets no verdict.
V2  Verdicts are ordered by their gain: the share of the time of a step that would be saved.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import msgspec

from argosy.core import format_ranks
from argosy.insight.lanes import Class
from argosy.insight.ledger import LaunchLedger
from argosy.insight.measures import Measures

GAIN_MIN = 0.05
COMM_MIN = 0.4
HOST_MIN = 0.15
DELAY_MAX = 0.15
"""Where threads have to wait longer for a core, steps and collectives are slow for that reason."""
SMALL_BYTES = 64 << 10
LEAK_MIN_BYTES = 100 << 20
MB = 1e6


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that is wrong."""

    kind: str
    what: str
    why: str
    """The numbers."""
    query: str
    """SQL for `argosy sql` that shows them."""
    do: str
    gain: float = 0.0
    """Share of the step time; 0 if it is a risk and not a delay."""
    ranks: list[int] = []


def judge(measures: Measures | None, ledger: LaunchLedger | None = None) -> list[Verdict]:
    """All verdicts about a run, the most important first."""
    found = [] if ledger is None else _failures(ledger)
    if measures is not None:
        for rule in RULES:
            verdict = rule(measures)
            if verdict is not None:
                found.append(verdict)
    return sorted(found, key=lambda verdict: -(verdict.gain or 1.0))


def saving(measures: Measures, gain: float) -> str:
    """`a step would take 31 ms instead of 45 ms (31% less)`."""
    before, after = measures.step_s * 1e3, measures.step_s * (1 - gain) * 1e3
    return f"a step would take {after:.3g} ms instead of {before:.3g} ms ({gain:.0%} less)"


def _culprits(measures: Measures, causes: Sequence[int]) -> dict[int, float]:
    found: dict[int, float] = {}
    for (culprit, cause), share in measures.blame.items():
        if cause in causes:
            found[culprit] = found.get(culprit, 0.0) + share
    return found


def _lacks_cores(measures: Measures) -> bool:
    """Whether ranks wait for cores, or nobody knows."""
    return max((times.run_delay for times in measures.threads.values()), default=1.0) > DELAY_MAX


def _straggler(measures: Measures) -> Verdict | None:
    causes = [Class.COMPUTE, Class.HOST, Class.EVALUATION, Class.COPY, len(Class)]
    culprits = _culprits(measures, causes)
    if measures.ranks < 2 or not culprits:
        return None
    rank, waited = max(culprits.items(), key=lambda each: each[1])
    gain = waited * measures.ranks / (measures.ranks - 1)
    # A rank that is slow in most steps, or one that almost all waiting is for. By chance two ranks differ more.
    systematic = measures.excess.get(rank, 0.0) > gain / 2
    needed = {2: 0.8, 3: 0.7}.get(measures.ranks, 0.6) if systematic else 0.95
    if not systematic and waited - measures.stall.get(rank, 0.0) < GAIN_MIN:
        return None  # One long stop is no straggler.
    if gain < GAIN_MIN or waited < needed * sum(culprits.values()):
        return None
    by_cause = {cause: share for (who, cause), share in measures.blame.items() if who == rank and cause in causes}
    cause = max(by_cause, key=lambda each: by_cause[each])
    doing = {
        Class.COMPUTE: "its forward, backward or optimizer takes longer",
        Class.HOST: "it spends the time between recorded operations, in Python or asleep",
        Class.EVALUATION: "it evaluates while the others wait",
        Class.COPY: "it copies between devices",
    }.get(Class(cause) if cause < len(Class) else Class.IDLE, "the cause could not be followed to its end")
    return Verdict(
        kind="straggler",
        what=f"rank {rank} is a straggler",
        why=f"the other ranks wait for it during {gain:.0%} of each step ({waited / sum(culprits.values()):.0%} of all "
        f"waiting for peers); {doing}",
        query=f"SELECT rank, cause, sum(seconds) FROM waits WHERE culprit = {rank} GROUP BY ALL ORDER BY 3 DESC",
        do=f"see what it does: `argosy stacks --rank {rank}`; compare its host and its input with the others'",
        gain=gain,
        ranks=[rank],
    )


def _spread(measures: Measures, kind: Class) -> str:
    culprits = _culprits(measures, [kind])
    total = sum(culprits.values())
    if total < 0.02:
        return ""
    rank, most = max(culprits.items(), key=lambda each: each[1])
    return f"; others wait for rank {rank}" if most > 0.7 * total else ""


def _share_rule(kind: Class, limit: float, text: Mapping[str, str]) -> Callable[[Measures], Verdict | None]:
    def rule(measures: Measures) -> Verdict | None:
        gain = measures.caused(kind)
        if gain < limit:
            return None
        waiting = gain - measures.share.get(kind, 0.0)
        column = kind.name.lower()
        return Verdict(
            kind=text["kind"],
            what=text["what"],
            why=f"{measures.share.get(kind, 0.0):.0%} of the step time is spent {text['in']}"
            + (f", {waiting:.0%} waiting for ranks that do{_spread(measures, kind)}" if waiting >= 0.005 else ""),
            query=f"SELECT rank, sum({column}) / sum(seconds) AS share FROM steps GROUP BY rank ORDER BY rank",
            do=text["do"],
            gain=gain,
            ranks=sorted(_culprits(measures, [kind])),
        )

    return rule


_input_bound = _share_rule(
    Class.DATA,
    GAIN_MIN,
    {
        "kind": "input_bound",
        "what": "the run waits for its input",
        "in": "waiting for the next batch",
        "do": "load ahead: DataLoader(num_workers=4, persistent_workers=True), or make samples cheaper",
    },
)
_checkpoint_bound = _share_rule(
    Class.CHECKPOINT,
    GAIN_MIN,
    {
        "kind": "checkpoint_bound",
        "what": "checkpoints hold the run back",
        "in": "saving",
        "do": "save less often, to a faster disk, or in the background: `argosy.Run` saves while training continues",
    },
)
_gc_pauses = _share_rule(
    Class.GC,
    0.03,
    {
        "kind": "gc_pauses",
        "what": "garbage collection pauses the run",
        "in": "in full collections",
        "do": "gc.freeze() after setup; gc.disable(), and gc.collect() every few hundred steps on all ranks at once",
    },
)


def _recompilation(measures: Measures) -> Verdict | None:
    gain = measures.caused(Class.COMPILE)
    if gain < GAIN_MIN or measures.compiles < 3:
        return None
    return Verdict(
        kind="recompilation",
        what="torch.compile compiles again and again",
        why=f"{measures.compiles} compilations after the warm-up take {gain:.0%} of the step time",
        query="SELECT rank, count(*), sum(seconds) FROM spans WHERE name = 'compile' GROUP BY rank",
        do="TORCH_LOGS=recompiles shows which guard fails; pad to fixed shapes, or torch.compile(dynamic=True)",
        gain=gain,
    )


def _communication_bound(measures: Measures) -> Verdict | None:
    gain = measures.share.get(Class.COMM, 0.0)
    small = measures.collectives > 20 and 0 < measures.collective_bytes < SMALL_BYTES
    if gain < (COMM_MIN / 2 if small else COMM_MIN) or _lacks_cores(measures):
        return None
    size = (
        f"{measures.collective_bytes / 1e3:.3g} kB"
        if measures.collective_bytes < MB
        else (f"{measures.collective_bytes / MB:.3g} MB")
    )
    return Verdict(
        kind="small_collectives" if small else "communication_bound",
        what="many small collectives" if small else "the run waits for its network",
        why=f"{gain:.0%} of the step time is exposed communication: {measures.collectives:.3g} collectives per step, "
        f"median {size}",
        query="SELECT op, count(*), median(bytes) FROM collectives GROUP BY op ORDER BY 2 DESC",
        do="join them: larger DDP buckets (bucket_cap_mb), one call on a flattened tensor"
        if small
        else "send less (gradient accumulation, bf16 gradients), overlap it with the backward pass, or use fewer ranks",
        gain=gain,
    )


def _lock_contention(measures: Measures) -> Verdict | None:
    shares = {
        rank: times.python_cpu / max(1e-9, times.python_cpu + times.main_cpu)
        for rank, times in measures.threads.items()
        if times.python_cpu > 0.02
    }
    contended = {rank: share for rank, share in shares.items() if share > 0.3}
    if not contended:
        return None
    open_to_it = sum(measures.share.get(kind, 0.0) for kind in (Class.COMPUTE, Class.HOST, Class.PEER_WAIT))
    gain = max(contended.values()) * open_to_it
    busy = max(measures.threads[rank].python_cpu for rank in contended)
    return Verdict(
        kind="lock_contention",
        what="other Python threads take the GIL from training",
        why=f"Python threads besides the training thread of rank{'s' * (len(contended) > 1)} {format_ranks(contended)} "
        f"use {busy:.0%} of a core, {max(contended.values()):.0%} of the time that the GIL is held",
        query="SELECT rank, max(cpu_ns) - max(main_cpu_ns) AS other_ns FROM rank_samples GROUP BY rank",
        do="move the work of these threads to processes; `argosy stacks` shows what they do",
        gain=gain,
        ranks=sorted(contended),
    )


def _python_bound(measures: Measures) -> Verdict | None:
    gain = measures.caused(Class.HOST)
    blamed = _culprits(measures, [Class.HOST])
    if measures.share.get(Class.HOST, 0.0) < HOST_MIN or (blamed and max(blamed.values()) > 0.6 * gain):
        return None
    return Verdict(
        kind="python_bound",
        what="the run spends its time in Python, between operations",
        why=f"{measures.share[Class.HOST]:.0%} of the step time is in no model, optimizer, input or collective",
        query="SELECT rank, sum(host) / sum(seconds) AS share FROM steps GROUP BY rank ORDER BY rank",
        do="look at what runs there: `argosy stacks` while it trains; logging, metrics and .item() are usual suspects",
        gain=gain,
    )


def _oversubscribed(measures: Measures) -> Verdict | None:
    delays = [times.run_delay for times in measures.threads.values()]
    busy = [times.main_cpu + times.other_cpu for times in measures.threads.values()]
    if not delays or sum(busy) / len(busy) < 1.5:  # One busy thread per rank is how many ranks were asked for.
        return None
    gain = sum(delays) / len(delays)
    if gain < 0.15:
        return None
    return Verdict(
        kind="cpu_oversubscribed",
        what="more threads than cores",
        why=f"the training threads are ready to run and have no core for {gain:.0%} of the time; a rank keeps "
        f"{sum(busy) / len(busy):.1f} threads busy",
        query="SELECT rank, max(run_delay_ns) / 1e9 AS delay_s FROM rank_samples GROUP BY rank",
        do="use fewer threads (OMP_NUM_THREADS, torch.set_num_threads): ranks x threads should equal the cores",
        gain=gain,
    )


def _memory_growth(measures: Measures) -> Verdict | None:
    growing = [
        trend
        for trend in measures.memory
        if trend.correlation > 0.9 and trend.last - trend.first > max(LEAK_MIN_BYTES, 0.1 * trend.first)
    ]
    if not growing:
        return None
    worst = max(growing, key=lambda trend: trend.per_s)
    return Verdict(
        kind="memory_growth",
        what=f"memory of rank{'s' * (len(growing) > 1)} {format_ranks([trend.rank for trend in growing])} grows",
        why=f"rank {worst.rank} went from {worst.first / MB:.0f} to {worst.last / MB:.0f} MB, {worst.per_s / MB:.3g} "
        "MB/s, and does not level off",
        query=f"SELECT time, rss_bytes FROM rank_samples WHERE rank = {worst.rank} ORDER BY time",
        do="look for tensors that are kept: losses appended without .item() or .detach(), caches without a bound",
        ranks=[trend.rank for trend in growing],
    )


def _slow_down(measures: Measures) -> Verdict | None:
    first, *_, last = quarters = measures.quarters
    gain = 1 - first / last if last > 0 else 0.0
    rises = all(b > a * 1.02 for a, b in pairwise(quarters))
    if gain < 0.15 or not rises or measures.steps < 40 or _lacks_cores(measures):
        return None
    return Verdict(
        kind="slow_down",
        what="steps become slower",
        why="median step in each quarter of the run: " + ", ".join(f"{each * 1e3:.3g} ms" for each in quarters),
        query="SELECT step, median(seconds) FROM steps GROUP BY step ORDER BY step",
        do="look for work that grows: lists that are searched, logs that are rewritten, longer sequences, a hot device",
        gain=gain,
    )


def _small_batch(measures: Measures) -> Verdict | None:
    if measures.optimizer_share < max(0.2, 0.5 * measures.share.get(Class.COMPUTE, 0.0)):
        return None
    fixed = measures.optimizer_share + measures.share.get(Class.COMM, 0.0)
    return Verdict(
        kind="small_batch",
        what="the batch is too small",
        why=f"{fixed:.0%} of the step time does not depend on the batch: {measures.optimizer_share:.0%} optimizer, "
        f"{fixed - measures.optimizer_share:.0%} communication",
        query="SELECT name, sum(seconds) FROM spans GROUP BY name ORDER BY 2 DESC",
        do="use a larger batch per rank, or accumulate gradients over several batches per optimizer step",
        gain=fixed / 2,
    )


def _failures(ledger: LaunchLedger) -> list[Verdict]:
    totals = ledger.totals()
    wasted = totals.get(Class.RESTART, 0) + totals.get(Class.LOST, 0)
    gain = wasted / max(1, sum(totals.values()))
    if gain < GAIN_MIN:
        return []
    return [
        Verdict(
            kind="failures",
            what="failures cost time",
            why=f"{gain:.0%} of the run: {totals.get(Class.RESTART, 0) / 1e9:.1f} s of rank time restarting, "
            f"{totals.get(Class.LOST, 0) / 1e9:.1f} s of work done again",
            query="SELECT class, sum(seconds) FROM ledger GROUP BY class ORDER BY 2 DESC",
            do="remove what makes ranks fail; save more often, so that less work is done again",
            gain=gain,
        )
    ]


RULES: list[Callable[[Measures], Verdict | None]] = [
    _straggler,
    _input_bound,
    _checkpoint_bound,
    _gc_pauses,
    _recompilation,
    _communication_bound,
    _lock_contention,
    _python_bound,
    _oversubscribed,
    _memory_growth,
    _slow_down,
    _small_batch,
]
