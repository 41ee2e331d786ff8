"""The ports under which ranks find torch's store: opened before they start, served from the first connection on."""

import selectors
import socket
from collections.abc import Mapping

from argosy.control import ForHost, ListenFor, StoreEnded, StoreForked, StoreListens
from argosy.supervise.agent.decisions import Decisions
from argosy.supervise.agent.hosted_run import HostedRun
from argosy.supervise.agent.warden_link import WardenLink
from argosy.supervise.agent.zygote_links import ZygoteLinks
from argosy.supervise.messages import Child, ForkStore
from argosy.supervise.processes import end_process, is_alive, send_signal


class TorchStores:
    """The listeners that no store serves yet, by run."""

    def __init__(
        self,
        decisions: Decisions,
        runs: Mapping[str, HostedRun],
        zygotes: ZygoteLinks,
        warden: WardenLink,
        selector: selectors.BaseSelector,
    ) -> None:
        self._decisions, self._runs, self._zygotes, self._warden = decisions, runs, zygotes, warden
        self._selector = selector
        self._listeners: dict[str, socket.socket] = {}

    def listen(self, effect: ListenFor) -> None:
        """Open a port for a generation, once the store of the previous generation has released it."""
        run, after = self._runs[effect.run], effect.after
        run.meeting.begin(effect.generation)
        self.release(effect.run)
        if after is None:
            self._open(effect)
        else:
            run.jobs.do("ending the store", lambda: end_process(after), lambda _: self._open(effect))

    def _open(self, effect: ListenFor) -> None:
        if effect.run not in self._runs:
            return
        run = self._runs[effect.run]
        address = run.address or run.launch.master_addr
        listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, effect.port))
        except OSError as error:
            listener.close()
            reason = f"cannot listen on {address}:{effect.port}: {error.strerror}"
            self._decisions.feed(ForHost(StoreListens(effect.run, effect.generation, reason=reason)))
            return
        port: int = listener.getsockname()[1]
        if self.serves(effect.run):
            listener.listen(4096)
            self._warden.hold(f"store:{effect.run}", listener.fileno())
            self._listeners[effect.run] = listener
            self.watch(effect.run)
        else:  # Rank 0 will listen there itself.
            listener.close()
        self._decisions.feed(ForHost(StoreListens(effect.run, effect.generation, port, address=run.address)))

    def serves(self, run: str) -> bool:
        """Whether a process serves the store of a run: forked by its zygote, which has torch."""
        local = self._decisions.state.host.runs.get(run)
        return local is not None and local.launch.store and bool(local.key)

    def recover(self, run: str) -> None:
        """Take over the port that an earlier agent opened: its listener, or the process that serves it."""
        local = self._decisions.state.host.runs.get(run)
        fd = self._warden.shelf.pop(f"store:{run}", None)
        if fd is not None:
            self._listeners[run] = socket.socket(fileno=fd)
            self._warden.hold(f"store:{run}", fd)
        if local is None or local.store is None or not self.serves(run):
            return
        if local.store.process is not None:
            self.release(run)
            if is_alive(local.store.process):
                return
        if run not in self._listeners:
            self._decisions.feed(ForHost(StoreEnded(run, local.store.generation)))
        self.watch(run)

    def watch(self, run: str) -> None:
        """Wait for the first rank to connect, if there is a zygote to serve it."""
        listener = self._listeners.get(run)
        if listener is None or self._zygotes.of_run(run) is None:
            return
        if listener.fileno() not in self._selector.get_map():
            self._selector.register(listener.fileno(), selectors.EVENT_READ, lambda: self._connected(run))

    def _connected(self, run: str) -> None:
        """The first rank has connected: let a process serve it."""
        listener, local = self._listeners.get(run), self._decisions.state.host.runs.get(run)
        if listener is None or local is None or local.store is None:
            return
        generation = local.store.generation
        log = str(self._runs[run].files / f"store-{generation}.out")
        message = ForkStore(run, generation, local.store.port, log, self._runs[run].address or "127.0.0.1")
        if self._zygotes.send(self._zygotes.of_run(run), message, [listener.fileno()]):
            self.release(run)
        else:  # The next zygote serves it.
            self._selector.unregister(listener.fileno())

    def forked(self, child: Child) -> None:
        """A store's process exists."""
        local = self._decisions.state.host.runs.get(child.run)
        if local is None or local.store is None or local.store.generation != child.rank.generation or local.removing:
            send_signal(child.process, 9)  # It came too late.
            return
        self._decisions.feed(ForHost(StoreForked(child.run, child.rank.generation, child.process)))

    def ended(self, child: Child) -> None:
        local = self._decisions.state.host.runs.get(child.run)
        if local is not None and local.store is not None and local.store.process == child.process:
            self._decisions.feed(ForHost(StoreEnded(child.run, child.rank.generation)))

    def release(self, run: str) -> None:
        """Close our copy of the listener; a store that was started keeps its own."""
        if (listener := self._listeners.pop(run, None)) is not None:
            if listener.fileno() in self._selector.get_map():
                self._selector.unregister(listener.fileno())
            listener.close()
            self._warden.drop(f"store:{run}")
