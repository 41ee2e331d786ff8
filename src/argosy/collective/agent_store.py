"""torch's interface of a store, over the board that the agent of a run keeps: it outlives ranks, and agents."""
# pyright: reportUnknownMemberType=false, reportUntypedBaseClass=false, reportPrivateImportUsage=false

import os
import time
from datetime import timedelta

import torch.distributed as dist

from argosy.core import DeadlinePassed
from argosy.fabric import AgentBoard, here

GET_S = 300.0
WAIT_S = 0.2
"""How long one question waits at the agent; other threads of this rank wait for it."""


class AgentStore(dist.Store):
    """Keep a reference to it: torch does not."""

    def __init__(self, board: AgentBoard) -> None:
        super().__init__()
        self._board = board
        self.host = os.environ["MASTER_ADDR"]

    @property
    def view(self) -> int:
        """The newest view of the run that this rank has heard of."""
        return self._board.view

    def set(self, key: str, value: str | bytes) -> None:
        self._board.set(key, value.encode() if isinstance(value, str) else bytes(value))

    def get(self, key: str) -> bytes:
        return self._wait([key], GET_S)[0]

    def check(self, keys: list[str]) -> bool:
        return self._board.get(list(keys)) is not None

    def add(self, key: str, value: int) -> int:
        return self._board.add(key, value)

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=GET_S)) -> None:
        self._wait(list(keys), timeout.total_seconds())

    def _wait(self, keys: list[str], timeout_s: float) -> list[bytes]:
        deadline = time.monotonic() + timeout_s
        while (values := self._board.get(keys, WAIT_S)) is None:
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"waiting for {', '.join(keys)}", timeout_s)
        return values


def open_agent_store() -> AgentStore:
    """The store of this rank's run, which must have been started by `argosy run`."""
    return AgentStore(AgentBoard(here()))
