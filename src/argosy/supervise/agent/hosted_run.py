"""A run as this host has it: its environment, its directories, and what its ranks show of themselves."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from argosy.control import Launch, rank_defaults, rank_variables
from argosy.core import RankId
from argosy.observe import Page, RankProgress
from argosy.supervise.agent.barrier import Barrier
from argosy.supervise.agent.board import Board
from argosy.supervise.agent.rank_footprint import RankFootprint
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.environment import seal_environment
from argosy.supervise.messages import RankSpec


class RunEnvironment:
    """The descriptors that every new process of a run gets: its sealed environment, and standard input."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.is_lost = not fds
        """Agent and warden died together, and with them what a new process would need."""
        self.sealed = fds[0] if fds else seal_environment({}, {})
        self.stdin = fds[1] if len(fds) > 1 else None

    def find(self, sealed: int) -> None:
        """A zygote still has what was lost."""
        os.dup2(sealed, self.sealed, inheritable=False)
        self.is_lost = False

    def close(self) -> None:
        for fd in (self.sealed, self.stdin):
            if fd is not None:
                os.close(fd)


class ProgressPages:
    """The pages on which the ranks of a run show their progress."""

    def __init__(self, footprint: RankFootprint) -> None:
        self._footprint = footprint
        self._pages: dict[RankId, Page] = {}

    def read(self, rank: RankId) -> RankProgress | None:
        """What the page of a rank says, if there is one."""
        if rank not in self._pages:
            with contextlib.suppress(OSError, ValueError):
                self._pages[rank] = Page.open(self._footprint.page(rank))
                self._forget_before(rank)
        return self._pages[rank].read() if rank in self._pages else None

    def _forget_before(self, rank: RankId) -> None:
        for old in [old for old in self._pages if old.index == rank.index and old.generation < rank.generation]:
            self._pages.pop(old).detach()

    def close(self) -> None:
        for page in self._pages.values():
            page.detach()
        self._pages.clear()


class HostedRun:
    """Where the ranks of one run live on this host."""

    def __init__(self, name: str, number: int, launch: Launch, environment: RunEnvironment, host: "HostPlaces") -> None:
        self.name, self.number, self.launch, self.environment = name, number, launch, environment
        self.logs = Path(launch.logs) if launch.logs else Path(launch.directory) / "logs" / str(number)
        self.files = host.runtime / "runs" / name
        self.memory = host.memory / name
        self.footprint = RankFootprint(name, self.memory, host.cgroup)
        self.pages = ProgressPages(self.footprint)
        self.jobs = BackgroundJobs(host.wake)
        self.kills = BackgroundJobs(host.wake)
        """Ranks are killed apart from what else takes time: others wait to be started after them."""
        self.generation = 0
        """The last one in which all ranks started together."""
        self.barrier, self.board = Barrier(launch.size), Board()
        self.started: dict[RankId, int] = {}
        """The process groups of all ranks that have lived here, by their leader's pid."""
        self.spares: list[int] = []
        self.paused: dict[int, int] = {}
        """Ranks that were stopped by a signal, and which."""
        self._agent = host.runtime / "agent.sock"

    def begin_generation(self, generation: int) -> None:
        """All ranks start together: nothing that earlier ones said counts."""
        if generation != self.generation:
            self.generation = generation
            self.barrier, self.board = Barrier(self.launch.size), Board()

    def make_directories(self) -> None:
        """Make the directories that ranks write to.

        Raises:
            OSError: there is no room, or no permission.
        """
        for path in (self.logs, self.files, self.memory):
            path.mkdir(parents=True, exist_ok=True)

    def spec(self, rank: RankId, port: int, *, store: bool) -> RankSpec:
        """What is particular to one rank; it finds its store at `port`, which serves if `store`."""
        stem = f"{rank.index}.{rank.generation}"
        launch = self.launch if store else msgspec.structs.replace(self.launch, store=False)
        variables = rank_variables(launch, rank.index, rank.generation, port)
        variables["ARGOSY_RUN"] = self.name
        variables["ARGOSY_MEMORY"] = str(self.memory)
        variables["ARGOSY_AGENT"] = str(self._agent)
        if not launch.alone:
            variables["TORCHELASTIC_ERROR_FILE"] = str(self.logs / f"{stem}.error.json")
        return RankSpec(
            rank,
            variables,
            str(self.logs / f"{stem}.out"),
            str(self.error_log(rank)),
            defaults=rank_defaults(launch),
            page=self.footprint.page(rank),
            stacks=str(self.files / f"{stem}.stacks"),
            cgroup=self.footprint.prepare(rank),
        )

    def error_log(self, rank: RankId) -> Path:
        """Where the rank's stderr goes."""
        return self.logs / f"{rank.index}.{rank.generation}.{'out' if self.launch.one_file else 'err'}"

    def remove(self) -> None:
        """In the background: end what the ranks left behind, and remove their files."""
        self.footprint.clear(dict(self.started))
        for path in (self.files, self.memory):
            shutil.rmtree(path, ignore_errors=True)


class HostPlaces(msgspec.Struct, frozen=True):
    """What all runs of a host share; `wake` ends the wait of the agent's loop."""

    runtime: Path
    memory: Path
    cgroup: Path | None
    wake: Callable[[], None]
