"""A long run on many simulated hosts, at a rate of failures, and what came of it."""

import math
import random
from dataclasses import dataclass, field
from functools import partial

from argosy.control import Restart, facts
from argosy.core import ConfigError
from argosy.sim.fleet.faults import Faults
from argosy.sim.fleet.host_faults import strike
from argosy.sim.fleet.sim_run import RunPlan, SimRun

SETTLE_S = 30.0
"""Nothing happens to hosts before this much time has passed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetResult:
    """What happened to a simulated run."""

    seed: int
    hosts: int
    ranks: int
    hours: float
    simulated: int
    """Hosts that were simulated one by one; the others share the fate of one."""
    events: int
    digest: str
    struck: dict[str, int]
    """How often what happened to a host."""
    hosts_lost: int
    ranks_replaced: int
    restarts: int
    replaced_after_s: tuple[float, ...]
    """From each failure until the process of its rank's next generation existed."""
    code: int
    reason: str


def plan_strikes(faults: Faults, hosts: int, hours: float, rng: random.Random) -> list[tuple[float, str, int]]:
    """When, what and to which host; the head's host is spared what nobody could survive."""
    strikes: list[tuple[float, str, int]] = []
    for kind, rate in sorted(faults.per_hour.items()):
        at, first = SETTLE_S, 0 if kind in ("rank", "agent") else 1
        while rate > 0 and hosts > first and (at := at + rng.expovariate(rate * hosts / 3600)) < hours * 3600:
            strikes.append((at, kind, rng.randrange(first, hosts)))
    return sorted(strikes)


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """A run on many hosts, for some hours."""

    hosts: int
    ranks_per_host: int = 1
    hours: float = 1.0
    spare_hosts: int = 0
    restart: Restart = field(default_factory=Restart.rank)

    def __post_init__(self) -> None:
        if min(self.hosts, self.ranks_per_host) < 1 or self.spare_hosts < 0 or not 0 < self.hours < math.inf:
            raise ConfigError(
                f"not a run: {self.hosts} hosts of {self.ranks_per_host} ranks, {self.spare_hosts} spare hosts, "
                f"{self.hours} hours"
            )
        if self.restart.along:
            raise ConfigError(
                f"groups of ranks are not simulated on many hosts: group:{self.restart.along}",
                hint="--restart rank, all or never",
            )


def sim_fleet(seed: int, faults: Faults, plan: FleetPlan, *, fold: bool = True) -> FleetResult:
    """Simulate a run; with `fold`, hosts to which nothing happens are simulated as one.

    Raises:
        Violation: an invariant does not hold.
    """
    strikes = plan_strikes(faults, plan.hosts, plan.hours, random.Random(seed))
    shape = RunPlan(
        hosts=plan.hosts,
        ranks=plan.hosts * plan.ranks_per_host,
        restart=plan.restart,
        spare_hosts=plan.spare_hosts,
        folded=frozenset(range(1, plan.hosts)) - {index for _, _, index in strikes} if fold else frozenset(),
    )
    run = SimRun(seed, faults, shape)
    run.world.done_at = run.world.now + plan.hours * 3600
    for at, kind, index in strikes:
        run.world.after(at, partial(strike, run, kind, f"host{index}"))
    run.run([], events_max=100_000_000)
    return _result(run, strikes, plan.hours)


def _result(run: SimRun, strikes: list[tuple[float, str, int]], hours: float) -> FleetResult:
    end = run.check_end()
    restarting = [fact for fact in run.told if isinstance(fact, facts.Restarting)]
    started = {fact.rank: fact.at for fact in run.told if isinstance(fact, facts.RankStarted)}
    failed = {fact.rank: fact.at for fact in run.told if isinstance(fact, facts.RankExited) and not fact.status.ok}
    after = [
        at - failed[old]
        for rank, at in started.items()
        for old in failed
        if (old.index, old.generation + 1) == (rank.index, rank.generation)
    ]
    return FleetResult(
        seed=run.world.seed,
        hosts=len(set(run.launched.hosts)),
        ranks=len(run.indices),
        hours=hours,
        simulated=len(run.hosts),
        events=run.world.events,
        digest=run.world.digest,
        struck={kind: sum(each[1] == kind for each in strikes) for kind in sorted({each[1] for each in strikes})},
        hosts_lost=sum(isinstance(fact, facts.HostLost) for fact in run.told),
        ranks_replaced=sum(rank.generation > 0 for rank in started),
        restarts=len(restarting),
        replaced_after_s=tuple(sorted(after)),
        code=end.code,
        reason=end.reason,
    )
