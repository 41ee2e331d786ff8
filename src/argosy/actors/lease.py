"""The owner's side of a run: holds its lease, hears its facts, shows its ranks' output. One thread per run."""

import atexit
import contextlib
import os
import select
import sys
import threading
import time
import weakref
from pathlib import Path

from argosy.actors.events import Events, MeshEvent, event_of
from argosy.control import facts
from argosy.core import ArgosyError, PeerLost, RankId
from argosy.fabric import Link
from argosy.supervise import (
    Follower,
    Happened,
    Notice,
    StopRun,
    Stream,
    ToClient,
    Welcome,
    ask,
    connect_agent,
    read_record,
    rejoin,
    started_ranks,
)

SHOWN_MAX = 256
"""Output of more ranks than this is not shown: each would cost two descriptors; `argosy logs` shows it."""
LOOK_S = 0.05
STREAMS: tuple[tuple[Stream, str], ...] = (("stdout", "out"), ("stderr", "err"))


class Watcher:
    """Follows one run until it ends, or until this process does: then the lease ends the run."""

    def __init__(self, link: Link[ToClient], welcome: Welcome, show: bool) -> None:
        self.events = Events()
        self.ended = threading.Event()
        self.code: int | None = None
        self._link, self._welcome = link, welcome
        self._follower = Follower(welcome.size) if show and welcome.size <= SHOWN_MAX else None
        self._followed: set[RankId] = set()
        self._let_go = False
        self._thread = threading.Thread(target=self._watch, name="argosy watcher", daemon=True)
        self._thread.start()
        _living.add(self)

    def stop(self, by: str, grace_s: float, timeout_s: float = 60.0) -> None:
        """End the run and wait for that."""
        deadline = time.monotonic() + timeout_s
        while not self.ended.is_set() and time.monotonic() < deadline:
            with contextlib.suppress(ArgosyError):
                link = connect_agent()
                try:
                    ask(link, StopRun(self._welcome.run, by, 15, grace_s))
                finally:
                    link.close()
                self.ended.wait(deadline - time.monotonic())
            self.ended.wait(0.02)  # The agent was killed: the next one is told.
        self._let_go = True
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)
        self._link.close()
        _living.discard(self)

    def forget(self) -> None:
        """In a forked child: the lease is the parent's."""
        self._let_go = True
        self._link.close()

    def _watch(self) -> None:
        while not self._let_go:
            poller = select.poll()
            poller.register(self._link, select.POLLIN)
            try:
                if poller.poll((LOOK_S if self._follower is not None else 1.0) * 1000):
                    for message, _ in self._link.receive():
                        self._hear(message)
            except PeerLost:
                if not self._let_go:
                    self._reconnect()
            except (ArgosyError, OSError, ValueError):
                return
            self._show()
            if self.ended.is_set():
                self._show(final=True)
                self._link.close()
                return

    def _hear(self, message: ToClient) -> None:
        if isinstance(message, Notice):
            print(f"argosy: {message.text}", file=sys.stderr)
        if not isinstance(message, Happened):
            return
        fact = message.fact
        if isinstance(fact, facts.RankStarted):
            self._follow(fact.rank)
        if isinstance(fact, facts.LaunchEnded):
            self.code = fact.code
        if (event := event_of(fact)) is not None:
            if event.what == "ended":
                self._show(final=True)
            self.events.add(event)
        if isinstance(fact, facts.LaunchEnded):
            self.ended.set()

    def _follow(self, rank: RankId) -> None:
        """Show what a rank writes."""
        if self._follower is not None and rank not in self._followed:
            self._followed.add(rank)
            for stream, ending in STREAMS:
                path = f"{self._welcome.logs}/{rank.index}.{rank.generation}.{ending}"
                self._follower.add(rank.index, stream, path)

    def _show(self, final: bool = False) -> None:
        """Print what the ranks wrote."""
        if self._follower is None:
            return
        for out in self._follower.rest() if final else self._follower.outs():
            target = sys.stdout if out.stream == "stdout" else sys.stderr
            with contextlib.suppress(OSError, ValueError, AttributeError):
                target.write(self._follower.render(out, colour=False).decode(errors="replace"))
                target.flush()

    def _reconnect(self) -> None:
        """The agent is gone: find the next one, or the run's last word."""
        self._link.close()
        link = rejoin(self._welcome, lambda: self._let_go)
        for rank in started_ranks(Path(self._welcome.directory), self._welcome.launch):
            self._follow(rank)  # Some may have started while there was no agent to tell of it.
        if link is not None:
            self._link = link
            return
        reason = "the agent is gone"
        with contextlib.suppress(ArgosyError):
            record = read_record(Path(self._welcome.directory))
            self.code, reason = record.code, record.reason or reason
        self.events.add(MeshEvent("ended", cause=reason, at=time.time()))
        self.ended.set()


_living: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


@atexit.register
def _stop_all() -> None:
    for watcher in list(_living):
        with contextlib.suppress(ArgosyError, OSError):
            watcher.stop("the end of its owner", 5.0, timeout_s=10.0)


def _forget_in_child() -> None:
    for watcher in list(_living):
        watcher.forget()
    _living.clear()


os.register_at_fork(after_in_child=_forget_in_child)
