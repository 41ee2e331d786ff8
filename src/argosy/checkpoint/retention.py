"""Decide which steps are kept, and how often to save. Pure.

K1  The newest step is always kept, and so is every pinned or tagged one.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from argosy.checkpoint.format import Root
from argosy.core import ConfigError


def _at_least_1(what: str, number: object) -> None:
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ConfigError(f"{what} needs a whole number, at least 1: {number!r}")


class KeepLast(msgspec.Struct, frozen=True, tag=True):
    """Keep the newest `count` steps."""

    count: int

    def __post_init__(self) -> None:
        _at_least_1("KeepLast", self.count)

    def choose(self, roots: Sequence[Root]) -> list[Root]:
        return sorted(roots, key=lambda root: (root.era, root.step))[-self.count :]


class KeepBest(msgspec.Struct, frozen=True, tag=True):
    """Keep the `count` steps with the lowest `metric` (the highest with `highest=True`)."""

    metric: str
    count: int
    highest: bool = False

    def __post_init__(self) -> None:
        _at_least_1("KeepBest", self.count)
        highest: Any = self.highest
        if not isinstance(highest, bool):
            raise ConfigError(f"highest= is True or False: {highest!r}", hint="without it, the lowest are the best")

    def choose(self, roots: Sequence[Root]) -> list[Root]:
        known = [root for root in roots if not math.isnan(root.metrics.get(self.metric, math.nan))]
        sign = -1 if self.highest else 1
        return sorted(known, key=lambda root: (sign * root.metrics[self.metric], -root.step))[: self.count]


class KeepEvery(msgspec.Struct, frozen=True, tag=True):
    """Keep each step that is a multiple of `steps`."""

    steps: int

    def __post_init__(self) -> None:
        _at_least_1("KeepEvery", self.steps)

    def choose(self, roots: Sequence[Root]) -> list[Root]:
        return [root for root in roots if root.step % self.steps == 0]


class KeepBack(msgspec.Struct, frozen=True, tag=True):
    """Keep enough to go back `steps` or a little more at any time: a few behind the newest, apart from each other.

    Of eras that ended only what a later one went on from is its past.
    """

    steps: int

    def choose(self, roots: Sequence[Root]) -> list[Root]:
        ordered = sorted(roots, key=lambda root: (root.era, root.step))
        past = [root for root in ordered if all(root.step <= other.step for other in ordered if other.era > root.era)]
        chosen: list[Root] = []
        for root in past:
            if not chosen or root.step >= chosen[-1].step + max(1, self.steps // 4):
                chosen.append(root)
        far = sum(root.step <= past[-1].step - self.steps for root in chosen) if past else 0
        return chosen[max(0, far - 1) :]


Keep = KeepLast | KeepBest | KeepEvery | KeepBack


def choose_kept(roots: Mapping[str, Root], policies: Sequence[Keep], pins: Collection[int]) -> dict[str, str]:
    """The directories to keep, each with its reason. Of a step that was saved twice the newer one is enough."""
    kept: dict[str, str] = {}
    newer = {(root.era, root.step): name for name, root in sorted(roots.items(), key=lambda each: each[1].saved_at)}
    twice = {name for name, root in roots.items() if newer[root.era, root.step] != name and not root.tags}
    roots = {name: root for name, root in roots.items() if name not in twice}
    for policy in policies:
        chosen = [id(root) for root in policy.choose(list(roots.values()))]
        for name, root in roots.items():
            if id(root) in chosen:
                kept.setdefault(name, str(policy))
    for name, root in roots.items():
        if root.step in pins:
            kept[name] = "pinned"
        elif root.tags:
            kept[name] = f"tagged {', '.join(root.tags)}"
    newest = max(roots, key=lambda name: (roots[name].era, roots[name].step, roots[name].saved_at), default=None)
    if newest is not None:
        kept.setdefault(newest, "the newest")
    return kept


def needed_by(roots: Mapping[str, Root], kept: Collection[str]) -> dict[str, str]:
    """The directories that stay because a kept step refers to tensors in them that did not change, with that reason."""
    newest = sorted(kept, key=lambda name: (roots[name].era, roots[name].step))
    return {
        need: f"needed by step {roots[name].step}, which refers to its unchanged tensors"
        for name in newest
        for need in roots[name].needs
        if need in roots
    }


def best_interval_s(cost_s: float, failures_per_s: float) -> float:
    """How long to train between saves that lose the least, by Young and Daly.

    `cost_s` is the training time that one save costs. Without failures there is no best: infinity.
    """
    if failures_per_s <= 0:
        return math.inf
    mean = 1 / failures_per_s
    if cost_s >= 2 * mean:
        return mean  # Daly: saving costs more than failing twice; he caps it at the mean time between failures.
    root = math.sqrt(2 * cost_s * mean)
    return root * (1 + math.sqrt(cost_s / (2 * mean)) / 3 + cost_s / (18 * mean)) - cost_s


@dataclass(frozen=True, slots=True)
class Cadence:
    """When a save is due: every so many steps, or as often as measured cost and failure rate make best."""

    every_steps: int | None = None
    failures_per_day: float = 1.0
    """What is expected before any failure was seen."""

    def __post_init__(self) -> None:
        if self.every_steps is not None:
            _at_least_1("every_steps", self.every_steps)
        rate: Any = self.failures_per_day
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise ConfigError(f"failures_per_day is a number from 0 on: {rate!r}")

    def per_second(self) -> float:
        return self.failures_per_day / 86400

    def steps(self, step_s: float, cost_s: float, failures_per_s: float | None = None) -> int:
        """Steps between saves, for the measured time of a step and cost of a save."""
        if self.every_steps is not None:
            return self.every_steps
        seconds = best_interval_s(cost_s, self.per_second() if failures_per_s is None else failures_per_s)
        if math.isinf(seconds) or step_s <= 0:
            return 1 << 30
        return max(1, round(seconds / step_s))
