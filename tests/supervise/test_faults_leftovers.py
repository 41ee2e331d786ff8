"""Nothing outlives its place: zygotes whose warden was killed, and daemons whose directory was removed."""

import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until
from daemons import WAITS, daemon, gone, kill, look, ranks


@pytest.fixture
def desk(cold_console: Console) -> Console:
    """A terminal with daemons of its own, since they come to harm."""
    (cold_console.cwd / "waits.py").write_text(WAITS)
    return cold_console


@pytest.mark.system
def test_stop_all_ends_a_zygote_whose_warden_was_killed(desk: Console):
    assert desk.argosy("run", "-d", "--name", "first", "waits.py").code == 0
    zygote, warden = daemon(desk, "zygote"), daemon(desk, "warden")
    kill(warden)
    until(lambda: daemon(desk, "warden") != warden, "another warden")
    assert desk.argosy("stop", "--all").code == 0
    assert gone(zygote)


@pytest.mark.system
def test_stop_all_goes_on_when_the_warden_is_killed_and_only_a_zygote_is_left(desk: Console, tmp_path: Path):
    (desk.cwd / "go").touch()
    assert desk.argosy("run", "waits.py").code == 0
    warden, agent, zygote = (daemon(desk, what) for what in ("warden", "agent", "zygote"))
    os.kill(warden, signal.SIGSTOP)
    stop = desk.start("stop", "--all", out=tmp_path / "out")
    until(lambda: gone(agent), "the end of the agent")
    os.kill(warden, signal.SIGKILL)
    assert stop.wait(PATIENCE_S) == 0
    assert gone(zygote)


@pytest.mark.system
def test_a_detached_run_outlives_warden_zygote_and_agent_killed_one_after_another(desk: Console):
    assert desk.argosy("run", "-d", "-n", "2", "--name", "tough", "waits.py", "0", "6").code == 0
    before = [rank.pid for rank in ranks(desk, "tough")]
    for what in ("warden", "zygote", "agent", "warden"):
        pid = daemon(desk, what)
        kill(pid)
        until(lambda pid=pid, what=what: what == "zygote" or daemon(desk, what) != pid, f"another {what}")
        assert [rank.pid for rank in ranks(desk, "tough")] == before
    (desk.cwd / "go").touch()
    until(lambda: desk.ps("tough")["state"] == "ended", "the end of the run")
    assert desk.ps("tough")["code"] == 6


@pytest.mark.system
def test_a_run_of_which_nobody_lives_is_lost_and_one_between_two_agents_is_not(desk: Console):
    assert desk.argosy("run", "-d", "--name", "lost", "waits.py").code == 0
    pids = [rank.pid for rank in ranks(desk, "lost", count=1)]
    daemons = [daemon(desk, what) for what in ("warden", "zygote", "agent")]
    for number in (signal.SIGSTOP, signal.SIGKILL):  # Stopped first, so that none replaces another.
        for pid in daemons:
            os.kill(pid, number)
    until(lambda: all(gone(pid) for pid in (*pids, *daemons)), "the end of the rank")
    assert desk.ps("lost")["state"] == "lost"
    assert "lost: 1 rank" in desk.argosy("why", "lost").text

    assert desk.argosy("run", "-d", "-n", "2", "--name", "between", "waits.py").code == 0
    pids = [rank.pid for rank in ranks(desk, "between")]
    warden, agent = daemon(desk, "warden"), daemon(desk, "agent")
    os.kill(warden, signal.SIGSTOP)  # Nobody starts the next agent meanwhile.
    try:
        kill(agent)
        seen, why = desk.ps("between"), desk.argosy("why", "between").text
    finally:
        os.kill(warden, signal.SIGCONT)
    assert seen["state"] == "running, its supervisor is being replaced"
    assert [rank["pid"] for rank in seen["ranks"]] == pids
    assert "running: 2 ranks" in why
    assert "its supervisor is being replaced" in why


def test_a_run_whose_runtime_directory_is_removed_ends_and_says_so(desk: Console):
    assert desk.argosy("run", "-d", "-n", "2", "--name", "homeless", "waits.py").code == 0
    said(desk.cwd / "runs/homeless/logs/1/1.0.out", "ready")
    pids = [rank.pid for rank in ranks(desk, "homeless")] + [each.pid for each in look(desk).daemons]
    remove_runtime(desk)
    until(lambda: all(gone(pid) for pid in pids), "the end of ranks and daemons")
    assert not desk.segments.exists()
    why = desk.argosy("why", "homeless").text
    assert "stopped by the removal of Argosy's runtime directory" in why
    assert why.count("stop requested") == 1, "a second request ends the grace"


@pytest.mark.system
def test_daemons_whose_directory_is_removed_leave_the_next_ones_alone(desk: Console):
    assert desk.argosy("run", "-d", "--name", "old", "--", "python3", "waits.py").code == 0
    old = [rank.pid for rank in ranks(desk, "old", count=1)] + [each.pid for each in look(desk).daemons]
    stopped = [each.pid for each in look(desk).daemons]
    for pid in stopped:  # They do not see it before others have the directory.
        os.kill(pid, signal.SIGSTOP)
    remove_runtime(desk)
    assert desk.argosy("run", "-d", "--name", "new", "waits.py").code == 0
    new = [rank.pid for rank in ranks(desk, "new", count=1)]
    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    until(lambda: all(gone(pid) for pid in old), "the end of the old ones")
    time.sleep(0.5)
    assert [rank.pid for rank in ranks(desk, "new", count=1)] == new
    assert desk.argosy("stop", "new").code == 0


def remove_runtime(desk: Console) -> None:
    """As `rm -rf` does it, again where a daemon has just made a file."""
    until(lambda: shutil.rmtree(desk.runtime, ignore_errors=True) or not desk.runtime.exists(), "an empty directory")


@pytest.mark.parametrize(
    "first",
    [
        pytest.param("warden", marks=pytest.mark.soak),  # Now and then it leaves an empty cgroup.
        pytest.param("agent", marks=pytest.mark.system),
    ],
)
def test_with_the_directory_removed_and_a_daemon_killed_nothing_is_left(desk: Console, first: str):
    assert desk.argosy("run", "-d", "-n", "2", "--name", "both", "waits.py").code == 0
    pids = [rank.pid for rank in ranks(desk, "both")] + [each.pid for each in look(desk).daemons]
    victim = daemon(desk, first)
    remove_runtime(desk)
    os.kill(victim, signal.SIGKILL)
    until(lambda: all(gone(pid) for pid in pids), "the end of ranks and daemons")
