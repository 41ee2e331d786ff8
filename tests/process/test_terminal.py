"""The terminal that a run is shown in: full, closed, or in a hurry."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, said
from daemons import office, pause, script

from argosy.core import RankId
from argosy.control import facts
from argosy.process.terminal.tell import Teller


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with office(tmp_path_factory.mktemp("office")) as console:
        (console.cwd / "s.py").write_text("print('hello')\n")
        assert console.argosy("run", "--name", "first", "s.py").code == 0
        yield console


def to_full_disk(console: Console, *words: str) -> Ended:
    """Run argosy with its stdout on a device that is always full."""
    with open("/dev/full", "wb") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "argosy", *words],
            stdin=subprocess.DEVNULL,
            stdout=full,
            stderr=subprocess.PIPE,
            cwd=console.cwd,
            env=console.env,
            timeout=90,
        )
    return Ended(ended.returncode, b"", ended.stderr)


@pytest.mark.parametrize("count", ["1", "2"])
def test_a_run_goes_on_though_its_output_cannot_be_written(host: Console, count: str):
    name = script(host, "print('hello')\nimport time\ntime.sleep(0.5)\nprint('again')\nopen('survived', 'w').close()\n")
    ended = to_full_disk(host, "run", "-n", count, "--name", f"full{count}", name)
    assert ended.code == 120  # As python's own.
    assert (host.cwd / "survived").exists()
    lines = [line for line in ended.text.splitlines() if "cannot be written" in line]
    assert len(lines) == 1
    assert "No space left on device; the run goes on, its output is in " in lines[0]
    assert "again" in Path(lines[0].rpartition(" is in ")[2], "0.0.out").read_text()
    assert "Traceback" not in ended.text


def test_the_exit_code_of_a_failed_run_is_kept_though_its_output_is_lost(host: Console):
    assert to_full_disk(host, "run", script(host, "print('hello')\nraise SystemExit(7)\n")).code == 7


@pytest.mark.parametrize(
    "words",
    [
        ["why", "first"],
        ["ps", "--all"],
        ["logs", "first"],
        ["clean"],
        ["doctor"],
        ["--help"],
        ["stop", "--dry-run", "--all"],
    ],
)
def test_other_commands_say_in_one_line_that_they_cannot_write(host: Console, words: list[str]):
    ended = to_full_disk(host, *words)
    assert ended.code == 1
    assert ended.text.removesuffix(": standard output\n").rstrip() == "argosy: No space left on device"


def test_the_same_ctrl_c_arriving_twice_is_one(host: Console, tmp_path: Path):
    """A terminal sends it to the whole process group, and `timeout --foreground` passes it on."""
    name = script(
        host,
        "import signal, sys, time\n"
        "def save(*_):\n    time.sleep(1.5)\n    open('saved', 'w').close()\n    sys.exit(3)\n"
        "signal.signal(2, save)\nprint('ready', flush=True)\nwhile True: time.sleep(0.01)\n",
    )
    out = tmp_path / "out"
    client = host.start("run", name, out=out)
    said(out, "ready")
    client.send_signal(signal.SIGINT)
    pause(0.02)
    client.send_signal(signal.SIGINT)
    assert client.wait(60) == 130
    assert (host.cwd / "saved").exists()


ORDER = "import sys\nfor n in range(500):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n"


def test_one_rank_in_one_terminal_keeps_the_order_of_its_streams(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    assert host.start("run", "--name", "order", script(host, ORDER), out=out).wait(60) == 0
    assert out.read_text() == "".join(f"out {n}\nerr {n}\n" for n in range(500))
    assert host.argosy("logs", "order").out == out.read_bytes()


def test_streams_that_go_apart_are_kept_apart(host: Console, tmp_path: Path):
    ended = host.argosy("run", script(host, ORDER))
    assert ended.out == "".join(f"out {n}\n" for n in range(500)).encode()
    assert ended.err.count(b"err ") == 500
    out = tmp_path / "out"
    assert host.start("run", "--name", "apart", "--tee", "3", script(host, ORDER), out=out).wait(60) == 0
    assert host.argosy("logs", "apart", "--stream", "stderr").err.count(b"err ") == 500


FAILED = facts.IncidentTaken(at=1.0, incident="1", headline="rank 1 failed: exit code 3")
RESTART = facts.Restarting(at=1.0, ranks=[0, 1], generation=1, cause="rank 1: exit code 3")
STARTED = facts.RankStarted(at=2.0, rank=RankId("main", 0, 1), pid=7)


@pytest.mark.parametrize("order", [[FAILED, RESTART], [RESTART, FAILED]])
def test_a_failure_is_told_before_its_consequence(order: list[facts.AnyFact]):
    teller = Teller(2)
    said_ = [text for fact in [*order, *order] for text in teller.lines(fact)]
    assert said_ == ["rank 1 failed: exit code 3; restarting ranks 0-1 as generation 1"] * 2


def test_a_failure_without_a_consequence_is_told_with_the_next_fact():
    teller = Teller(2)
    assert teller.lines(FAILED) == []
    assert teller.lines(STARTED) == ["rank 1 failed: exit code 3"]


def test_a_restart_without_evidence_is_told_when_it_happens():
    teller = Teller(2)
    assert teller.lines(RESTART) == []
    assert teller.lines(STARTED) == ["rank 1: exit code 3; restarting ranks 0-1 as generation 1"]
    ended = facts.LaunchEnded(at=3.0, launch=1, code=0, reason="")
    assert [text for fact in (FAILED, ended) for text in teller.lines(fact)] == [], "it was told already"
    assert [text for fact in (FAILED, ended) for text in teller.lines(fact)] == ["rank 1 failed: exit code 3"]
