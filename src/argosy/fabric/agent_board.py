"""A board that all ranks of a run write on and read: keys and values, kept by their agent.

The agent may be killed. The next one has an empty board, so each rank says again what it said, and how far it has seen
counters come. Only members of the current view may write and read; every answer tells which view that is.
"""

import threading
import time
from collections.abc import Callable
from functools import partial

import msgspec

from argosy.core import ConfigError, DeadlinePassed, PeerLost, RankId
from argosy.fabric.link import Link, connect
from argosy.fabric.rank_place import NotMember, RankPlace, Replaced

RECONNECT_S = 60.0
CHECK_S = 0.02
"""How long a check waits for keys that are not there yet: who asks again and again must not keep the agent busy."""
SAID_MAX = 10_000


class BoardSet(msgspec.Struct, frozen=True, tag=True):
    """Write a value; answered by `BoardAnswer`."""

    run: str
    rank: RankId
    number: int
    key: str
    value: bytes


class BoardAdd(msgspec.Struct, frozen=True, tag=True):
    """Count; a counter that is lower than `least` is raised to it first. Answered with the new count."""

    run: str
    rank: RankId
    number: int
    key: str
    amount: int
    least: int = 0


class BoardGet(msgspec.Struct, frozen=True, tag=True):
    """Read keys; answered when all are there, unless the rank asks for something else before that; or at once."""

    run: str
    rank: RankId
    number: int
    keys: list[str]
    at_once: bool = False


class BoardAnswer(msgspec.Struct, frozen=True, tag=True):
    """What was asked for with this number; `absent` if keys are not there. `view` is the current one."""

    number: int
    view: int
    values: list[bytes] = []
    absent: bool = False


BoardMessage = BoardSet | BoardAdd | BoardGet
MakeMessage = Callable[[int], BoardMessage]
Answer = BoardAnswer | NotMember
_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


class AgentBoard:
    """One rank's access to the board of its run; threads may share it."""

    def __init__(self, place: RankPlace) -> None:
        if place.socket is None:
            raise ConfigError("a board needs ranks started by `argosy run`")
        self._run, self._rank, self._agent = place.run, place.rank, place.socket
        self.view = place.view
        """The newest view of the run that this rank has heard of."""
        self._lock = threading.Lock()
        self._link: Link[Answer] | None = None
        self._number = 0
        self._said: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def set(self, key: str, value: bytes) -> None:
        """Write a value.

        Raises:
            PeerLost: the agent is gone and was not replaced in time; so do the other methods.
            Replaced: another process has this rank's place; so do the other methods.
        """
        with self._lock:
            self._said.pop(key, None)
            self._said[key] = value
            if len(self._said) > SAID_MAX:
                del self._said[next(iter(self._said))]
            self._ask(partial(self._set, key, value))

    def add(self, key: str, amount: int) -> int:
        """Count; returns the new count."""
        with self._lock:
            least = self._counts.get(key, 0)
            answer = self._ask(lambda number: BoardAdd(self._run, self._rank, number, key, amount, least))
            count = int(answer[0]) if answer else 0
            self._counts[key] = max(count, least)
            return count

    def get(self, keys: list[str], wait_s: float = CHECK_S) -> list[bytes] | None:
        """The values of all keys, or None if the agent says after `wait_s` that some are not there."""
        with self._lock:
            values = self._ask(lambda number: BoardGet(self._run, self._rank, number, keys), wait_s)
            if values is None:  # Or the agent is slow.
                values = self._ask(lambda number: BoardGet(self._run, self._rank, number, keys, at_once=True))
            return values

    def _ask(self, message: MakeMessage, wait_s: float | None = None) -> list[bytes] | None:
        """Ask the agent, or if it was killed the next one; None if there is no answer within `wait_s`."""
        deadline = time.monotonic() + RECONNECT_S
        while True:
            try:
                if self._link is None:
                    self._link = self._connect()
                return self._call(self._link, message, wait_s)
            except PeerLost:
                if self._link is not None:
                    self._link.close()
                    self._link = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def _connect(self) -> Link[Answer]:
        link = connect(self._agent, _decoder, "the agent")
        for key, value in self._said.items():
            self._call(link, partial(self._set, key, value), None)
        return link

    def _set(self, key: str, value: bytes, number: int) -> BoardSet:
        return BoardSet(self._run, self._rank, number, key, value)

    def _call(self, link: Link[Answer], message: MakeMessage, wait_s: float | None) -> list[bytes] | None:
        self._number += 1
        link.send(message(self._number))
        deadline = time.monotonic() + (RECONNECT_S if wait_s is None else wait_s)
        while True:
            try:
                answer, _ = link.wait(max(0.0, deadline - time.monotonic()))
            except DeadlinePassed:
                if wait_s is None:
                    raise PeerLost("the agent", f"it has not answered for {RECONNECT_S:.0f} s") from None
                return None
            if isinstance(answer, NotMember):
                raise Replaced(self._rank, answer.view)
            self.view = max(self.view, answer.view)
            if answer.number == self._number:  # Else it comes late: nobody waits for it any more.
                return None if answer.absent else answer.values
