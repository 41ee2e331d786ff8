"""The process that gives hosts to one run: has the engine start an agent on each, watches them, ends them.

Each host is a child of this process, `argosy agent --join`, that reads its credentials from standard input. Its exit
is the engine's word that the host is lost.
"""

import os
import selectors
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from argosy.core import ArgosyError, PeerLost
from argosy.fabric import Link, TlsAddress
from argosy.hosts.engines import HostEngine, HostProcess, find_engine
from argosy.supervise import (
    GiveHostsBack,
    HostEnded,
    HostTickets,
    Membership,
    ProvideHosts,
    ToClient,
    connect_agent,
)

DISMISSED_S = 10.0
"""How long hosts that the head has dismissed have to end by themselves."""
END_S = 20.0
RETURN_S = 60.0
"""How long the agent has to come back if it was killed."""
TURN_S = 0.5


class Provider:
    """The state of the loop."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._selector = selectors.DefaultSelector()
        self._children: dict[str, HostProcess] = {}
        self._told: set[str] = set()
        self._engine: HostEngine | None = None
        self._link: Link[ToClient] | None = None
        self._ending = self._dismissed = False

    def serve(self) -> int:
        """Give hosts until the run needs them no more."""
        signal.signal(signal.SIGTERM, self._told_to_end)
        alone_since = time.monotonic()
        while not self._ending:
            if self._link is None:
                self._connect()
            if self._link is not None:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > RETURN_S:
                self._end()
            for key, _ in self._selector.select(TURN_S if self._link is not None else 0.1):
                key.data()
            self._watch()
        return self._give_back()

    def _told_to_end(self, number: int, frame: FrameType | None) -> None:
        self._end()

    def _end(self) -> None:
        self._ending = True

    def _connect(self) -> None:
        with suppress(ArgosyError):
            link = connect_agent()
            self._selector.register(link, selectors.EVENT_READ, self._hear)
            self._link = link
            link.send(ProvideHosts(self._run))
            self._told.clear()  # The agent may be a new one.

    def _hear(self) -> None:
        assert self._link is not None
        try:
            messages = self._link.receive()
        except ArgosyError:
            self._selector.unregister(self._link)
            self._link.close()
            self._link = None
            return
        for message, _ in messages:
            match message:
                case HostTickets() if self._engine is None:
                    self._start(message)
                case GiveHostsBack():
                    self._dismissed = True
                    self._end()
                case _:
                    pass

    def _start(self, tickets: HostTickets) -> None:
        """Start an agent on each host."""
        engine = self._engine = find_engine(tickets.engine, self._run)
        try:
            head = TlsAddress(engine.open(), tickets.port)
        except ArgosyError as error:
            for name in tickets.tickets:
                self._tell(name, str(error))
            return
        signal.signal(signal.SIGTERM, self._told_to_end)  # Ray's driver takes it.
        for name, ticket in tickets.tickets.items():
            membership = msgspec.structs.replace(msgspec.json.decode(ticket, type=Membership), head=str(head))
            self._children[name] = self._join(engine, name, membership)

    def _join(self, engine: HostEngine, name: str, membership: Membership) -> HostProcess:
        own = os.environ["ARGOSY_RUNTIME_DIR"]
        words = [sys.executable, "-m", "argosy", "agent", "--join", *engine.options(Path(own), name)]
        return engine.start(name, words, msgspec.json.encode(membership))

    def _watch(self) -> None:
        """Tell of hosts whose child has ended."""
        for name, child in self._children.items():
            code = child.poll() if name not in self._told else None
            if code is not None and self._engine is not None:
                self._tell(name, self._engine.reason(name, code))

    def _tell(self, name: str, reason: str) -> None:
        if self._link is not None:
            with suppress(PeerLost):
                self._link.send(HostEnded(self._run, name, reason))
                self._told.add(name)

    def _give_back(self) -> int:
        """End everything on the hosts, and wait for that. A host that is dismissed cleans up after itself."""
        deadline = time.monotonic() + DISMISSED_S * self._dismissed
        while any(child.poll() is None for child in self._children.values()) and time.monotonic() < deadline:
            time.sleep(0.02)
        for child in self._children.values():
            with suppress(OSError):
                child.terminate()
        deadline = time.monotonic() + END_S
        for child in self._children.values():
            try:
                child.wait(max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(END_S)
        if self._engine is not None:
            self._engine.close()
        return 0


def main(run: str) -> int:
    """Give hosts to a run."""
    return Provider(run).serve()
