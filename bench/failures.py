"""How soon a failure is seen, and how soon what it broke is whole again.

    python bench/failures.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

The bench is the killer. What Argosy saw is read from the run's journal, whose times are of the same clock;
torchrun is heard on its output; Ray and Monarch are heard by the call that raises.
"""

import contextlib
import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from contenders import SCRIPTS, Stage, wait_until
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import python_of
from ranks import Ranks, Told, argosy_ranks, torchrun_ranks

from argosy.process import list_runs, read_facts

UP_S = 300.0
SEEN_S = 10.0
BACK_S = 40.0
"""The cap on each try to come back."""
MONARCH_TUNED = [
    "supervision_watchdog_timeout=2s",
    "get_proc_state_max_idle=1s",
    "get_actor_state_max_idle=1s",
    "message_delivery_timeout=2s",
]
TORCHRUN_C10D = ["--rdzv-backend=c10d", "--local-addr=127.0.0.1", "--monitor-interval=0.01"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


Fact = dict[str, Any]


def facts_of(run_dir: Path, kind: str) -> list[Fact]:
    """The facts of one kind in a run's journal, as plain values."""
    facts: list[Fact] = [msgspec.to_builtins(fact) for fact in read_facts(run_dir)]
    return [fact for fact in facts if fact["type"] == kind]


def wait_fact(ranks: Ranks, kind: str, wanted: Callable[[Fact], bool]) -> float:
    """Wait for a fact in the journal; returns the time it was recorded with."""
    end = time.monotonic() + SEEN_S
    while time.monotonic() < end:
        for fact in facts_of(ranks.run_dir, kind):
            if wanted(fact):
                return float(fact["at"])
        time.sleep(0.01)
    raise Failed(f"not recorded within {SEEN_S:g} s")


# --- seen: SIGKILL and SIGSTOP of one rank


def seen_by_argosy(
    stage: Stage, size: int, tries: int, number: signal.Signals, kind: str = "bare"
) -> list[float | Failed]:
    """What the journal says; ranks that train may be replaced often, bare ones three times in a launch."""
    seconds: list[float | Failed] = []
    most = tries if kind == "alone" or number is signal.SIGSTOP else 3
    while len(seconds) < tries:
        with argosy_ranks(stage, size, kind, "--restart", "rank") as ranks:
            told = ranks.wait_all("step" if kind == "alone" else "ready", UP_S)
            time.sleep(0.4)  # All have made a step more, which counts as progress.
            seconds += [seen_once(ranks, told[index % size], number) for index in range(most)]
    return seconds


def seen_once(ranks: Ranks, told: Told, number: signal.Signals) -> float | Failed:
    time.sleep(0.1)
    at = time.time()
    os.kill(told.pid, number)
    try:
        if number is signal.SIGSTOP:
            # A millisecond of grace, since the times come from two processes.
            return wait_fact(ranks, "RankPaused", lambda fact: is_pause(fact, told.rank, at - 0.001)) - at
        return wait_fact(ranks, "RankExited", lambda fact: fact["pid"] == told.pid) - at
    except Failed as failed:
        return failed
    finally:
        if number is signal.SIGSTOP:
            os.kill(told.pid, signal.SIGCONT)


def is_pause(fact: Fact, rank: int, since: float) -> bool:
    return fact["rank"]["index"] == rank and not fact["resumed"] and fact["at"] >= since


def seen_by_kernel(stage: Stage, size: int, tries: int) -> list[float]:
    """The floor: how long the kernel takes to end a rank with torch in its memory."""
    seconds: list[float] = []
    with argosy_ranks(stage, size, "alone", "--restart", "rank") as ranks:
        for told in list(ranks.wait_all("step", UP_S).values())[:tries]:
            time.sleep(0.5)
            pidfd = os.pidfd_open(told.pid)
            at = time.time()
            os.kill(told.pid, signal.SIGKILL)
            select.select([pidfd], [], [], SEEN_S)
            seconds.append(time.time() - at)
            os.close(pidfd)
    return seconds


def seen_by_torchrun(stage: Stage, size: int, number: signal.Signals, *flags: str) -> float:
    """What torchrun says when it sees the failure; it restarts nothing, so saying is all it does."""
    with torchrun_ranks(stage, size, "bare", *flags) as ranks:
        told = ranks.wait_all("ready", UP_S)[size // 2]
        time.sleep(0.5)
        at = time.time()
        os.kill(told.pid, number)
        try:
            return ranks.command.wait_line(rf"pid: {told.pid}|exitcode: -9|[Ss]topped", SEEN_S, after=at) - at
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(told.pid, signal.SIGCONT)


def peer_values(stage: Stage, peer: str, *args: str) -> list[float]:
    """Run a peer's script and take the values that it prints."""
    with stage.live([python_of(peer), str(SCRIPTS / f"{peer}_failures.py"), *args]) as command:
        command.wait(UP_S)
        values = [float(line.split()[1]) for _, line in command.lines if line.startswith("value ")]
        if not values:
            raise Failed("said nothing")
        return values


def killed_row(stage: Stage, size: int, tries: int) -> Row:
    kill, few = signal.SIGKILL, min(tries, size, 8)
    return Row(
        key="killed",
        title=f"from SIGKILL of one rank to the supervisor's report (argosy: {size} ranks; peers: 4)",
        percentile=99,
        contenders=[
            Contender(name="torchrun", sample=partial(seen_by_torchrun, stage, 4, kill)),
            Contender(
                name="torchrun 10 ms",
                sample=partial(seen_by_torchrun, stage, 4, kill, "--monitor-interval=0.01"),
            ),
            Contender(name="argosy", sample=partial(seen_by_argosy, stage, size, tries, kill)),
            Contender(name="argosy, torch ranks", sample=partial(seen_by_argosy, stage, size, few, kill, "alone")),
            Contender(name="kernel, torch ranks", sample=partial(seen_by_kernel, stage, size, few)),
            Contender(name="ray", sample=partial(peer_values, stage, "ray", "kill", "5"), repeat_max=1),
            Contender(name="monarch", sample=partial(peer_values, stage, "monarch", "4", "kill"), repeat_max=2),
            Contender(
                name="monarch tuned",
                sample=partial(peer_values, stage, "monarch", "4", "kill", *MONARCH_TUNED),
                repeat_max=2,
            ),
        ],
        goals=[Goal(of="argosy", at_most=0.010, percentile=99)],
    )


def stopped_row(stage: Stage, size: int, tries: int) -> Row:
    stop = signal.SIGSTOP
    return Row(
        key="stopped",
        title=f"from SIGSTOP of one rank to a verdict (argosy: {size} ranks; peers: 4)",
        contenders=[
            Contender(name="torchrun", sample=partial(seen_by_torchrun, stage, 4, stop), repeat_max=1),
            Contender(name="argosy", sample=partial(seen_by_argosy, stage, size, tries, stop)),
            Contender(name="ray", sample=partial(peer_values, stage, "ray", "stop"), repeat_max=1),
            Contender(name="monarch", sample=partial(peer_values, stage, "monarch", "4", "stop"), repeat_max=1),
        ],
        goals=[Goal(of="argosy", at_most=0.100)],
    )


# --- back: one rank alone, or all of a Gloo group


def replaced_by_argosy(stage: Stage, size: int, tries: int) -> list[float | Failed]:
    """From the kill to the word of the replacement that torch is imported; the others must not have changed."""
    seconds: list[float | Failed] = []
    with argosy_ranks(stage, size, "alone", "--restart", "rank") as ranks:
        for victim in range(tries):
            before = ranks.wait_all("step", UP_S)
            told = before[victim % size]
            time.sleep(0.4)  # The others make a step, which counts as progress: no backoff.
            at = time.time()
            os.kill(told.pid, signal.SIGKILL)
            wait_until(partial(_is_back, ranks, told), BACK_S, f"rank {told.rank} back", every_s=0.005)
            after = ranks.now("ready")
            same = sum(after[rank].pid == before[rank].pid for rank in before if rank in after)
            back = after[told.rank].at - at
            seconds.append(back if same == size - 1 else Failed(f"only {same} of {size - 1} others unchanged"))
    return seconds


def _is_back(ranks: Ranks, lost: Told) -> bool:
    told = ranks.now("ready").get(lost.rank)
    return told is not None and told.pid != lost.pid


def back_after_kill(ranks: Ranks, tries: int, what: str) -> list[float | Failed]:
    """Kill one rank after another; seconds until all are ready again. A lost try ends the series."""
    seconds: list[float | Failed] = []
    for number in range(tries):
        try:
            before = ranks.wait_all(what, UP_S)
            time.sleep(0.3)
            at = time.time()
            os.kill(before[(2 + number) % ranks.size].pid, signal.SIGKILL)
            dead = frozenset(told.pid for told in before.values())
            after = ranks.wait_all("ready", BACK_S, but=dead)
            seconds.append(max(told.at for told in after.values()) - at)
        except Failed as failed:
            return [*seconds, failed]
    return seconds


def gloo_by_argosy(stage: Stage, tries: int) -> list[float | Failed]:
    with argosy_ranks(stage, 4, "gloo", "--max-restarts", str(tries + 1)) as ranks:
        return back_after_kill(ranks, tries, "step")


def gloo_by_torchrun(
    stage: Stage, tries: int, *flags: str, extra: dict[str, str] | None = None
) -> list[float | Failed]:
    with torchrun_ranks(stage, 4, "gloo", f"--max-restarts={tries + 10}", *flags, extra=extra) as ranks:
        return back_after_kill(ranks, tries, "step")


def torchrun_all_back(stage: Stage, size: int) -> list[float | Failed]:
    with torchrun_ranks(stage, size, "alone", "--max-restarts=1") as ranks:
        return back_after_kill(ranks, 1, "ready")


def replaced_row(stage: Stage, size: int, tries: int, peer_size: int) -> Row:
    return Row(
        key="replaced",
        title=f"from SIGKILL of one of {size} ranks to its replacement with torch imported, the others undisturbed",
        base="ray",
        contenders=[
            Contender(name="argosy", sample=partial(replaced_by_argosy, stage, size, tries)),
            Contender(name="ray", sample=partial(peer_values, stage, "ray", "replace", "3"), repeat_max=1),
            Contender(
                name=f"torchrun, all {peer_size}",
                sample=partial(torchrun_all_back, stage, peer_size),
                repeat_max=1,
            ),
        ],
        goals=[Goal(of="argosy", at_most=0.150)],
    )


def gloo_row(stage: Stage, tries: int, peer_tries: int, repeat: int) -> Row:
    best = partial(gloo_by_torchrun, stage, peer_tries, *TORCHRUN_C10D, extra=OWN_STORE)
    return Row(
        key="gloo",
        title="from SIGKILL of one of 4 ranks that train over Gloo to all 4 past a Gloo barrier",
        base="torchrun best",
        contenders=[
            Contender(name="torchrun", sample=partial(gloo_by_torchrun, stage, 1), repeat_max=3),
            Contender(name="torchrun best", sample=best),
            Contender(name="argosy", sample=partial(gloo_by_argosy, stage, tries)),
        ],
        goals=[
            Goal(of="argosy", tries=tries * repeat),
            Goal(of="argosy", times_of="torchrun best", times=10),
        ],
    )


# --- adopted: the supervisor itself is killed


def adopted_by_argosy(stage: Stage, size: int) -> float:
    """From kill -9 of the agent until the next one answers for all ranks, the same processes.

    Then it is killed again, and a rank leaves with 42 before there is another: that code must be recorded and
    be the command's own.
    """
    with argosy_ranks(stage, size, "bare") as ranks:
        told = ranks.wait_all("ready", UP_S)
        time.sleep(0.5)
        at = time.time()
        old = kill_agent()
        wait_until(lambda: supervised(old) == {t.pid for t in told.values()}, BACK_S, f"{size} ranks adopted")
        seconds = time.time() - at
        kill_agent()
        os.kill(told[size // 2].pid, signal.SIGUSR2)
        code = ranks.command.wait(UP_S)
        exits = {fact["pid"]: fact["status"]["code"] for fact in facts_of(ranks.run_dir, "RankExited")}
        lost = {t.pid for t in told.values()} - exits.keys()
        if code != 42 or exits.get(told[size // 2].pid) != 42 or lost:
            raise Failed(f"exit code {code} instead of 42; {len(lost)} exits not recorded")
    stage.go_cold()  # What was left of the killed agents should not meet the next row.
    return seconds


def kill_agent() -> int:
    agents = [daemon.pid for daemon in list_runs().daemons if daemon.what == "agent"]
    if not agents:
        raise Failed("no agent to kill")
    os.kill(agents[0], signal.SIGKILL)
    return agents[0]


def supervised(old_agent: int) -> set[int]:
    """The pids that an agent other than the old one answers for."""
    alive = list_runs()
    agents = {daemon.pid for daemon in alive.daemons if daemon.what == "agent"}
    if not agents - {old_agent}:
        return set()
    return {rank.pid for run in alive.runs for rank in run.ranks}


def adopted_by_torchrun(stage: Stage, size: int) -> float:
    with torchrun_ranks(stage, size, "bare") as ranks:
        told = ranks.wait_all("ready", UP_S)
        os.kill(ranks.command.pid, signal.SIGKILL)
        time.sleep(3.0)
        left = sum(Path(f"/proc/{t.pid}").exists() for t in told.values())
        raise Failed(f"nobody adopts: {left} of {size} ranks left behind without a supervisor")


def adopted_row(stage: Stage, size: int) -> Row:
    return Row(
        key="adopted",
        title=f"from SIGKILL of the agent to the adoption of its {size} ranks, no exit code lost",
        contenders=[
            Contender(name="torchrun", sample=partial(adopted_by_torchrun, stage, 4), repeat_max=1),
            Contender(name="argosy", sample=partial(adopted_by_argosy, stage, size)),
        ],
        goals=[Goal(of="argosy", at_most=1.0)],
    )


def rows(stage: Stage, options: Options) -> Sequence[Row]:
    quick = options.quick
    size = 8 if quick else 64
    return [
        killed_row(stage, size, 6 if quick else 21),
        stopped_row(stage, size, 4 if quick else 20),
        replaced_row(stage, size, 4 if quick else 10, 4 if quick else 16),
        adopted_row(stage, size),
        gloo_row(stage, 3 if quick else 10, 1 if quick else 5, options.repeat),
    ]


def main() -> int:
    with Stage() as stage:
        return run_benches("Failures: seen and mended, Argosy beside its peers.", partial(rows, stage))


if __name__ == "__main__":
    sys.exit(main())
