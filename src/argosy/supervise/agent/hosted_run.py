"""A run as this host has it: its environment, its directories, and what its ranks show of themselves."""

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from argosy.control import Launch, RunState, rank_defaults, rank_variables
from argosy.core import ArgosyError, RankId
from argosy.fabric import Arrive, BoardAdd, BoardGet, BoardSet, NotMember
from argosy.observe import DrainProcess, Page, RankProgress
from argosy.supervise.agent.barrier import Barrier
from argosy.supervise.agent.board import Asker, Board
from argosy.supervise.agent.rank_footprint import RankFootprint
from argosy.supervise.background_jobs import BackgroundJobs
from argosy.supervise.environment import seal_environment, sealed_content
from argosy.supervise.messages import RankSpec


class RunEnvironment:
    """The descriptors that every new process of a run gets: its sealed environment, and standard input."""

    def __init__(self, fds: Sequence[int]) -> None:
        self.is_lost = not fds
        """Agent and warden died together, and with them what a new process would need."""
        self.unusable = ""
        """Why no rank can run on this host at all."""
        self.sealed = fds[0] if fds else seal_environment({}, {})
        self.stdin = fds[1] if len(fds) > 1 else None

    def find(self, sealed: int) -> None:
        """A zygote still has what was lost."""
        os.dup2(sealed, self.sealed, inheritable=False)
        self.is_lost = False

    @property
    def content(self) -> bytes:
        """What another host needs to have the same environment."""
        return sealed_content(self.sealed)

    def close(self) -> None:
        for fd in (self.sealed, self.stdin):
            if fd is not None:
                os.close(fd)


class RankMeeting:
    """What the ranks of a run tell each other through the agent. Only members of the current view are heard."""

    def __init__(self, size: int) -> None:
        self._size = size
        self.generation = 0
        """The last one in which all ranks started together."""
        self.barrier, self.board = Barrier(size), Board()

    def begin(self, generation: int) -> None:
        """All ranks start together: nothing that earlier ones said counts."""
        if generation != self.generation:
            self.generation = generation
            self.barrier, self.board = Barrier(self._size), Board()

    def handle(self, link: Asker, message: Arrive | BoardSet | BoardAdd | BoardGet, run: RunState) -> None:
        """Do what a rank asks, unless another process has its place."""
        if not run.is_member(message.rank):
            with contextlib.suppress(ArgosyError):  # It is gone as well.
                link.send(NotMember(run.view))
        elif isinstance(message, Arrive):
            self.barrier.arrive(message.rank.index, message.count, link)
        else:
            self.board.handle(link, message, run.view)


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
        self._host = host
        self.name, self.number, self.launch, self.environment = name, number, launch, environment
        self.logs = Path(launch.logs) if launch.logs else Path(launch.directory) / "logs" / str(number)
        self.files = host.runtime / "runs" / name
        self.footprint = RankFootprint(name, self.memory, host.cgroup)
        self.pages = ProgressPages(self.footprint)
        drained = Path(launch.directory, "hosts", host.name) if host.name else Path(launch.directory)
        self.drain = DrainProcess(self.memory, drained, number)
        self.jobs = BackgroundJobs(host.wake)
        self.kills = BackgroundJobs(host.wake)
        """Ranks are killed apart from what else takes time: others wait to be started after them."""
        self.meeting = RankMeeting(launch.size)
        self.spares: list[int] = []
        self.paused: dict[int, int] = {}
        """Ranks that were stopped by a signal, and which."""

    @property
    def memory(self) -> Path:
        """Where its shared memory is."""
        return self._host.memory / self.name

    @property
    def address(self) -> str:
        """Under which ranks of other hosts reach this one; empty: there are none."""
        return self._host.address

    @property
    def host(self) -> str:
        """The name of this host in the run."""
        return self._host.name or os.uname().nodename

    def make_directories(self) -> None:
        """Make the directories that ranks write to.

        Raises:
            OSError: there is no room, or no permission.
        """
        for path in (self.logs, self.files, self.memory):
            path.mkdir(parents=True, exist_ok=True)

    def spec(self, rank: RankId, store_at: tuple[str, int], view: int, *, store: bool, device: str = "") -> RankSpec:
        """What is particular to one rank; it finds its store at an address and port, which serves if `store`.

        `device` is the only accelerator that it sees, if that is not the one of the launch.
        """
        stem = f"{rank.index}.{rank.generation}"
        launch = self.launch if store else msgspec.structs.replace(self.launch, store=False)
        variables = rank_variables(launch, rank.index, rank.generation, store_at[1], store_at[0], device)
        variables["ARGOSY_RUN"] = self.name
        variables["ARGOSY_VIEW"] = str(view)
        variables["ARGOSY_MEMORY"] = str(self.memory)
        variables["ARGOSY_AGENT"] = str(self.files.parents[1] / "agent.sock")
        defaults = rank_defaults(launch)
        if self._host.name:
            variables["ARGOSY_HOST"], defaults["GLOO_SOCKET_IFNAME"] = self._host.name, self._host.interface
        if not launch.alone:
            variables["TORCHELASTIC_ERROR_FILE"] = str(self.logs / f"{stem}.error.json")
        return RankSpec(
            rank,
            variables,
            str(self.logs / f"{stem}.out"),
            str(self.error_log(rank)),
            defaults=defaults,
            page=self.footprint.page(rank),
            stacks=str(self.files / f"{stem}.stacks"),
            cgroup=self.footprint.prepare(rank),
        )

    def error_log(self, rank: RankId) -> Path:
        """Where the rank's stderr goes."""
        return self.logs / f"{rank.index}.{rank.generation}.{'out' if self.launch.one_file else 'err'}"

    def remove(self) -> None:
        """In the background: end what the ranks left behind, and remove their files."""
        self.footprint.clear()
        self.drain.finish()
        for path in (self.files, self.memory):
            shutil.rmtree(path, ignore_errors=True)


class HostPlaces(msgspec.Struct, frozen=True):
    """What all runs of a host share; `wake` ends the wait of the agent's loop."""

    runtime: Path
    memory: Path
    cgroup: Path | None
    wake: Callable[[], None]
    name: str = ""
    """Of this host in the run of another one's agent; empty: this agent serves its own user."""
    address: str = ""
    interface: str = ""
