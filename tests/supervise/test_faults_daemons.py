"""The daemons can be killed at any moment: no rank dies of it, and no exit code is lost."""

import os
import signal
from pathlib import Path

import psutil
import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, gone, kill, look, pause, ranks, run_of

from argosy.supervise.messages import RunInfo


def go(console: Console) -> None:
    (console.cwd / "go").touch()


def test_after_the_agent_is_killed_twice_the_client_shows_the_rest_and_the_exit_code(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "agent", "waits.py", "0", "7", out=out)
    said(out, r"rank 1 ready")
    before = {rank.pid for rank in ranks(host, "agent")}
    for _ in range(2):
        killed = daemon(host, "agent")
        kill(killed)
        assert daemon(host, "agent") != killed
    assert {rank.pid for rank in ranks(host, "agent")} == before
    go(host)
    assert client.wait(PATIENCE_S) == 7
    text = out.read_text()
    assert "rank 0 goes" in text
    assert "rank 1 goes" in text


def test_the_output_of_a_rank_that_starts_while_the_client_has_no_agent_is_shown(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--restart", "rank", "--name", "unseen", "waits.py", out=out)
    said(out, r"rank 1 ready")
    client.send_signal(signal.SIGSTOP)
    os.kill(ranks(host, "unseen")[1].pid, signal.SIGKILL)
    kill(daemon(host, "agent"))
    said(tmp_path / "runs/unseen/logs/1/1.1.out", "rank 1 ready")
    ranks(host, "unseen", generation=1, count=1)
    client.send_signal(signal.SIGCONT)
    said(out, r"rank 1 ready, generation 1")
    go(host)
    assert client.wait(PATIENCE_S) == 0


def test_a_warm_zygote_outlives_an_agent_that_is_killed_while_nothing_runs(host: Console):
    go(host)
    assert host.argosy("run", "waits.py").code == 0
    warm, agent = zygotes(host), daemon(host, "agent")
    assert warm
    kill(agent)
    assert daemon(host, "agent") != agent
    until(lambda: zygotes(host) == warm, "the zygotes of before")
    assert host.argosy("run", "waits.py").code == 0
    assert zygotes(host) == warm


def zygotes(console: Console) -> set[int]:
    return {daemon.pid for daemon in look(console).daemons if daemon.what == "zygote"}


@pytest.mark.parametrize("words", [["waits.py"], ["--", "python3", "waits.py"]], ids=["forked", "executed"])
def test_an_exit_that_falls_into_the_gap_between_two_agents_is_seen(host: Console, tmp_path: Path, words: list[str]):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "gap", *words, "0", "9", out=out)
    said(out, r"rank 1 ready")
    agent, warden = daemon(host, "agent"), daemon(host, "warden")
    os.kill(warden, signal.SIGSTOP)  # No new agent comes up until the ranks are gone.
    pids = [rank.pid for rank in ranks(host, "gap")]
    os.kill(agent, signal.SIGKILL)
    go(host)
    until(lambda: all(gone(pid) for pid in pids), "the end of the ranks")
    os.kill(warden, signal.SIGCONT)
    assert client.wait(PATIENCE_S) == 9


@pytest.mark.system
@pytest.mark.parametrize("words", [["waits.py"], ["--", "python3", "waits.py"]], ids=["forked", "executed"])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_an_agent_killed_while_ranks_start_starts_each_once(
    host: Console, tmp_path: Path, words: list[str], delay_s: float
):
    daemon(host, "agent") if (host.runtime / "agent.sock").exists() else host.argosy("run", "--", "true")
    out = tmp_path / "out"
    client = host.start("run", "-n", "4", "--name", "starts", *words, "0", "0", "0", "5", out=out)
    until(lambda: run_of(host, "starts"), "the run")
    pause(delay_s)
    kill(daemon(host, "agent"))
    ranks(host, "starts", count=4)
    logs = tmp_path / "runs" / "starts" / "logs" / "1"
    for rank in range(4):
        said(logs / f"{rank}.0.out", f"rank {rank} ready")
    until(lambda: sum(pid.isdecimal() and is_rank(pid, host) for pid in os.listdir("/proc")) == 4, "four ranks")
    go(host)
    assert client.wait(PATIENCE_S) == 5
    for rank in range(4):
        assert (logs / f"{rank}.0.out").read_text().count("goes") == 1


def is_rank(pid: str, console: Console) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        return (
            b"waits.py" in words
            and b"argosy run" not in words
            and b"-m\0argosy" not in words
            and os.readlink(f"/proc/{pid}/cwd") == str(console.cwd)
        )
    except OSError:
        return False


def test_an_agent_killed_during_a_restart_carries_it_on(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--max-restarts", "2", "--name", "again", "waits.py", out=out)
    said(out, r"rank 1 ready")
    first = ranks(host, "again")
    os.kill(first[1].pid, signal.SIGKILL)
    kill(daemon(host, "agent"))
    assert {rank.generation for rank in ranks(host, "again", generation=1)} == {1}
    go(host)
    assert client.wait(PATIENCE_S) == 0
    assert gone(first[0].pid)


def test_a_killed_zygote_takes_no_rank_along_and_its_ranks_exits_are_seen(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "orphans", "waits.py", "0", "6", out=out)
    said(out, r"rank 1 ready")
    before = {rank.pid for rank in ranks(host, "orphans")}
    kill(daemon(host, "zygote"))
    pause()
    assert {rank.pid for rank in ranks(host, "orphans")} == before
    go(host)
    assert client.wait(PATIENCE_S) == 6


@pytest.mark.system
@pytest.mark.parametrize("also", ["", "agent"])
def test_a_zygote_killed_while_it_forks_leaves_no_second_life_of_a_rank(host: Console, tmp_path: Path, also: str):
    """It tells of its ranks in batches of 16: nobody knows of those that it has forked."""
    out, count = tmp_path / "out", 14
    assert host.argosy("run", "-d", "-n", "2", "--name", "warm", "waits.py").code == 0
    zygote = psutil.Process(psutil.Process(ranks(host, "warm")[0].pid).ppid())
    go(host)
    until(lambda: not run_of(host, "warm") and not zygote.children(), "a zygote without ranks")
    (tmp_path / "go").unlink()
    client = host.start("run", "-n", str(count), "--name", "unseen", "waits.py", out=out)
    until(lambda: len(zygote.children()) >= 2, "the first ranks")
    for pid in [zygote.pid, *([agent_pid(host)] if also else [])]:
        os.kill(pid, signal.SIGKILL)
    ranks(host, "unseen", count=count)
    for rank in range(count):
        said(tmp_path / f"runs/unseen/logs/1/{rank}.0.out", f"rank {rank} ready")
    alive = {rank.pid for rank in ranks(host, "unseen", count=count)}
    until(
        lambda: {int(pid) for pid in os.listdir("/proc") if pid.isdecimal() and is_rank(pid, host)} == alive, "one life"
    )
    go(host)
    assert client.wait(PATIENCE_S) == 0


def test_after_a_killed_zygote_restarts_get_a_new_one(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--restart", "rank", "--name", "renewed", "waits.py", out=out)
    said(out, r"rank 1 ready")
    killed = daemon(host, "zygote")
    kill(killed)
    old = ranks(host, "renewed")
    os.kill(old[1].pid, signal.SIGKILL)
    said(out, r"rank 1 ready, generation 1")
    new = ranks(host, "renewed")
    assert new[0].pid == old[0].pid
    assert new[1].generation == 1
    assert daemon(host, "zygote") != killed
    go(host)
    assert client.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("words", [["waits.py"], ["--", "python3", "waits.py"]], ids=["forked", "executed"])
def test_a_killed_warden_is_replaced_and_everything_else_lives(host: Console, tmp_path: Path, words: list[str]):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "wardens", *words, "0", "8", out=out)
    said(out, r"rank 1 ready")
    before = {rank.pid for rank in ranks(host, "wardens")}
    warden, agent = daemon(host, "warden"), daemon(host, "agent")
    kill(warden)
    until(lambda: daemon(host, "warden") != warden, "another warden")
    pause()
    assert daemon(host, "agent") == agent
    assert {rank.pid for rank in ranks(host, "wardens")} == before
    go(host)
    assert client.wait(PATIENCE_S) == 8


def test_with_agent_and_warden_killed_at_once_the_run_goes_on(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "both", "waits.py", "0", "4", out=out)
    said(out, r"rank 1 ready")
    before = {rank.pid for rank in ranks(host, "both")}
    warden, agent = daemon(host, "warden"), daemon(host, "agent")
    os.kill(warden, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    until(lambda: gone(warden) and gone(agent), "both gone")
    assert {rank.pid for rank in ranks(host, "both")} == before
    go(host)
    assert client.wait(PATIENCE_S) == 4


def test_a_detached_run_outlives_agent_and_warden_killed_at_once(host: Console, tmp_path: Path):
    assert host.argosy("run", "-d", "-n", "2", "--max-restarts", "1", "--name", "alone", "waits.py").code == 0
    before = ranks(host, "alone")
    for what in ("warden", "agent"):
        os.kill(daemon(host, what) if what == "warden" else agent_pid(host), signal.SIGKILL)
    assert {rank.pid for rank in ranks(host, "alone")} == {rank.pid for rank in before}
    os.kill(before[0].pid, signal.SIGKILL)  # Its replacement has the environment of the first.
    said(tmp_path / "runs/alone/logs/1/0.1.out", "rank 0 ready, generation 1")
    go(host)
    until(lambda: not run_of(host, "alone"), "the end of the run")


def agent_pid(console: Console) -> int:
    return next(daemon.pid for daemon in look(console).daemons if daemon.what == "agent")


@pytest.mark.system
def test_when_all_supervisors_are_gone_the_kernel_ends_the_ranks_and_their_groups(cold_console: Console):
    console = cold_console
    (console.cwd / "family.py").write_text(
        "import subprocess, sys, time\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print('child', child.pid, flush=True)\ntime.sleep(600)\n"
    )
    assert console.argosy("run", "-d", "-n", "2", "--name", "lifeline", "family.py").code == 0
    logs = console.cwd / "runs/lifeline/logs/1"
    children = [int(said(logs / f"{rank}.0.out", r"child (\d+)")[1]) for rank in range(2)]
    pids = [rank.pid for rank in ranks(console, "lifeline")]
    supervisors = [daemon(console, what) for what in ("warden", "zygote", "agent")]
    for pid in supervisors:
        os.kill(pid, signal.SIGKILL)
    until(lambda: all(gone(pid) for pid in (*pids, *children)), "the end of the ranks")


@pytest.mark.system
@pytest.mark.parametrize("words", [["fails.py"], ["--", "python3", "fails.py"]], ids=["forked", "executed"])
def test_with_all_daemons_killed_between_two_tries_the_run_ends_and_says_why(host: Console, words: list[str]):
    (host.cwd / "fails.py").write_text("raise SystemExit(3)")
    for attempt in range(10):  # The moment between two tries is a second long at most: it may be missed.
        name = f"tries{attempt}"
        assert host.argosy("run", "-d", "--name", name, "--max-restarts", "3", *words).code == 0
        kinds = ("warden", "agent", "zygote") if words[0] != "--" else ("warden", "agent")
        pids = [daemon(host, what) for what in kinds]
        until(lambda name=name: between_tries(run_of(host, name)), "the time between two tries")
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        until(lambda pids=pids: all(gone(pid) for pid in pids), "the end of the daemons")
        assert host.argosy("run", "--", "true").code == 0  # Brings new ones.
        until(lambda name=name: run_of(host, name) is None, "the end of the run")
        if "environment was lost" in host.argosy("why", name).text:
            return
    raise AssertionError("the moment was missed ten times")


def between_tries(run: RunInfo | None) -> bool:
    return run is None or (run.state.startswith("restarting") and run.ranks[0].generation >= 1)
