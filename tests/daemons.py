"""Look at the daemons of a terminal, and do harm to them."""

import os
import signal
import subprocess
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import psutil
from console import Console, ask_agent, until

from argosy.supervise.messages import RankInfo, RunInfo, Runs

WAITS = """
import os, sys, time
rank, count = os.environ.get("RANK", "0"), os.environ["ARGOSY_GENERATION"]
print(f"rank {rank} ready, generation {count}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print(f"rank {rank} goes", flush=True)
sys.exit(int(sys.argv[1:][int(rank)]) if len(sys.argv) > 1 else 0)
"""
"""Ranks that wait for the file `go`, then exit with the code at their place."""


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
    answer = until(lambda: ask_agent(console), "an agent that answers")
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


def press_until_it_ends(command: "subprocess.Popen[bytes]") -> None:
    """Press Ctrl-C until the command ends: signals that come together count as one."""

    def ended() -> bool:
        with suppress(subprocess.TimeoutExpired):
            command.wait(0.6)
            return True
        command.send_signal(signal.SIGINT)
        return False

    until(ended, "the end of a command at Ctrl-C")


def pause(seconds: float = 0.3) -> None:
    """Give a fault time to do its harm; no test's outcome depends on how long this is."""
    time.sleep(seconds)
