"""What is restarted when a rank fails: policies as values, decisions as pure functions.

A policy is a module of `argosy.control.policies`, found by its name: `--restart calm` asks
`policies/calm.py` for `affected(failed, dims)`, the ranks to replace. Budgets and backoff are the same for all.

R1  No more than `max_restarts` restarts, in all.
R2  No more than `startup_max` failures in a row before any rank made progress.
R3  No more than `per_hour` restarts within an hour. Where `argosy.Run` owns the loop a rank that was killed from
    outside after it had made progress does not count.
R4  The delay before a restart doubles with every failure in a row, up to `backoff_max_s`.
R5  Ranks of one generation that are lost at once have one cause: R1 to R4 count them once.
R6  Where `argosy.Run` owns the loop: no more than `OWN_MAX` attempts in a row of a rank that fails by itself each time.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec

import msgspec

from argosy.core import ConfigError, format_ranks

_HOUR_S = 3600.0
AT_ONCE_S = 1.0
OWN_MAX = 3

Affected = Callable[[int, Mapping[str, int], str], Sequence[int]]


class Restart(msgspec.Struct, frozen=True, kw_only=True):
    """Which ranks are replaced after a failure, and how often."""

    policy: str = "never"
    """`auto` replaces the failed rank where `argosy.Run` owns the loop, and nothing elsewhere."""
    along: str = ""
    """The mesh dimension of a policy that needs one."""
    max_restarts: int | None = None
    startup_max: int = 3
    per_hour: int = 20
    backoff_s: float = 0.0
    backoff_max_s: float = 30.0

    def __post_init__(self) -> None:
        if (
            not re.fullmatch(r"[a-z][a-z_]*", self.policy)
            or find_spec(f"argosy.control.policies.{self.policy}") is None
        ):
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
    """A rank failed at a time; `progressed` if any rank had made a step since the last restart."""

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


class RestartAfter(msgspec.Struct, frozen=True):
    """Replace `ranks` after a delay."""

    ranks: tuple[int, ...]
    delay_s: float
    reason: str


class GiveUp(msgspec.Struct, frozen=True):
    """Do not restart."""

    reason: str


def _causes(failures: Sequence[Failure]) -> list[Failure]:
    """The failures without those that came at once with another of the same generation (R5)."""
    causes: list[Failure] = []
    before: Failure | None = None
    for failure in failures:
        if (
            before is None
            or failure.index == before.index
            or failure.generation != before.generation
            or failure.at - before.at >= AT_ONCE_S
        ):
            causes.append(failure)
        before = failure
    return causes


def _own_in_a_row(causes: Sequence[Failure]) -> int:
    """How often the last rank has failed by itself since it made progress; the failure that ended that counts."""
    count = 0
    for failure in reversed(causes):
        if not failure.own or failure.index != causes[-1].index or (failure.progressed and not count):
            break
        count += 1
        if failure.progressed:
            break
    return count


def decide_restart(restart: Restart, failures: Sequence[Failure], dims: Mapping[str, int]) -> RestartAfter | GiveUp:
    """Return what follows from the last of `failures`; the earlier ones were each answered by a restart."""
    last, causes = failures[-1], _causes(failures)
    past = len(causes) - 1
    policy = restart.policy
    if last.managed and policy in ("auto", "all"):
        policy = "rank"
    if policy in ("auto", "never"):
        return GiveUp("restarts were not asked for")
    if last.hopeless:
        return GiveUp("a replacement would fail as well")
    if restart.max_restarts is not None and past >= restart.max_restarts:  # R1
        return GiveUp(f"{past} of {restart.max_restarts} restarts are used")
    in_a_row = 0
    for failure in reversed(causes):
        if failure.progressed:
            break
        in_a_row += 1
    if in_a_row > restart.startup_max:  # R2
        return GiveUp(f"{in_a_row} failures in a row before any progress, {restart.startup_max} restarts allowed")
    if last.managed and (own := _own_in_a_row(causes)) >= OWN_MAX:  # R6
        return GiveUp(f"rank {last.index} failed by itself {own} times in a row, without progress")
    past_hour = [failure for failure in causes[:-1] if last.at - failure.at < _HOUR_S]
    recent = sum(1 for failure in past_hour if failure.own or not (failure.managed and failure.progressed))
    if recent >= restart.per_hour:  # R3
        return GiveUp(f"{recent} restarts within an hour, {restart.per_hour} allowed")
    affected: Affected = import_module(f"argosy.control.policies.{policy}").affected
    ranks = tuple(sorted(affected(last.index, dims, restart.along)))
    first_delay_s = restart.backoff_s if in_a_row < 2 else max(restart.backoff_s, 0.5)
    delay_s = min(first_delay_s * 2.0 ** max(0, in_a_row - 2), restart.backoff_max_s)  # R4
    count = f"restart {past + 1}" + ("" if restart.max_restarts is None else f" of {restart.max_restarts}")
    return RestartAfter(ranks, delay_s, f"{count}, ranks {format_ranks(ranks)}")


def size_of(dims: Mapping[str, int]) -> int:
    """The number of ranks of a mesh."""
    size = 1
    for extent in dims.values():
        size *= extent
    return size


def parse_restart(text: str, max_restarts: int | None) -> Restart:
    """Read `rank`, `all`, `never`, `group:dp` or the name of another policy.

    Raises:
        ConfigError: there is no such policy.
    """
    policy, _, along = text.partition(":")
    return Restart(policy=policy, along=along, max_restarts=max_restarts)
