"""A client that shows a run until it ends."""

import socket
import time
from pathlib import Path

import pytest
from console import PATIENCE_S, Console

from argosy.cli.foreground import Foreground
from argosy.control.facts import LaunchEnded
from argosy.core import DeadlinePassed
from argosy.fabric import Link
from argosy.supervise import ListRuns, ask
from argosy.supervise.messages import Happened, Welcome, to_agent, to_client


def test_a_run_that_ends_before_its_client_has_read_the_welcome_is_seen_to_end(tmp_path: Path):
    """All of it arrives together: nothing more will come to wake the client."""
    ends = socket.socketpair()
    agent, client = Link(ends[0], to_agent, "the client"), Link(ends[1], to_client, "the agent")
    welcome = Welcome("r", str(tmp_path), 1, str(tmp_path), 1)
    agent.send(welcome)
    agent.send(Happened("r", LaunchEnded(at=time.time(), launch=1, code=7, reason="rank 0: exit code 7")))
    answer, _ = client.wait(PATIENCE_S)
    assert answer == welcome
    assert client.has_messages
    assert Foreground(client, welcome, [()]).run() == 7
    client.close()
    agent.close()


def test_a_restart_of_the_only_rank_is_reported_also_in_a_pipe(console: Console):
    (console.cwd / "bad.py").write_text("raise SystemExit(3)")
    done = console.argosy("run", "--max-restarts", "1", "--name", "bad", "bad.py")
    assert done.code == 3
    assert "restarting rank 0" in done.text
    assert "bad ended with exit code 3; see `argosy why bad`" in done.text
    plain = console.argosy("run", "bad.py")
    said = [line for line in plain.text.splitlines() if "importing packages" not in line]  # On a busy machine.
    assert (plain.code, said) == (3, []), "without a restart it is as silent as python"


def test_an_agent_that_does_not_answer_is_reported_before_the_deadline(capsys: pytest.CaptureFixture[str]):
    ends = socket.socketpair()
    with ends[1]:
        client = Link(ends[0], to_client, "the agent")
        with pytest.raises(DeadlinePassed):
            ask(client, ListRuns(), timeout_s=5.1)
        client.close()
    assert "the agent has not answered for 5 s" in capsys.readouterr().err
