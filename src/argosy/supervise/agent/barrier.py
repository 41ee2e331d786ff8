"""Barriers among the ranks of a run: counted by the agent, one after another."""

import contextlib

from argosy.core import ArgosyError
from argosy.fabric import Released
from argosy.supervise.agent.board import Asker


class Barrier:
    """Who has arrived. A rank says the number of its barrier, so that it may say so twice (to the next agent)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._arrived: dict[int, set[int]] = {}
        self._waiting: dict[int, Asker] = {}
        self._released = 0

    def arrive(self, index: int, count: int, link: Asker) -> None:
        """Rank `index` reached barrier `count`; when all have, all continue."""
        if count <= self._released:
            _release([link], self._released)
            return
        self._waiting[index] = link
        here = self._arrived.setdefault(count, set())
        here.add(index)
        if len(here) == self._size:
            self._released = count
            self._arrived = {number: ranks for number, ranks in self._arrived.items() if number > count}
            _release(list(self._waiting.values()), count)
            self._waiting.clear()


def _release(links: list[Asker], count: int) -> None:
    for link in links:
        with contextlib.suppress(ArgosyError):  # A rank that is gone waits for nothing.
            link.send(Released(count))
