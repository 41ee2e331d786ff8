"""Services, programs, and ranks of a script that call each other."""

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from console import PATIENCE_S, Console, free_port, until
from hands import Caller
from meshes import owner

import argosy
from argosy import Answers, Cluster, DeadlinePassed, LogLine, PeerLost, Tcp

SERVER = """
import os, socket, sys
listener = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening, pid", os.getpid(), flush=True)
while True:
    peer, _ = listener.accept()
    peer.sendall(b"hello")
    peer.close()
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with owner(tmp_path_factory.mktemp("owner")), argosy.local(show=False) as opened:
        yield opened


@pytest.fixture
def server(tmp_path: Path) -> list[str]:
    (tmp_path / "server.py").write_text(SERVER)
    return [sys.executable, str(tmp_path / "server.py"), str(free_port())]


def greet(port: int) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as sock:
        return sock.recv(5)


def pid_of(port: int) -> int:
    listening = [c for c in psutil.net_connections("tcp4") if c.status == "LISTEN" and c.laddr.port == port]
    return listening[0].pid or 0 if listening else 0


def test_a_service_is_ready_found_and_restarted(cluster: Cluster, server: list[str]):
    port = int(server[2])
    mesh = cluster.mesh(ranks=4, preload=[])
    service = mesh.service("judge", server, ready=Tcp(port))
    assert greet(port) == b"hello"
    assert mesh.spawn(Caller).look_up("judge").gather() == [port] * 4
    assert argosy.connect(mesh.name).find("judge").run == service.run
    first = pid_of(port)
    psutil.Process(first).kill()
    until(lambda: pid_of(port) not in (0, first), "the restarted service")
    service.wait_ready()
    assert service.events.wait("replaced").generation == 1
    mesh.stop()
    until(lambda: pid_of(port) == 0, "the end of the service")


@pytest.mark.parametrize("ready", [LogLine(r"^listening, pid \d+$"), None])
def test_other_kinds_of_readiness(cluster: Cluster, server: list[str], ready: LogLine | None):
    port = int(server[2])
    mesh = cluster.mesh(ranks=1, preload=[])
    service = mesh.service("other", server, ready=ready or Answers(lambda: greet(port) == b"hello"))
    assert service.is_ready()
    mesh.stop()


def test_an_unhealthy_service_is_replaced(cluster: Cluster, tmp_path: Path):
    """Its port closes while its process lives."""
    port = free_port()
    (tmp_path / "sick.py").write_text(
        "import os, socket, sys, time\n"
        "listener = socket.create_server(('127.0.0.1', int(sys.argv[1])))\n"
        "if os.environ['ARGOSY_GENERATION'] == '0':\n"
        "    while not os.path.exists(sys.argv[2]): time.sleep(0.01)\n"
        "    listener.close()\n"
        "time.sleep(600)\n"
    )
    mesh = cluster.mesh(ranks=1, preload=[])
    argv = [sys.executable, str(tmp_path / "sick.py"), str(port), str(tmp_path / "close")]
    service = mesh.service("sick", argv, ready=Tcp(port), health_s=0.1)
    (tmp_path / "close").touch()
    assert service.events.wait("replaced").generation == 1
    until(service.is_ready, "the healthy one")
    mesh.stop()


def test_a_service_that_never_gets_ready_is_told(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[])
    with pytest.raises(PeerLost, match="service broken is lost"):
        mesh.service("broken", [sys.executable, "-c", "raise SystemExit(3)"], ready=LogLine("never"))
    with pytest.raises(DeadlinePassed, match="service silent to be ready"):
        mesh.service("silent", ["sleep", "600"], ready=LogLine("never"), timeout_s=0.3)
    mesh.stop()


def test_programs_run_once_per_rank(cluster: Cluster):
    mesh = cluster.mesh(a=2, b=2, preload=[])
    good = mesh.exec([sys.executable, "-c", "import os; print('rank', os.environ['RANK'])"])
    assert good.wait(PATIENCE_S) == 0
    written = "".join(path.read_text() for path in sorted(Path(good.welcome.logs).glob("*.out")))
    assert written == "rank 0\nrank 1\nrank 2\nrank 3\n"
    assert mesh.slice(a=0, b=0).exec(["sh", "-c", "exit 7"]).wait(60) == 7
    sleeping = mesh.exec(["sleep", "600"])
    pids = [sleeping.events.wait("started", rank=rank) for rank in range(4)]
    assert len(pids) == 4
    with pytest.raises(DeadlinePassed):
        sleeping.wait(0.1)
    mesh.stop()
    assert sleeping.wait(0) != 0


def test_ranks_of_a_script_call_each_other(console: Console):
    (console.cwd / "ring.py").write_text(
        "import argosy\n"
        "class Box:\n"
        "    def __init__(self): self.got = []\n"
        "    def put(self, x): self.got.append(x); return len(self.got)\n"
        "box, me = Box(), argosy.here()\n"
        "argosy.serve('box', box)\n"
        "boxes = argosy.connect().actors('box')\n"
        "assert len(boxes) == me.size == 3\n"
        "me.barrier()\n"
        "boxes[(me.rank.index + 1) % 3].put(me.rank.index).get()\n"
        "me.barrier()\n"
        "print('got', box.got)\n"
    )
    ended = console.argosy("run", "-n", "3", "ring.py")
    assert ended.code == 0, ended.text
    assert sorted(line.split("got")[1] for line in ended.out.decode().splitlines()) == [" [0]", " [1]", " [2]"]


def test_a_mesh_is_seen_by_the_commands(console: Console):
    (console.cwd / "seen.py").write_text(
        "import argosy, os, signal, subprocess, sys\n"
        "with argosy.local() as cluster:\n"
        "    mesh = cluster.mesh(ranks=2, preload=[], name='seen', restart=argosy.Restart.rank())\n"
        "    mesh.run(print, 'a word').gather()\n"
        "    os.kill(mesh.run(os.getpid).gather()[1], signal.SIGKILL)\n"
        "    mesh.events.wait('replaced')\n"
        "    mesh.run(os.getpid).gather()\n"
        "    print(subprocess.run([sys.executable, '-m', 'argosy', 'ps'], capture_output=True, text=True).stdout)\n"
    )
    ended = console.run([sys.executable, "seen.py"])
    assert ended.code == 0, ended.text
    assert "seen" in ended.text
    assert "a word" in console.argosy("logs", "seen").text
    assert "SIGKILL" in console.argosy("why", "seen").text
