"""Small worlds in which everything goes wrong: one life of a run each, drawn from its seed, with its invariants."""

import random
import signal
from collections.abc import Container
from functools import partial

from argosy.control import Hung, Restart, RunEvent, StopWanted
from argosy.sim.fleet.faults import HARSH
from argosy.sim.fleet.host_faults import strike
from argosy.sim.fleet.sim_run import RunPlan, SimRun
from argosy.sim.fleet.world import Teller, Violation

POLICIES = [
    Restart.never(),
    Restart.all(3),
    Restart.rank(4),
    Restart.rank(),
    Restart.group("one", 2),
    Restart.group("pair"),
    Restart(policy="auto"),
    Restart(policy="all", max_restarts=2, startup_max=2),
]


def live(seed: int, crash_at: Container[int] = (), tell: Teller | None = None) -> SimRun:
    """One life of a run on one to five hosts, whose agents are killed at the given points."""
    rng = random.Random(seed * 7 + 1)
    hosts = rng.choice([1, 1, 2, 3, 4, 5])
    run = _a_run(seed, rng, hosts, crash_at, spare_hosts=0)
    run.world.tell = tell
    stops: list[tuple[float, RunEvent]] = []
    if rng.random() < 0.3:
        stops = [(rng.uniform(0, 60), StopWanted("you", signal.SIGTERM)) for _ in range(rng.choice([1, 2]))]
    if rng.random() < 0.2:
        stops.append((rng.uniform(5, 60), Hung(0, "hung")))
    if not run.launched.launch.detached and rng.random() < 0.1:
        run.world.after(rng.uniform(0, 60), run.lose_client)
    run.run(stops)
    run.check_end()
    return run


def live_with_lost_hosts(seed: int, crash_at: Container[int] = (), tell: Teller | None = None) -> SimRun:
    """One life of a run on hosts of which some are lost or cut off, with none to two spare hosts."""
    rng = random.Random(seed * 11 + 3)
    run = _a_run(seed, rng, rng.choice([2, 3, 4]), crash_at, spare_hosts=rng.randrange(3))
    run.world.tell = tell
    names = [each.name for each in run.hosts[1:]]
    for name in rng.sample(names, min(len(names), rng.choice([1, 1, 2]))):
        run.world.after(rng.uniform(0, 40), partial(strike, run, rng.choice(["power", "cut", "one-way"]), name))
    stops: list[tuple[float, RunEvent]] = []
    if rng.random() < 0.2:
        stops = [(rng.uniform(0, 60), StopWanted("you", signal.SIGTERM))]
    run.run(stops)
    run.check_end()
    return run


def _a_run(seed: int, rng: random.Random, hosts: int, crash_at: Container[int], spare_hosts: int) -> SimRun:
    restart = POLICIES[seed % len(POLICIES)]
    ranks = 2 * hosts if restart.along else hosts + rng.randrange(3)
    plan = RunPlan(hosts=hosts, ranks=ranks, restart=restart, spare_hosts=spare_hosts)
    return SimRun(seed, HARSH, plan, crash_at)


def random_life(seed: int, tell: Teller | None = None) -> SimRun:
    """A life of any kind: with hosts lost or not, with agents killed at random or not.

    Raises:
        Violation: an invariant does not hold.
    """
    rng = random.Random(seed)
    kills = rng.choice([0, 1, 8, 25])
    crash_at = set(rng.sample(range(1, 300), kills))
    kind = live_with_lost_hosts if rng.random() < 0.5 else live
    try:
        return kind(seed, crash_at, tell)
    except Violation:
        raise
    except Exception as error:  # A machine that fails ends the agent again and again.
        raise Violation(f"seed {seed}: {type(error).__name__}: {error}") from error
