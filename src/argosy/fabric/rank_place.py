"""Which rank this process is, of how many, in which run, and how it reaches the agent."""

import os
import time
from collections.abc import Sequence
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Literal

import msgspec

from argosy.core import ArgosyError, ConfigError, PeerLost, RankId
from argosy.fabric.link import Link, connect


class Arrive(msgspec.Struct, frozen=True, tag=True):
    """A rank has reached barrier number `count`; answered by `Released` when all ranks of its mesh have."""

    run: str
    rank: RankId
    count: int


class ForkHelper(msgspec.Struct, frozen=True, tag=True):
    """A rank asks its zygote to fork a helper process, which calls `entry` ("module:function").

    Descriptors: standard output, standard error, then the arguments of `entry`. There is no answer: if there is no
    zygote, the descriptors are closed, which the rank notices at their other ends.
    """

    run: str
    rank: RankId
    entry: str


class Released(msgspec.Struct, frozen=True, tag=True):
    """All ranks have reached barrier `count`."""

    count: int


class NotMember(msgspec.Struct, frozen=True, tag=True):
    """The answer to a rank that is not in the current view: another generation has its place."""

    view: int


class Replaced(ArgosyError):
    """This process is not in the run any more: another has its place. It must take part in nothing, and end."""

    def __init__(self, rank: RankId, view: int) -> None:
        super().__init__(rank, view)
        self.rank, self.view = rank, view

    def __str__(self) -> str:
        return f"rank {self.rank.index} of generation {self.rank.generation} is not in view {self.view} of the run"


_decoder: msgspec.msgpack.Decoder[Released | NotMember] = msgspec.msgpack.Decoder(Released | NotMember)


class RankPlace(msgspec.Struct, kw_only=True):
    """This process's rank and run. Without `argosy run` there is no `socket`, and so no barrier."""

    rank: RankId
    size: int
    run: str = ""
    directory: Path | None = None
    socket: Path | None = None
    memory: Path | None = None
    """A directory in shared memory that exists as long as the run."""
    view: int = 0
    """The view of the run that this process was started in, as the run numbers them."""
    host: str = ""
    """The name of this host, if the run is on several."""
    launcher: Literal["argosy", "torchrun", "none"] = "none"
    alone: bool = False
    """`argosy run` without a number of ranks: there is no store, and no process group is needed."""
    _link: Link[Released | NotMember] | None = None
    _barriers: int = 0

    def barrier(self, timeout_s: float = 300.0) -> None:
        """Wait until every rank of the mesh has called this as often as this rank.

        Raises:
            ConfigError: not started by `argosy run`.
            DeadlinePassed: some rank did not arrive within `timeout_s`.
            PeerLost: the agent is gone and was not replaced in time.
            Replaced: another process has this rank's place.
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
                if isinstance(released, NotMember):
                    raise Replaced(self.rank, released.view)
                if released.count >= self._barriers:
                    return
            except PeerLost:  # The agent was killed: repeat this to its replacement.
                self._link = None
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.02)

    def fork(self, entry: str, fds: Sequence[int]) -> bool:
        """Ask for a warm process in this rank's group that calls `entry` with `fds`; False if there is no agent.

        If there is no zygote, the descriptors are closed: watch the other end of one of them.
        """
        if self.socket is None:
            return False
        try:
            with closing(connect(self.socket, _decoder, "the agent")) as link:
                link.send(ForkHelper(self.run, self.rank, entry), [1, 2, *fds])
                return not link.wants_write
        except (PeerLost, OSError):  # Standard output may be closed.
            return False


@cache
def here() -> RankPlace:
    """Read this process's rank and run from its environment, once."""
    env = os.environ
    index, size = int(env.get("RANK", "0")), int(env.get("WORLD_SIZE", "1"))
    alone = bool(env.get("ARGOSY_ALONE"))
    # A script that runs alone may start ranks of its own, or be a rank of another launcher's.
    if "ARGOSY_RUN" not in env or (alone and size > 1):
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in env else "none"
        return RankPlace(rank=RankId("main", index), size=size, launcher=launcher)
    return RankPlace(
        rank=RankId(env["ARGOSY_MESH"], index, int(env["ARGOSY_GENERATION"])),
        size=size,
        run=env["ARGOSY_RUN"],
        view=int(env.get("ARGOSY_VIEW", "0")),
        directory=Path(env["ARGOSY_RUN_DIR"]),
        socket=Path(env["ARGOSY_AGENT"]),
        memory=Path(env["ARGOSY_MEMORY"]),
        host=env.get("ARGOSY_HOST", ""),
        launcher="argosy",
        alone=alone,
    )
