"""The terminal that a run is shown in: full, closed, or in a hurry."""

import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from console import PATIENCE_S, Console, Ended, said, terminal
from daemons import pause, script

from argosy.cli.tell import Teller
from argosy.control import facts
from argosy.core import RankId, WaitStatus


@pytest.fixture(scope="module", autouse=True)
def first(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A run that has ended."""
    with terminal(tmp_path_factory.mktemp("first")) as console:
        (console.cwd / "s.py").write_text("print('hello')\n")
        assert console.argosy("run", "--name", "first", "s.py").code == 0
        yield


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
            timeout=300,
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
    assert "No space left on device; the run continues, its output is in " in lines[0]
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

    def is_one() -> bool:
        out = tmp_path / "out"
        client = host.start("run", name, out=out)
        said(out, "ready")
        client.send_signal(signal.SIGINT)
        pause(0.02)
        client.send_signal(signal.SIGINT)
        assert client.wait(PATIENCE_S) == 130
        return (host.cwd / "saved").exists()

    # Where the command waits for a core between the two, they do arrive half a second apart.
    assert any(is_one() for _ in range(5))


IMPORTING = "argosy: importing packages for all ranks; the next start will be faster\n"
"""Said if a start takes long."""
ORDER = "import sys\nfor n in range(500):\n    print('out', n)\n    print('err', n, file=sys.stderr)\n"


def test_one_rank_in_one_terminal_keeps_the_order_of_its_streams(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    assert host.start("run", "--name", "order", script(host, ORDER), out=out).wait(60) == 0
    shown = out.read_text().removeprefix(IMPORTING)
    assert shown == "".join(f"out {n}\nerr {n}\n" for n in range(500))
    assert host.argosy("logs", "order").out.decode() == shown


def test_streams_that_go_apart_are_kept_apart(host: Console, tmp_path: Path):
    ended = host.argosy("run", script(host, ORDER))
    assert ended.out == "".join(f"out {n}\n" for n in range(500)).encode()
    assert ended.err.count(b"err ") == 500
    out = tmp_path / "out"
    assert host.start("run", "--name", "apart", "--tee", "3", script(host, ORDER), out=out).wait(60) == 0
    assert host.argosy("logs", "apart", "--stream", "stderr").err.count(b"err ") == 500


RANK = RankId("main", 1)
FAILED = facts.IncidentTaken(at=1.0, incident="1", headline="rank 1 failed: exit code 3", failed=RANK, first=RANK)
RESTART = facts.Restarting(at=1.0, ranks=[0, 1], generation=1, cause="rank 1: exit code 3", failed=RANK)
STARTED = facts.RankStarted(at=2.0, rank=RankId("main", 0, 1), pid=7)
ENDED = facts.LaunchEnded(at=3.0, launch=1, code=3, reason="rank 1: exit code 3")


def lines(size: int, *told: facts.AnyFact) -> list[str]:
    teller = Teller(size)
    return [text for fact in told for text in teller.lines(fact)]


def test_a_failure_and_its_consequence_are_one_line():
    line = "rank 1 failed: exit code 3; restarting ranks 0-1 (generation 1)"
    assert lines(2, RESTART, FAILED, STARTED, RESTART, FAILED) == [line, line]
    gave_up = facts.GaveUp(at=1.0, reason="1 of 1 restarts are used", failed=RANK)
    assert lines(2, gave_up, FAILED, ENDED) == ["rank 1 failed: exit code 3; not restarted: 1 of 1 restarts are used"]


def test_a_restart_waits_for_its_own_failure():
    other = msgspec.structs.replace(FAILED, failed=RankId("main", 0), headline="rank 0 failed: exit code 4")
    assert lines(2, RESTART, other, FAILED) == [
        "rank 0 failed: exit code 4",
        "rank 1 failed: exit code 3; restarting ranks 0-1 (generation 1)",
    ]


def test_a_failure_without_a_consequence_is_told_unless_the_only_rank_says_it_itself():
    assert lines(2, FAILED, ENDED) == ["rank 1 failed: exit code 3"]
    assert lines(1, FAILED, ENDED) == []


def test_a_restart_without_evidence_is_told_when_it_happens_and_not_again():
    line = "rank 1 failed: exit code 3; restarting ranks 0-1 (generation 1)"
    exited = facts.RankExited(at=1.0, rank=RANK, pid=5, status=WaitStatus(code=3))
    assert lines(2, exited, RESTART, STARTED, FAILED, ENDED) == [line]
    assert lines(2, exited, RESTART, STARTED, FAILED, FAILED) == [line, "rank 1 failed: exit code 3"]
