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

from argosy.core import ArgosyError, PeerLost, RankId
from argosy.fabric import Link
from argosy.process.actors.events import Events, MeshEvent, event_of
from argosy.process.host.messages import Happened, Notice, StopRun, ToClient, WatchRun, Welcome
from argosy.process.output.stream import Merger, Stream
from argosy.process.output.tail import Tail
from argosy.control import facts
from argosy.process.run.rundir import read_record
from argosy.process.terminal.client import ask, connect_agent, reach_agent

RECONNECT_S = 20.0
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
        self._merger = Merger(welcome.size, prefix=welcome.size > 1)
        self._tail = Tail() if show and welcome.size <= SHOWN_MAX else None
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
                if poller.poll((LOOK_S if self._tail is not None else 1.0) * 1000):
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
        if isinstance(fact, facts.RankStarted) and self._tail is not None and fact.rank not in self._followed:
            self._followed.add(fact.rank)
            for stream, ending in STREAMS:
                path = f"{self._welcome.logs}/{fact.rank.index}.{fact.rank.generation}.{ending}"
                self._tail.add(fact.rank.index, stream, path)
        if isinstance(fact, facts.LaunchEnded):
            self.code = fact.code
        if (event := event_of(fact)) is not None:
            if event.what == "ended":
                self._show(final=True)
            self.events.add(event)
        if isinstance(fact, facts.LaunchEnded):
            self.ended.set()

    def _show(self, final: bool = False) -> None:
        """Print what the ranks wrote."""
        if self._tail is None:
            return
        while chunks := self._tail.poll():
            self._merger.feed_all(chunks, time.monotonic())
            if not final:
                break
        if final:
            for index in range(self._welcome.size):
                self._merger.close(index, time.monotonic())
        for out in self._merger.due(time.monotonic() + (60 if final else 0)):
            target = sys.stdout if out.stream == "stdout" else sys.stderr
            with contextlib.suppress(OSError, ValueError, AttributeError):
                target.write(self._merger.render(out, colour=False).decode(errors="replace"))
                target.flush()

    def _reconnect(self) -> None:
        """The agent is gone: find the next one, or the run's last word."""
        self._link.close()
        deadline = time.monotonic() + RECONNECT_S
        while time.monotonic() < deadline and not self._let_go:
            try:
                self._link = reach_agent(start_after_s=1.0)
                self._link.send(WatchRun(self._welcome.run, lease=True))
                answer, _ = self._link.wait(5.0)
                if isinstance(answer, Welcome):
                    return
                break
            except ArgosyError:
                self._link.close()
                time.sleep(0.02)
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
