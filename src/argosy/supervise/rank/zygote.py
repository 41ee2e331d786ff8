"""The zygote: a warm single-threaded process that has imported a script's packages and forks its ranks.

It is the parent of its ranks: it reports their exits and stops, and records each exit before it reports it.
It lives through the death of the agent and connects to the next one.

Z1  It forks nothing before preloading is over and has left it with one thread.
Z2  A rank never returns into the zygote's loop.
Z3  A rank is forked once, however often it is asked for.
"""

import contextlib
import gc
import os
import select
import socket
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec
import setproctitle

from argosy.core import ArgosyError, PeerLost, RankId
from argosy.fabric import FDS_MAX, Link, connect
from argosy.observe import install
from argosy.supervise.daemons import start_warden
from argosy.supervise.imports.zygote_key import key_for
from argosy.supervise.lifeline import Lifeline
from argosy.supervise.messages import (
    Child,
    Fork,
    ForkBeside,
    Forked,
    ForkFailed,
    ForkStore,
    Preload,
    RankSpec,
    Release,
    Retire,
    Spared,
    ToZygote,
    ZygoteHello,
    ZygoteReady,
    to_zygote,
)
from argosy.supervise.processes import process_id
from argosy.supervise.rank.beside_rank import run_beside
from argosy.supervise.rank.boot import Inherited, run_rank
from argosy.supervise.rank.preload import Preloaded, preload
from argosy.supervise.rank.prepare_child import reset_signals
from argosy.supervise.rank.reaper import Reaper
from argosy.supervise.rank.reset_process import leave_finalizers, tolerate_full_disk
from argosy.supervise.rank.spares import Spares, wait_as_spare
from argosy.supervise.rank.store import serve_store
from argosy.supervise.rank.threads import blas_setters

START_S = 2.0
"""Without an agent for this long, the zygote starts a warden."""
BORN_S = 1.0
"""How long ranks that were forked are waited for before the agent is told of them."""
TOLD_AT_ONCE = 16
"""Ranks whose start is told in one message to the agent: it works on them while the next are forked."""
RECONNECT_S = 60.0
"""Without an agent for this long, the zygote ends; its ranks then depend on the warden."""


class Zygote:
    """The state of the loop."""

    def __init__(self, runtime: Path, key: str, fresh: frozenset[str]) -> None:
        self.runtime, self.key = runtime, key
        self.reaper = Reaper(runtime)
        self.ready = False
        self.shared_key = ""
        self.environ = dict(os.environ)
        self.retired = False
        self.births: tuple[int, int] | None = None
        """A pipe that the ranks forked last hold until they can be found."""
        self.inherited = Inherited(runtime, {}, [], fresh, os.getpid())
        self.link: Link[ToZygote] | None = None
        self.process = process_id(os.getpid())
        self.sealed: dict[str, int] = {}
        self.spares = Spares(lambda theirs, run: self.become(lambda: self.live_as_spare(theirs, run)))
        self.told: dict[str, list[int]] = {}
        """The spares that the agent knows of."""
        self.lifeline = Lifeline(runtime, zygote=True)

    def loop(self) -> None:
        """Serve agents until retired and childless."""
        while not (self.retired and not self.reaper.children):
            if self.link is None and not self.reconnect():
                return
            try:
                self.turn()
            except PeerLost:
                self.disconnect()

    def reconnect(self) -> bool:
        """Find the agent, or the next one; False if none came, or none of ours. Exits are recorded meanwhile."""
        deadline, start_at = time.monotonic() + RECONNECT_S, time.monotonic() + START_S
        while time.monotonic() < deadline and self.lifeline.in_place:
            with contextlib.suppress(ArgosyError):
                self.link = connect(self.runtime / "agent.sock", to_zygote, "the agent")
                self.retired = False  # The next agent decides anew.
                children = list(self.reaper.children.values())
                runs = list(self.sealed)
                hello = ZygoteHello(self.key, self.process, children, self.ready, runs, self.shared_key)
                self.link.send(hello, [self.sealed[run] for run in runs])
                self.told = {}
                self.mind_spares(self.link)
                return True
            list(self.reaper.collect())
            if self.reaper.children and time.monotonic() >= start_at:  # Agent and warden were killed together.
                start_at = time.monotonic() + START_S
                start_warden(self.runtime)
            time.sleep(0.01)
        return False

    def keep(self, run: str, sealed: int) -> None:
        """Hold the environment of a run for an agent that has lost it, as long as the run has ranks here."""
        alive = {child.run for child in self.reaper.children.values()}
        for over in [held for held in self.sealed if held not in alive]:
            os.close(self.sealed.pop(over))
        if run not in self.sealed and len(self.sealed) < FDS_MAX:
            self.sealed[run] = os.dup(sealed)

    def disconnect(self) -> None:
        """The agent is gone."""
        if self.link is not None:
            self.link.close()
            self.link = None

    def turn(self) -> None:
        """Wait for one thing to happen, and deal with it."""
        link = self.link
        assert link is not None
        poller = select.poll()
        poller.register(self.reaper, select.POLLIN)
        poller.register(link, select.POLLIN | (select.POLLOUT if link.wants_write else 0))
        wait_s = self.spares.wait_s
        ready = {fd for fd, _ in poller.poll(None if wait_s is None else wait_s * 1000)}
        for event in self.reaper.collect():
            link.send(event)
        link.flush()
        for message, fds in link.receive() if link.fileno() in ready else ():
            try:
                self.handle(link, message, fds)
            finally:
                for fd in fds:
                    os.close(fd)
        self.mind_spares(link)

    def handle(self, link: Link[ToZygote], message: ToZygote, fds: list[int]) -> None:
        """Do what the agent asks."""
        match message:
            case Preload():
                self.preload(link, message)
            case Fork():
                self.keep(message.run, fds[0])
                self.spares.want(message.run, message.launch.spares)
                for position, spec in enumerate(message.ranks):
                    self.fork_rank(link, message, spec, fds if position == 0 else fds[:1])
                    if position % TOLD_AT_ONCE == TOLD_AT_ONCE - 1:
                        self.tell_of_born(link)
                self.tell_of_born(link)
            case Release(run):
                self.spares.release(run)
            case ForkBeside():
                self.fork_beside(message, fds)
            case ForkStore():
                self.fork_store(link, message, fds[0])
            case Retire():
                self.retired = True

    def preload(self, link: Link[ToZygote], message: Preload) -> None:
        """Import what the ranks will need, and say how that went."""
        result: Preloaded = preload(message.entries, lambda entry: print(f"zygote: importing {entry}", flush=True))
        install()
        changed = {name: value for name, value in result.environ.items() if value is not None}
        self.inherited = self.inherited._replace(changed=changed, blas=blas_setters())
        leave_finalizers()
        gc.collect()
        gc.freeze()  # What is shared stays shared: the collector would write to every page.
        self.ready = not result.spoiled
        self.shared_key = key_for(message.imports, self.environ, result.read)
        link.send(ZygoteReady(self.key, list(result.spoiled), list(result.read), self.shared_key))
        setproctitle.setproctitle(f"argosy: zygote {self.key} {' '.join(result.loaded[:4])}")

    def fork_rank(self, link: Link[ToZygote], message: Fork, spec: RankSpec, fds: list[int]) -> None:
        """Fork one rank, or let a spare become it, and tell the agent. A rank that lives already is told again (Z3)."""
        if (known := self.reaper.find(message.run, spec.rank)) is not None:
            link.queue(Forked(known))
            return
        try:
            self.births = self.births or os.pipe()
            pid = self.spares.use(msgspec.structs.replace(message, ranks=[spec]), fds) or os.fork()
        except OSError as error:
            link.queue(ForkFailed(message.run, spec.rank, f"fork failed: {error.strerror}"))
            return
        if pid == 0:
            inherited = self.inherited._replace(born=self.births[1])
            self.become(lambda: run_rank(inherited, message.run, message.launch, spec, fds))  # Z2
        child = Child(message.run, spec.rank, process_id(pid))
        self.reaper.children[pid] = child
        link.queue(Forked(child))

    def tell_of_born(self, link: Link[ToZygote]) -> None:
        """Tell the agent of the forked ranks when each can be found: one that it knows survives this process (B4)."""
        if self.births is not None:
            (read, write), self.births = self.births, None
            os.close(write)
            poller = select.poll()
            poller.register(read, select.POLLIN)
            poller.poll(BORN_S * 1000)  # Until the last of them has closed its end.
            os.close(read)
        link.flush()

    def live_as_spare(self, theirs: socket.socket, run: str) -> int:
        """In a child: wait for a rank, and be it."""
        told = wait_as_spare(theirs, run)
        if told is None:
            return 0
        message, fds = told
        return run_rank(self.inherited, message.run, message.launch, message.ranks[0], fds)

    def mind_spares(self, link: Link[ToZygote]) -> None:
        """Have as many spares as are wanted, and tell the agent of changes."""
        self.spares.mind({child.run for child in self.reaper.children.values()}, time.monotonic())
        pids = self.spares.pids()
        for run in [run for run in pids if pids[run] != self.told.get(run, [])]:
            link.queue(Spared(run, pids[run]))
        self.told = pids
        link.flush()

    def fork_beside(self, message: ForkBeside, fds: list[int]) -> None:
        """Fork a process that a rank asked for; the rank sees whether it came, and its end is nobody else's."""
        with contextlib.suppress(OSError):
            if os.fork() == 0:
                self.become(lambda: run_beside(self.inherited, message, fds))  # Z2

    def fork_store(self, link: Link[ToZygote], message: ForkStore, listener: int) -> None:
        """Fork the process that serves a generation's store."""
        rank = RankId("store", 0, message.generation)
        pid = os.fork()
        if pid == 0:
            os.set_inheritable(listener, False)
            self.become(lambda: serve_store(self.runtime, message, listener))
        child = Child(message.run, rank, process_id(pid), "store")
        self.reaper.children[pid] = child
        link.send(Forked(child))

    def become(self, life: Callable[[], int]) -> None:
        """In a fresh child: forget that this was a zygote, live, and end. Does not return."""
        code = 127
        try:
            assert self.link is not None
            self.link.forget()
            self.reaper.forget()
            self.spares.forget()
            reset_signals()
            code = life()
        except BaseException:  # Of Argosy's own: user code is guarded. Where its output goes, this may be read.
            traceback.print_exc()
        finally:
            os._exit(code)


def main(fresh: frozenset[str]) -> None:
    """Become a zygote: argv holds the runtime directory and the key; `fresh` are the modules there from the start."""
    runtime, key = Path(sys.argv[1]), sys.argv[2]
    setproctitle.setproctitle(f"argosy: zygote {key}")
    tolerate_full_disk()
    "localhost".encode("idna")  # Loads the codec, which else takes each rank 3 ms at its first connection.
    Zygote(runtime, key, fresh).loop()
