"""Look at the daemons of a terminal, and do harm to them."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import psutil
from console import Console, terminal, until

from argosy.core import ArgosyError
from argosy.fabric import connect
from argosy.process.host.messages import ListRuns, RankInfo, RunInfo, Runs, to_client
from argosy.process.terminal.client import ask

WAITS = """
import os, sys, time
rank, count = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
print(f"rank {rank} ready, generation {count}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print(f"rank {rank} goes", flush=True)
sys.exit(int(sys.argv[1:][int(rank)]) if len(sys.argv) > 1 else 0)
"""
"""Ranks that wait for the file `go`, then exit with the code at their place."""


@contextmanager
def office(path: Path) -> Iterator[Console]:
    """A terminal whose daemons many tests share; each takes a `desk` of its own."""
    with terminal(path) as console:
        yield console


def desk(console: Console, cwd: Path) -> Console:
    """The same daemons, another directory."""
    (cwd / "waits.py").write_text(WAITS)
    return replace(console, cwd=cwd)


def script(console: Console, text: str) -> str:
    """Write `s.py`; returns its name."""
    (console.cwd / "s.py").write_text(text)
    return "s.py"


def look(console: Console) -> Runs:
    """What the agent knows; waits for the next agent if there is none right now."""

    def try_it() -> Runs | None:
        try:
            link = connect(console.runtime / "agent.sock", to_client, "the agent")
        except ArgosyError:
            return None
        try:
            answer = ask(link, ListRuns(), timeout_s=10.0)
        except ArgosyError:
            return None
        finally:
            link.close()
        assert isinstance(answer, Runs)
        return answer

    answer = until(try_it, "an agent that answers")
    assert answer is not None
    return answer


def daemon(console: Console, what: str) -> int:
    """The pid of the agent, the warden or the only zygote."""

    def find() -> int:
        return next((daemon.pid for daemon in look(console).daemons if daemon.what == what and daemon.pid), 0)

    return until(find, f"a {what}")


def kill(pid: int) -> None:
    """kill -9, and wait until it is gone."""
    os.kill(pid, signal.SIGKILL)
    until(lambda: gone(pid), f"the end of {pid}")


def gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def run_of(console: Console, name: str) -> RunInfo | None:
    return next((run for run in look(console).runs if run.name == name), None)


def ranks(console: Console, name: str, generation: int = 0, count: int = 2) -> list[RankInfo]:
    """The ranks of a run as soon as `count` of them live in a generation of at least this."""

    def find() -> list[RankInfo]:
        run = run_of(console, name)
        alive = [rank for rank in run.ranks if rank.pid] if run is not None else []
        return alive if sum(rank.generation >= generation for rank in alive) >= count else []

    return until(find, f"{count} ranks of {name} in generation {generation}")


def idle(console: Console) -> None:
    """Wait until no run is alive; nothing of one may be left then but the daemons."""
    until(lambda: not look(console).runs, "the end of all runs")
    folders = [console.runtime / "runs", console.segments]
    assert [path for folder in folders if folder.exists() for path in folder.iterdir()] == []
    spared = {daemon.pid for daemon in look(console).daemons} | {command.pid for command in console.started}

    def left() -> list[str]:
        return [line for line in console.leftovers() if int(line.split()[0]) not in spared]

    try:
        until(lambda: not left(), "nothing but daemons", 5.0)
    except AssertionError:
        raise AssertionError("left behind:\n" + "\n".join(left())) from None


def pause(seconds: float = 0.3) -> None:
    """Give a fault time to do its harm; no test's outcome depends on how long this is."""
    time.sleep(seconds)
