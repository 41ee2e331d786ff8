"""How tasks of several ranks unfold in time.

A task runs on one or more queues (a rank's compute or communication), each of which runs its tasks in the order in
which they were added. It starts when its queues are free and what it needs is done. Ranks that share a fate are one
class; a straggler is a class of its own. Pure, and the reference for a native version.
"""

import heapq
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from argosy.core import ArgosyError


class Deadlock(ArgosyError):
    """Tasks wait for each other in a circle."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work."""

    name: str
    seconds: float
    queues: tuple[Hashable, ...]
    needs: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Timeline:
    """When each task started and ended."""

    starts: list[float]
    ends: list[float]

    @property
    def end(self) -> float:
        return max(self.ends, default=0.0)


def simulate(tasks: Sequence[Task]) -> Timeline:
    """Run all tasks.

    Raises:
        Deadlock: some can never start; the message names the first.
    """
    waiting = [0] * len(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[Hashable, int] = {}
    for index, task in enumerate(tasks):
        before = set(task.needs) | {last[queue] for queue in task.queues if queue in last}
        waiting[index] = len(before)
        for each in before:
            followers[each].append(index)
        for queue in task.queues:
            last[queue] = index
    starts, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    ready = [(0.0, index) for index, count in enumerate(waiting) if count == 0]
    heapq.heapify(ready)
    done = 0
    while ready:
        now, index = heapq.heappop(ready)
        starts[index], ends[index] = now, now + tasks[index].seconds
        done += 1
        for follower in followers[index]:
            waiting[follower] -= 1
            starts[follower] = max(starts[follower], ends[index])
            if waiting[follower] == 0:
                heapq.heappush(ready, (starts[follower], follower))
    if done < len(tasks):
        stuck = next(index for index, count in enumerate(waiting) if count > 0)
        raise Deadlock(f"{len(tasks) - done} tasks can never start, the first is: {tasks[stuck].name}")
    return Timeline(starts, ends)


def fold(signatures: Sequence[Hashable], groups: Sequence[Sequence[int]]) -> list[int]:
    """Colour ranks so that two have one colour if they do the same and their groups look the same.

    `signatures` says what each rank does; `groups` lists the ranks of every collective. Returns a colour per rank.
    """
    member_of: dict[int, list[int]] = defaultdict(list)
    for number, ranks in enumerate(groups):
        for rank in ranks:
            member_of[rank].append(number)
    colours = recolour(list(signatures))
    while True:
        looks = [tuple(sorted(colours[rank] for rank in ranks)) for ranks in groups]
        signs = recolour(list[Hashable](looks))
        refined = recolour([(colours[r], tuple(signs[g] for g in member_of[r])) for r in range(len(colours))])
        if len(set(refined)) == len(set(colours)):
            return refined
        colours = refined


def recolour(keys: list[Hashable]) -> list[int]:
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]
