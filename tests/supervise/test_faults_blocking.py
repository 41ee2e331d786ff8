"""What takes long for one run does not delay another: the agent's loop never waits."""

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, ranks, run_of


def replace_a_rank(host: Console, generation: int = 1) -> None:
    """Kill the rank of the run `other`, and wait until its replacement has begun."""
    os.kill(ranks(host, "other", generation - 1, count=1)[0].pid, signal.SIGKILL)
    said(host.cwd / f"runs/other/logs/1/0.{generation}.out", "ready")


@contextmanager
def other_run(host: Console) -> Iterator[None]:
    assert host.argosy("run", "-d", "--restart", "rank", "--name", "other", "waits.py").code == 0
    said(host.cwd / "runs/other/logs/1/0.0.out", "ready")
    yield
    (host.cwd / "go").touch()


def test_a_rank_is_replaced_while_the_stacks_of_another_run_are_being_taken(host: Console):
    assert host.argosy("run", "-d", "-n", "2", "--name", "mute", "waits.py").code == 0
    mute = [rank.pid for rank in ranks(host, "mute")]
    for pid in mute:  # Stopped, so that they do not answer for themselves.
        os.kill(pid, signal.SIGSTOP)
    with other_run(host):
        agent = daemon(host, "agent")

        def replaced_meanwhile(generation: int) -> bool:
            spy = 0
            while not spy:
                asking = host.start("stacks", "mute", out=host.cwd / "stacks")
                while asking.poll() is None and not (spy := stopped_spy(agent)):
                    pass
            replace_a_rank(host, generation)
            meanwhile = asking.poll() is None
            with suppress(ProcessLookupError):
                os.kill(spy, signal.SIGKILL)
            assert asking.wait(PATIENCE_S) == 0
            return meanwhile

        # On a busy machine a replacement may take longer than the agent waits for stacks.
        assert any(replaced_meanwhile(generation) for generation in (1, 2, 3))
        for pid in mute:
            os.kill(pid, signal.SIGCONT)


def stopped_spy(agent: int) -> int:
    """Stop a py-spy of the agent, which then never answers; 0 if there is none right now."""
    with suppress(OSError):
        for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split():
            if Path(f"/proc/{pid}/comm").read_text() == "py-spy\n":
                os.kill(int(pid), signal.SIGSTOP)
                return int(pid)
    return 0


@pytest.mark.system
def test_a_rank_is_replaced_while_the_logs_of_another_run_cannot_be_read(host: Console, tmp_path: Path):
    """A pipe that nobody writes to stands for a disk that hangs."""
    assert host.argosy("run", "-d", "--name", "hung", "waits.py", "3").code == 0
    rank = ranks(host, "hung", count=1)[0].pid
    log = tmp_path / "runs/hung/logs/1/0.0.err"
    said(log.with_suffix(".out"), "ready")
    log.unlink()
    os.mkfifo(log)
    with other_run(host):
        os.kill(rank, signal.SIGKILL)
        until(lambda: (run := run_of(host, "hung")) is not None and run.state == "ending", "the end of the rank")
        replace_a_rank(host)
        assert run_of(host, "hung") is not None
        log.open("wb").close()
        until(lambda: run_of(host, "hung") is None, "the end of the run")
    assert "rank 0 failed: killed by SIGKILL" in host.argosy("why", "hung").text


def test_a_rank_is_replaced_while_the_agent_finds_no_warden(host: Console):
    with other_run(host), (host.runtime / "warden.lock").open("rb") as lock:
        warden, agent = daemon(host, "warden"), daemon(host, "agent")
        os.kill(agent, signal.SIGSTOP)
        os.kill(warden, signal.SIGKILL)
        until(lambda: locked(lock.fileno()), "the lock of the warden")  # Another one leaves at once.
        os.kill(agent, signal.SIGCONT)
        replace_a_rank(host)
        fcntl.flock(lock, fcntl.LOCK_UN)
        until(lambda: daemon(host, "warden") != warden, "another warden")


def locked(lock: int) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
