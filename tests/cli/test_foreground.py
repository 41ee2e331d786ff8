"""A client that shows a run until it ends."""

import socket
import time
from pathlib import Path

from argosy.cli.foreground import Foreground
from argosy.control.facts import LaunchEnded
from argosy.fabric import Link
from argosy.supervise.messages import Happened, Welcome, to_agent, to_client


def test_a_run_that_ends_before_its_client_has_read_the_welcome_is_seen_to_end(tmp_path: Path):
    """All of it arrives together: nothing more will come to wake the client."""
    ends = socket.socketpair()
    agent, client = Link(ends[0], to_agent, "the client"), Link(ends[1], to_client, "the agent")
    welcome = Welcome("r", str(tmp_path), 1, str(tmp_path), 1)
    agent.send(welcome)
    agent.send(Happened("r", LaunchEnded(at=time.time(), launch=1, code=7, reason="rank 0: exit code 7")))
    answer, _ = client.wait(10.0)
    assert answer == welcome
    assert client.has_messages
    assert Foreground(client, welcome, [()]).run() == 7
    client.close()
    agent.close()
