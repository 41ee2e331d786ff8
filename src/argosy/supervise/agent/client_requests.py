"""What clients ask of an agent: launch, watch, stop, signal and look into runs."""

import contextlib
import selectors
from pathlib import Path

import msgspec

from argosy.control import ClientCame, Launched, ShutDown, StopWanted
from argosy.core import ConfigError
from argosy.fabric import Link
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.headed_run import HeadedRun
from argosy.supervise.agent.hosted_run import HostedRun, HostPlaces, RunEnvironment
from argosy.supervise.agent.queries import StackRequest, answer_environment
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.messages import (
    Done,
    GetEnvironment,
    LaunchRun,
    OpenTunnel,
    Refused,
    SignalRun,
    StopRun,
    TakeStacks,
    ToAgent,
    WatchRun,
    Welcome,
)
from argosy.supervise.processes import send_signal
from argosy.supervise.records.owner import Owner
from argosy.supervise.records.rundir import absent, free_directory, index_run, next_launch, run_id


class ClientRequests:
    """Answers clients. `hosted` and `headed` are the agent's runs; a launch adds to them."""

    def __init__(
        self,
        decisions: Decisions,
        hosted: dict[str, HostedRun],
        headed: dict[str, HeadedRun],
        places: HostPlaces,
        warden: WardenLink,
        selector: selectors.BaseSelector,
    ) -> None:
        self._selector = selector
        self._decisions, self._hosted, self._headed = decisions, hosted, headed
        self._places, self._warden = places, warden
        self._stacks: list[StackRequest] = []
        self._is_homeless = False
        """Whether the runtime directory was removed."""

    @property
    def is_busy(self) -> bool:
        """Whether stacks are being taken."""
        return bool(self._stacks)

    def step(self) -> None:
        """Continue to take the stacks that were asked for."""
        self._stacks = [request for request in self._stacks if not request.step()]

    def dropped(self, link: Link[ToAgent]) -> None:
        """A client is gone: nobody waits for its answers."""
        for request in [request for request in self._stacks if request.link is link]:
            request.close()
            self._stacks.remove(request)

    def launch(self, link: Link[ToAgent], message: LaunchRun, fds: list[int]) -> list[int]:
        """Accept a run, or say why not; returns the descriptors that are kept."""
        launch = message.launch
        if launch.fresh:
            free = free_directory(Path(launch.directory))
            launch = msgspec.structs.replace(launch, directory=str(free), name=free.name)
        directory = Path(launch.directory)
        number = next_launch(directory)
        name = run_id(directory, number)
        new = absent(directory / "incidents", Path(launch.logs or directory / "logs" / str(number)))
        hosted = HostedRun(name, number, launch, RunEnvironment(fds), self._places)
        headed = HeadedRun(hosted, self._decisions)
        try:
            if len(fds) != 1 + message.stdin:
                raise ConfigError(f"a launch comes with {1 + message.stdin} descriptors: {len(fds)}")
            owner = Owner.of(self._places.runtime, name)
            headed.records.claim(owner, list(self._headed))
            headed.open()
            peers = self._open_hosts(headed, hosted, message.hosts)
        except (ConfigError, OSError) as error:
            if isinstance(error, OSError) or message.hosts:
                headed.records.release(name)
                for path in new:
                    with contextlib.suppress(OSError):
                        path.rmdir()
            if isinstance(error, OSError):
                where = f": {error.filename}" if error.filename else ""
                error = ConfigError(f"the run's directory cannot be used: {error.strerror}{where}")
            link.send(Refused(str(error), error.hint, later=self._is_ending(directory)))
            return []
        index_run(directory, launch.name)
        self._warden.hold(f"env:{name}", hosted.environment.sealed)  # No agent could do without it.
        if hosted.environment.stdin is not None:
            self._warden.hold(f"stdin:{name}", hosted.environment.stdin)
        self._hosted[name], self._headed[name] = hosted, headed
        self._join(link, headed, lease=not launch.detached)
        placed = [peers[index // launch.ranks_per_host] for index in range(launch.size)]
        spares = peers[launch.nodes :]
        self._decisions.feed(Launched(run=name, number=number, launch=launch, hosts=placed, spares=spares))
        if headed.hosts is not None:
            from argosy.supervise.agent.run_hosts import start_provider

            start_provider(hosted, self._warden)
        return fds

    def _open_hosts(self, headed: HeadedRun, hosted: HostedRun, names: list[str]) -> list[str]:
        """Prepare for the hosts of a run; returns the nodes that may have ranks."""
        if not names:
            return [self._decisions.state.name]
        from argosy.supervise.agent.run_hosts import RunHosts  # TLS takes time to import.

        hosts = RunHosts(hosted, self._decisions, self._selector, self._warden)
        hosts.say, headed.hosts = headed.notice, hosts
        return hosts.open(names)

    def _is_ending(self, directory: Path) -> bool:
        """Whether the launch that has a directory is about to end."""
        for name, headed in self._headed.items():
            if headed.directory == directory:
                return headed.state.outcome is not None or self._hosted[name].environment.is_lost
        return False

    def _join(self, link: Link[ToAgent], run: HeadedRun, *, lease: bool) -> None:
        """Tell the link about the run from now on."""
        # Sent at the end of the turn: who is welcome finds this launch in the journal, not the one before.
        link.queue(Welcome(run.name, str(run.directory), run.number, str(run.logs), run.launch.size))
        run.watchers.add(link, lease=lease)

    def shut_down(self, by: str) -> None:
        """Stop all runs, then everything."""
        self._decisions.feed(ShutDown(by))

    def directory_removed(self, runtime: Path) -> None:
        """The runtime directory is gone: stop everything, once, since a second time would end the grace."""
        if not self._is_homeless:
            self._is_homeless = True
            self.shut_down(f"the removal of Argosy's runtime directory, {runtime}")

    def about_run(
        self, link: Link[ToAgent], message: WatchRun | StopRun | SignalRun | TakeStacks | GetEnvironment | OpenTunnel
    ) -> None:
        """What concerns one living run, named by its id or its directory."""
        named = (run for run in self._headed.values() if message.run in (run.name, str(run.directory)))
        run = next(named, None)
        if run is None:
            link.send(Refused("the run is not alive"))
            return
        match message:
            case WatchRun(lease=lease):
                self._join(link, run, lease=lease)
                if lease:
                    run.feed(ClientCame())
            case StopRun():
                run.feed(StopWanted(message.by, message.signal, message.grace_s))
                link.queue(Done())
            case SignalRun(signal=number):
                for process in filter(None, map(run.process_of, range(run.launch.size))):
                    send_signal(process, number)
                if run.hosts is not None:
                    run.hosts.pass_signal(number)
                link.send(Done())
            case TakeStacks():
                self._stacks.append(StackRequest(link, run, message))
            case OpenTunnel(rank=rank):
                if run.hosts is None or not 0 <= rank < run.launch.size:
                    link.send(Refused(f"no rank {rank} is on another host"))
                else:
                    run.hosts.ranks.reach(link, run.host_of(rank), msgspec.structs.replace(message, run=run.name))
            case GetEnvironment():
                answer_environment(link, self._hosted[run.name], run.state, message)
