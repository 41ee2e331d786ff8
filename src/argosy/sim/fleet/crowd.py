"""Hosts of equal fate: one of them is simulated, and what it says is said by all.

Nothing happens to these hosts alone. The head's machine hears each of them, and orders each of them. That it orders the
same of all is checked, apart from the ranks that each has.
"""

from typing import TypeVar

import msgspec

from argosy.control import (
    Exited,
    KillRanks,
    Letter,
    Noted,
    Order,
    Report,
    SignalRanks,
    Started,
    StartRanks,
)
from argosy.core import RankId
from argosy.sim.fleet.world import World

Content = TypeVar("Content", bound=Order | Report)


def shifted(content: Content, shift: int) -> Content:
    """The same order or report about the ranks of another host."""
    match content:
        case StartRanks(ranks=ranks) | SignalRanks(ranks=ranks) | KillRanks(ranks=ranks):
            moved = tuple(_moved(rank, shift) for rank in ranks)
            return msgspec.structs.replace(content, ranks=moved) if moved else content
        case Started(rank=rank) | Noted(rank=rank) | Exited(rank=rank):
            return msgspec.structs.replace(content, rank=_moved(rank, shift))
        case _:
            return content


def _moved(rank: RankId, shift: int) -> RankId:
    return RankId(rank.mesh, rank.index + shift, rank.generation)


class Crowd:
    """The hosts; the first of them is simulated for all."""

    def __init__(self, world: World, first_ranks: dict[str, int]) -> None:
        self._world = world
        self.speaker = next(iter(first_ranks))
        self.shifts = {name: index - first_ranks[self.speaker] for name, index in first_ranks.items()}
        """How much higher the ranks of each host are than those of the speaker."""
        self._ordered: dict[int, Order] = {}

    def said(self, letter: Letter) -> list[Letter]:
        """What the head hears when the speaker says something."""
        found: list[Letter] = []
        for name, shift in self.shifts.items():
            found.append(Letter(name, letter.number, letter.run, shifted(letter.content, shift)))
        return found

    def order(self, letter: Letter) -> bool:
        """Take an order for one of the hosts; whether it is for the speaker, who obeys for all."""
        content = letter.content
        assert isinstance(content, Order)
        if letter.peer == self.speaker:
            self._ordered[letter.number] = content
            return True
        wanted = self._ordered.get(letter.number)
        same = wanted is not None and shifted(wanted, self.shifts[letter.peer]) == content
        self._world.require(same, "folding", f"{letter.peer} is not of the fate of {self.speaker}: {content}")
        return False
