"""A rank's own place: which rank it is, of how many, in which run, and its link to the agent."""

import os
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from argosy.core import ConfigError, PeerLost, RankId
from argosy.fabric.link import Link, connect


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A rank reached barrier number `count`; answered by `Released` when all of its mesh did."""

    run: str
    rank: RankId
    count: int


class Assist(msgspec.Struct, frozen=True, tag=True):
    """A rank wants a process beside it, forked from its zygote, which calls `entry` ("module:function").

    Descriptors: its standard output and error, then what `entry` is called with. No answer: where there is no
    zygote they are closed, which the rank sees at the other ends.
    """

    run: str
    rank: RankId
    entry: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """All ranks reached barrier `count`."""

    count: int


_decoder: msgspec.msgpack.Decoder[Released] = msgspec.msgpack.Decoder(Released)


class Place(msgspec.Struct, kw_only=True):
    """Where this process stands; under a foreign launcher there is no `socket`, so no barrier."""

    rank: RankId
    size: int
    run: str = ""
    directory: Path | None = None
    socket: Path | None = None
    memory: Path | None = None
    """A folder in shared memory that lives as long as the run."""
    launcher: Literal["argosy", "torchrun", "none"] = "none"
    alone: bool = False
    """`argosy run` without a number of ranks: there is no store, and no process group is needed."""
    _link: Link[Released] | None = None
    _barriers: int = 0

    def barrier(self, timeout_s: float = 300.0) -> None:
        """Wait until every rank of the mesh called this as often as this rank did.

        Raises:
            ConfigError: not started by `argosy run`.
            DeadlinePassed: some rank did not come within `timeout_s`.
            PeerLost: the agent is gone and did not come back.
        """
        if self.socket is None:
            raise ConfigError("a barrier needs ranks started by `argosy run`")
        self._barriers += 1
        deadline = time.monotonic() + timeout_s
        while True:
            try:
                if self._link is None:
                    self._link = connect(self.socket, _decoder, "the agent")
                self._link.send(Arrive(self.run, self.rank, self._barriers))
                released, _ = self._link.wait(deadline - time.monotonic())
                if released.count >= self._barriers:
                    return
            except PeerLost:  # The agent was killed: the next one is told again.
                self._link = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def fork(self, entry: str, fds: Sequence[int]) -> bool:
        """Ask for a warm process in this rank's group that calls `entry` with `fds`; False if there is no agent.

        Where there is no zygote the descriptors are closed: watch the other end of one of them.
        """
        if self.socket is None:
            return False
        try:
            link: Link[Released] = connect(self.socket, _decoder, "the agent")
            try:
                link.send(Assist(self.run, self.rank, entry), [1, 2, *fds])
                return not link.wants_write
            finally:
                link.close()
        except (PeerLost, OSError):  # Standard output may be closed.
            return False


@cache
def here() -> Place:
    """Read this process's place from its environment, once."""
    env = os.environ
    index, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    alone = bool(env.get("ARGOSY_ALONE"))
    # A script that runs alone may start ranks of its own, or be a rank of another launcher's.
    if "ARGOSY_RUN" not in env or (alone and size > 1):
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "none"
        return Place(rank=RankId("main", index), size=size, launcher=launcher)
    return Place(
        rank=RankId(env["ARGOSY_MESH"], index, int(env["ARGOSY_GENERATION"])),
        size=size,
        run=env["ARGOSY_RUN"],
        directory=Path(env["ARGOSY_RUN_DIR"]),
        socket=Path(env["ARGOSY_AGENT"]),
        memory=Path(env["ARGOSY_MEMORY"]),
        launcher="argosy",
        alone=alone,
    )
