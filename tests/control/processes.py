"""What is in a simulated world besides its agents: a launch, processes of ranks, and zygotes."""

from dataclasses import dataclass, field
from typing import Any

import msgspec

from argosy.control import node
from argosy.control.launch import Launch
from argosy.control.restart import Restart
from argosy.core import ProcessId, RankId, WaitStatus

RUN = "run"


def a_launch(**said: Any) -> Launch:
    """A launch of which the test says what counts."""
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


def copied(log: list[node.LogRecord]) -> list[node.LogRecord]:
    """The log as it is read from a file."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(log), type=list[node.LogRecord])


class AgentKilled(Exception):
    """The agent was killed at this point."""


@dataclass
class Process:
    """A rank's process."""

    run: str
    rank: RankId
    id: ProcessId
    stubborn: bool
    managed: bool
    zygote: "SimZygote | None" = None
    """Its parent, unless the warden executed it."""
    killed: bool = False
    signals: int = 0
    status: WaitStatus | None = None
    reported: bool = False


@dataclass
class SimZygote:
    """A zygote's process, which answers a repeated fork with what it did already."""

    key: str
    id: ProcessId
    ready: bool = False
    alive: bool = True
    children: dict[RankId, Process] = field(default_factory=dict[RankId, Process])


def lose_power(agent: Any) -> None:
    """A host ends with all that lives on it, and nobody reports that."""
    agent.up, agent.gone = False, True
    for process in [each for each in agent.processes if each.status is None]:
        process.killed, process.status = True, WaitStatus()
    for zygote in agent.zygotes:
        zygote.alive = False
