"""What lives on a simulated host besides its agent: processes of ranks, and zygotes."""

import math
from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.control import DeviceFault, Launch, LogRecord, Restart
from argosy.core import ProcessId, RankId, WaitStatus

RUN = "run"
"""The name of the only run of a world."""


def sim_launch(**said: Any) -> Launch:
    """A launch of which the caller says what counts."""
    launch = Launch(
        name=RUN,
        directory=f"/runs/{RUN}",
        argv=[],
        kind="script",
        target="",
        args=[],
        python=["python"],
        dims={"rank": 1},
        cwd="/",
        umask=0,
        preload=["torch", "numpy"],
        key="key",
        restart=Restart.never(),
        grace_s=5.0,
        linger_s=1e9,
    )
    return msgspec.structs.replace(launch, **said)


def read_back(log: list[LogRecord]) -> list[LogRecord]:
    """The log as it is read from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=list[LogRecord])


@dataclass(slots=True)
class SimProcess:
    """A rank's process."""

    run: str
    rank: RankId
    id: ProcessId
    stubborn: bool
    """It ignores signals."""
    managed: bool
    """`argosy.Run` owns its step loop."""
    zygote: "SimZygote | None" = None
    """Its parent, unless the warden executed it."""
    killed: bool = False
    signals: int = 0
    gone_by: float = math.inf
    """When it must be gone, once it was told to stop."""
    status: WaitStatus | None = None
    device: DeviceFault | None = None
    """What the kernel says of its device."""


@dataclass(slots=True)
class SimZygote:
    """A zygote's process, which answers a repeated fork with what it did already."""

    key: str
    id: ProcessId
    life: int
    """Which agent of its host it is connected to, counted from 0."""
    ready: bool = False
    alive: bool = True
    children: dict[RankId, SimProcess] = field(default_factory=dict[RankId, SimProcess])
