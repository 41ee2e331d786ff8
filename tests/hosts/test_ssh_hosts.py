"""A run over hosts that the system's OpenSSH reaches: a real sshd of this machine, under two names."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, until
from hosts.fleet import SCRIPTS

pytest.importorskip("cryptography")
pytestmark = pytest.mark.system
SERVER = """
Port {port}
ListenAddress 127.0.0.1
HostKey {place}/host
AuthorizedKeysFile {place}/client.pub
StrictModes no
UsePAM no
PidFile none
"""
CLIENT = """
Host node1 node2
  HostName 127.0.0.1
  Port {port}
  IdentityFile {place}/client
  StrictHostKeyChecking no
  UserKnownHostsFile /dev/null
  LogLevel ERROR
"""


@pytest.fixture
def reachable(cold_console: Console, tmp_path: Path) -> Iterator[Console]:
    """A console whose `ssh` knows node1 and node2."""
    sshd = shutil.which("sshd", path="/usr/sbin:/usr/bin")
    if sshd is None or os.geteuid() != 0:
        pytest.skip("a real sshd needs root and the package openssh-server")
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    for name in ("host", "client"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / name], check=True)
    (tmp_path / "server").write_text(SERVER.format(port=port, place=tmp_path))
    (tmp_path / "config").write_text(CLIENT.format(port=port, place=tmp_path))
    wrapper = tmp_path / "bin/ssh"
    wrapper.parent.mkdir()
    wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {tmp_path}/config "$@"\n')
    wrapper.chmod(0o755)
    cold_console.env["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"
    log = tmp_path / "log"
    log.touch()
    server = subprocess.Popen([sshd, "-D", "-f", str(tmp_path / "server"), "-E", str(log)])
    try:
        until(lambda: "listening" in log.read_text(), "an sshd")
        yield cold_console
    finally:
        server.terminate()
        server.wait(30)


def test_ranks_on_hosts_that_ssh_reaches_have_their_places_and_their_group(reachable: Console):
    ended = reachable.argosy("run", "--on", "ssh:node1,node2", "--name", "over", "-n", "1", str(SCRIPTS / "sums.py"))
    assert ended.code == 0, ended.text
    places = sorted(line.split("place ")[1] for line in ended.text.splitlines() if "place " in line)
    assert places == ["0 0 0 2 1 2 sum 3", "1 0 1 2 1 2 sum 3"], ended.text


def test_a_host_that_ssh_cannot_reach_is_named(reachable: Console):
    ended = reachable.argosy("run", "--on", "ssh:node1,nowhere.invalid", "-n", "1", "--", "true")
    assert ended.code != 0
    assert "nowhere.invalid" in ended.text
