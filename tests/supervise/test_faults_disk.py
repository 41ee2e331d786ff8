"""A full disk is reported, and costs nothing that room on it could not bring back."""

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, close, said, until
from daemons import WAITS, daemon, kill, ranks, run_of

from argosy.control import facts
from argosy.supervise.records.rundir import read_facts, read_record

BLOCK = 4096


def fill(disk: Path, journal: Path) -> Path:
    """Leave no room at all, also not in the last block of a journal, which gets bytes that are no record."""
    ballast = disk / "ballast"
    with suppress(OSError), ballast.open("ab", buffering=0) as file:
        while file.write(bytes(BLOCK)):
            pass
    with journal.open("ab") as file:
        file.write(bytes(-journal.stat().st_size % BLOCK))
    return ballast


@pytest.fixture
def console(small_disk: Path, cold_console: Console) -> Iterator[Console]:
    """A terminal whose runtime directory is on the small disk."""
    console = replace(cold_console, runtime=small_disk / "r")
    console.env["ARGOSY_RUNTIME_DIR"] = str(console.runtime)
    yield console
    close(console)


@pytest.mark.system
def test_a_full_disk_under_the_agent_log_is_reported_and_the_log_is_written_later(
    small_disk: Path, console: Console, tmp_path: Path
):
    (tmp_path / "waits.py").write_text(WAITS)
    out = tmp_path / "out"
    client = console.start("run", "-n", "2", "--restart", "rank", "--name", "log", "waits.py", "0", "6", out=out)
    said(out, "rank 1 ready")
    ballast = fill(small_disk, console.runtime / "agent.log")
    os.kill(ranks(console, "log")[1].pid, signal.SIGKILL)
    said(out, r"argosy: the agent log cannot be written \(No space left on device: ")
    replaced = ranks(console, "log", generation=1, count=1)
    run = run_of(console, "log")
    assert run is not None
    assert run.state == "running, disk trouble"
    assert "the agent log cannot be written" in console.argosy("why", "log").text
    ballast.unlink()
    until(lambda: (run := run_of(console, "log")) is not None and run.state == "running", "room on the disk")
    kill(daemon(console, "agent"))
    assert [rank.pid for rank in ranks(console, "log")] == [rank.pid for rank in replaced]
    (tmp_path / "go").touch()
    assert client.wait(PATIENCE_S) == 6


def test_a_full_disk_under_the_run_is_reported_and_its_facts_are_written_later(
    host: Console, small_disk: Path, tmp_path: Path
):
    directory, out = small_disk / "run", tmp_path / "out"
    words = ["-n", "2", "--restart", "rank", "--dir", str(directory)]
    client = host.start("run", *words, "waits.py", "0", "6", out=out)
    said(out, "rank 1 ready")
    ballast = fill(small_disk, directory / "events")
    os.kill(ranks(host, "run")[1].pid, signal.SIGKILL)
    said(out, r"argosy: the run's records cannot be written \(No space left on device: ")
    ranks(host, "run", generation=1, count=1)
    ballast.unlink()
    until(lambda: any(isinstance(fact, facts.DiskTrouble) for fact in read_facts(directory)), "the fact of the trouble")
    lost = [fact.rank.index for fact in read_facts(directory) if isinstance(fact, facts.RankExited)]
    assert lost == [1]
    fill(small_disk, directory / "events")
    (tmp_path / "go").touch()
    assert client.wait(PATIENCE_S) == 6
    assert (read_record(directory).state, read_record(directory).code) == ("ended", 6)
