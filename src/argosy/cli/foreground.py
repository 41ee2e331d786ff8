"""A run in the foreground: its output in the terminal, its signals to the ranks, its exit code.

The client tails the ranks' files itself. If it is killed, its link ends and with it the run; if the agent is killed,
the client waits for the next one.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

import msgspec

from argosy.cli.fold import Folder
from argosy.cli.tell import Teller
from argosy.control import facts
from argosy.core import ConfigError, PeerLost, RankId
from argosy.fabric import Link
from argosy.hosts import reason_to_end
from argosy.supervise import (
    Follower,
    Happened,
    Notice,
    Out,
    Refused,
    SignalRun,
    StopRun,
    Stream,
    ToClient,
    Welcome,
    read_record,
    rejoin,
    started_ranks,
)

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGQUIT)
FORWARDED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP)
PATIENCE_S = 8.0
"""Silence after which a cold start says what it does."""
REPEAT_S = 0.5
"""Two signals closer than this are one wish: a terminal sends it, and a parent (`timeout`) forwards it."""
OUTPUT_LOST = 120
"""What python exits with if its output could not be written."""


def relative(path: str) -> str:
    """A path as seen from the working directory, if that is shorter."""
    with suppress(OSError):  # The working directory may be gone.
        return min(path, os.path.relpath(path), key=len)
    return path


class Foreground:
    """One run being watched until it ends."""

    def __init__(self, link: Link[ToClient], welcome: Welcome, shown: Sequence[tuple[Stream, ...]] | None) -> None:
        """`shown` are the streams of each rank that reach the terminal; None: facts as lines of JSON instead."""
        self._link, self._welcome, self._shown = link, welcome, shown
        self._follower = Follower(welcome.size)
        self._teller = Teller(welcome.size)
        self._folder = Folder(lambda index, stream: relative(self._log_of(index, stream)))
        self._generations: dict[int, int] = {}
        self._colour = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self._signals: list[tuple[int, float]] = []
        self._stopped_at = -REPEAT_S
        self._output_lost = False
        self._code: int | None = None
        self._reason = ""
        self._began_at = time.monotonic()
        self._quiet = True
        self._followed: set[RankId] = set()
        self._explained = False
        """A rank ended by itself: its output says what there is to say."""
        self._reported = False
        """The terminal has said which rank failed first."""
        self._chatty = welcome.size > 1 or sys.stderr.isatty()

    def run(self) -> int:
        """Show the run until it ends; returns its exit code."""
        restore = self._take_signals()
        try:
            while self._code is None:
                self._turn()
            self._drain(final=True)
            self._farewell(self._code)
            return self._code or (OUTPUT_LOST if self._output_lost else 0)
        finally:
            restore()

    def _turn(self) -> None:
        poller = select.poll()
        poller.register(self._link, select.POLLIN | (select.POLLOUT if self._link.wants_write else 0))
        try:
            ready = self._link.has_messages or poller.poll(self._follower.idle_s() * 1000)
            self._forward()
            if ready:
                self._link.flush()
                for message, _ in self._link.receive():
                    self._hear(message)
        except PeerLost:
            self._reconnect()
        self._drain()
        if self._quiet and time.monotonic() - self._began_at > (2.0 if self._chatty else PATIENCE_S):
            self._quiet = False
            self._say("importing packages for all ranks; the next start will be faster")

    def _hear(self, message: ToClient) -> None:
        match message:
            case Happened(fact=fact):
                self._happened(fact)
            case Notice(text) if self._chatty:
                self._say(text)
            case Refused(reason, hint):
                raise ConfigError(reason, hint=hint)
            case _:
                pass

    def _happened(self, fact: facts.AnyFact) -> None:
        if self._shown is None:
            self._put("stdout", msgspec.json.encode(fact) + b"\n")
        match fact:
            case facts.RankStarted(rank=rank):
                self._quiet = False
                self._folder.first = None
                self._follow(rank)
            case facts.RankExited(rank=rank, asked=asked):
                self._follow(rank)  # One that could not start has its reason in its log.
                self._explained |= not asked
                self._drain(final=True)
                self._follower.close(rank.index)
            case facts.LaunchEnded(code=code, reason=reason):
                self._code, self._reason = code, reason
            case _:
                pass
        self._chatty |= isinstance(fact, facts.Restarting)  # Then the output alone does not say what happens.
        told = self._chatty or (self._shown is not None and isinstance(fact, facts.DiskTrouble))
        for text in self._teller.lines(fact) if told else ():
            self._drain(final=True)
            self._say(text)
        if isinstance(fact, facts.IncidentTaken) and fact.first is not None:
            self._folder.first = fact.first.index
            self._reported = True

    def _follow(self, rank: RankId) -> None:
        """Show what a rank writes."""
        if rank in self._followed:
            return
        self._followed.add(rank)
        self._generations[rank.index] = rank.generation
        for stream in self._shown[rank.index] if self._shown is not None else ():
            self._follower.add(rank.index, stream, self._log_of(rank.index, stream))

    def _log_of(self, index: int, stream: Stream) -> str:
        """The file that the newest process of a rank writes to."""
        ending = "out" if stream == "stdout" else "err"
        return f"{self._welcome.logs}/{index}.{self._generations[index]}.{ending}"

    def _drain(self, final: bool = False) -> None:
        """Show what the ranks wrote; `final` until the files are read to their ends."""
        self._write(self._follower.outs(final=final))

    def _write(self, outs: Iterable[Out], *, final: bool = False) -> None:
        folded = self._folder.take(outs, time.monotonic(), final=final) if self._welcome.size > 1 else outs
        for out in folded:
            if isinstance(out, str):
                self._say(out)
            else:
                self._put(out.stream, self._follower.render(out, self._colour))

    def _put(self, stream: Stream, data: bytes) -> None:
        """Write to the terminal, whatever it is; the run does not depend on it."""
        target = sys.stdout if stream == "stdout" else sys.stderr
        try:
            target.buffer.write(data)
            target.flush()
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), target.fileno())
            if isinstance(error, BrokenPipeError):  # Nobody reads any more: end as a program in a pipe does.
                self._link.send(StopRun(self._welcome.run, "its output was closed", signal.SIGTERM))
                return
            self._output_lost = True
            trouble = f"{stream} cannot be written: {error.strerror}"
            self._say(f"{trouble}; the run continues, its output is in {self._welcome.logs}")

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print(f"argosy: {text}", file=sys.stderr, flush=True)

    def _farewell(self, code: int) -> None:
        self._write(self._follower.rest(), final=True)
        if code and code < 128 and not self._explained and not self._chatty:
            self._say(self._reason)
        if code and self._chatty:
            name = Path(self._welcome.directory).name
            reason = "" if self._reported else f": {self._reason}"
            self._say(f"{name} ended with exit code {code}{reason}; see `argosy why {name}`")

    def _take_signals(self) -> Callable[[], None]:
        def note(number: int, _: FrameType | None) -> None:
            self._signals.append((number, time.monotonic()))

        before = {number: signal.signal(number, note) for number in (*STOP_SIGNALS, *FORWARDED)}

        def restore() -> None:
            for number, handler in before.items():
                signal.signal(number, handler)

        return restore

    def _forward(self) -> None:
        signals, self._signals = self._signals, []
        for number, at in signals:
            if number in FORWARDED:
                self._link.send(SignalRun(self._welcome.run, number))
            elif at - self._stopped_at >= REPEAT_S:
                self._stopped_at = at
                name = signal.Signals(number).name
                by = "ctrl-c" if number == signal.SIGINT else f"{name} to `argosy run` (pid {os.getpid()})"
                by = (reason_to_end(os.environ) if number == signal.SIGTERM else "") or by
                self._link.send(StopRun(self._welcome.run, by, number))

    def _reconnect(self) -> None:
        """The agent ended: watch the run through the next one, or read how it ended."""
        self._link.close()
        link = rejoin(self._welcome)
        for rank in started_ranks(Path(self._welcome.directory), self._welcome.launch):
            self._follow(rank)  # Some may have started while there was no agent to tell of it.
        if link is not None:
            self._link = link
            return
        record = read_record(Path(self._welcome.directory))
        ended = record.state == "ended" and record.launch == self._welcome.launch
        self._code = record.code if ended and record.code is not None else 1
        self._reason = record.reason or "Argosy's daemons were killed"
