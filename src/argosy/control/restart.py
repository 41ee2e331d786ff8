"""Decide which ranks are restarted after a failure, how often, and after which delay.

Pure. A policy is a module of `argosy.control.policies`, found by its name: `--restart calm` asks
`policies/calm.py` for `affected(failed, dims, along)`, the ranks to replace. Budget and backoff are the same for all.

R1  A run has at most `max_restarts` restarts.
R2  At most `startup_max` failures in a row may come before any rank made progress.
R3  At most `per_hour` restarts happen within an hour. In a managed run, a rank that was killed from outside after it
    had made progress does not count. (Managed: `argosy.Run` owns the step loop.)
R4  The delay before a restart doubles with every failure in a row, up to `backoff_max_s`.
R5  Ranks of one generation that are lost within `AT_ONCE_S` share a cause: R1 to R4 count them once.
R6  In a managed run, a rank that fails by itself gets `OWN_MAX` attempts in a row.
R7  An agent is replaced at once. After `AGENT_DEATHS_MAX` deaths within a minute, it is replaced after a delay.
"""

from collections.abc import Mapping, Sequence

import msgspec

from argosy.control.policies import POLICIES
from argosy.core import ConfigError

_HOUR_S = 3600.0
_MINUTE_S = 60.0
AT_ONCE_S = 1.0
OWN_MAX = 3
AGENT_DEATHS_MAX = 5
AGENT_DELAY_S = 2.0


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks are replaced after a failure, and how often."""

    policy: str = "never"
    """`auto` replaces the failed rank of a managed run, and nothing in other runs."""
    along: str = ""
    """The mesh dimension of a policy that needs one."""
    max_restarts: int | None = None
    startup_max: int = 3
    per_hour: int = 20
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ConfigError(
                f"no such restart policy: {self.policy!r}",
                hint="rank, group:DIM, all and never come with Argosy",
            )
        if self.max_restarts is not None and self.max_restarts < 0:
            raise ConfigError(f"max_restarts must not be negative: {self.max_restarts}")

    @classmethod
    def never(cls) -> "Restart":
        """The first failure ends the run."""
        return cls(policy="never")

    @classmethod
    def rank(cls, max_restarts: int | None = None) -> "Restart":
        """Replace the failed rank alone; the others are not disturbed."""
        return cls(policy="rank", max_restarts=max_restarts)

    @classmethod
    def group(cls, along: str, max_restarts: int | None = None) -> "Restart":
        """Replace the ranks with the failed rank's index along the dimension `along`."""
        return cls(policy="group", along=along, max_restarts=max_restarts)

    @classmethod
    def all(cls, max_restarts: int | None = None) -> "Restart":
        """Replace every rank, as torchrun does."""
        return cls(policy="all", max_restarts=max_restarts)


class Failure(msgspec.Struct, frozen=True):
    """A rank failed at a time; `progressed` if it, or a rank started with it, had made a step."""

    index: int
    at: float
    progressed: bool
    cause: str
    generation: int = 0
    managed: bool = False
    """`argosy.Run` owns the step loop, so that the other ranks can wait for this one's replacement."""
    hopeless: bool = False
    """The rank said that a replacement would fail as well."""
    own: bool = False
    """It exited or crashed by itself: nobody killed it."""


class Budget(msgspec.Struct, frozen=True):
    """What the failures of a run have used up so far. Its size does not grow with the run."""

    causes: int = 0
    """Failures, where those that share a cause count once (R5)."""
    in_a_row: int = 0
    """Causes since the last progress."""
    own_in_a_row: int = 0
    """How often the last rank failed by itself in a row; the failure that ended its progress counts."""
    charged: tuple[float, ...] = ()
    """When the causes before the last one happened that count against the hour (R3)."""
    cause: Failure | None = None
    """The last failure that was a cause of its own."""
    last: Failure | None = None


def charge(budget: Budget, failure: Failure) -> Budget:
    """Return the budget after one more failure."""
    last, before = budget.last, budget.cause
    if (
        last is not None
        and failure.index != last.index
        and failure.generation == last.generation
        and failure.at - last.at < AT_ONCE_S
    ):
        return msgspec.structs.replace(budget, last=failure)  # R5
    own_in_a_row = 0
    if failure.own and not failure.progressed:
        own_in_a_row = 1
        if before is not None and before.own and before.index == failure.index:
            own_in_a_row += 1 if before.progressed else budget.own_in_a_row
    charged = budget.charged
    if before is not None and (before.own or not (before.managed and before.progressed)):
        charged = (*charged, before.at)
    return Budget(
        causes=budget.causes + 1,
        in_a_row=0 if failure.progressed else budget.in_a_row + 1,
        own_in_a_row=own_in_a_row,
        charged=tuple(at for at in charged if failure.at - at < _HOUR_S),
        cause=failure,
        last=failure,
    )


class RestartAfter(msgspec.Struct, frozen=True):
    """Replace `ranks` after a delay."""

    ranks: tuple[int, ...]
    delay_s: float


class GiveUp(msgspec.Struct, frozen=True):
    """Do not restart."""

    reason: str


def decide_restart(restart: Restart, budget: Budget, dims: Mapping[str, int]) -> RestartAfter | GiveUp:
    """Return what follows from the last failure that was charged to `budget`."""
    last = budget.last
    assert last is not None
    past = budget.causes - 1
    policy = restart.policy
    if last.managed and policy in ("auto", "all"):
        policy = "rank"
    if policy in ("auto", "never"):
        return GiveUp("restarts were not asked for")
    if last.hopeless:
        return GiveUp("a replacement would fail as well")
    if restart.max_restarts is not None and past >= restart.max_restarts:  # R1
        return GiveUp(f"{past} of {restart.max_restarts} restarts are used")
    in_a_row = budget.in_a_row
    if in_a_row > restart.startup_max:  # R2
        return GiveUp(f"{in_a_row} failures in a row before any progress, {restart.startup_max} restarts allowed")
    if last.managed and budget.own_in_a_row >= OWN_MAX:  # R6
        return GiveUp(f"rank {last.index} failed by itself {budget.own_in_a_row} times in a row, without progress")
    recent = len(budget.charged)
    if recent >= restart.per_hour:  # R3
        return GiveUp(f"{recent} restarts within an hour, {restart.per_hour} allowed")
    ranks = tuple(sorted(POLICIES[policy](last.index, dims, restart.along)))
    first_delay_s = restart.backoff_s if in_a_row < 2 else max(restart.backoff_s, 0.5)
    delay_s = min(first_delay_s * 2.0 ** max(0, in_a_row - 2), restart.backoff_max_s)  # R4
    return RestartAfter(ranks, delay_s)


def agent_delay_s(deaths: Sequence[float], now: float) -> float:
    """How long to wait before the next agent is started; `deaths` is when earlier ones died (R7)."""
    recent = sum(now - at < _MINUTE_S for at in deaths)
    return 0.0 if recent < AGENT_DEATHS_MAX else AGENT_DELAY_S


def parse_restart(text: str, max_restarts: int | None) -> Restart:
    """Read `rank`, `all`, `never`, `group:dp` or the name of another policy.

    Raises:
        ConfigError: there is no such policy.
    """
    policy, _, along = text.partition(":")
    return Restart(policy=policy, along=along, max_restarts=max_restarts)
