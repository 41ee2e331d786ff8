"""What cannot work is refused in a line or two, without a traceback through Argosy and without leaving anything."""

import os
import resource
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, Ended, said, until
from daemons import daemon, look, ranks

ROOT = os.getuid() == 0
needs_root = pytest.mark.skipif(not ROOT, reason="only root can mount, or become somebody else")


def is_clear(ended: Ended, *words: str) -> None:
    """It failed, said why, and showed no frame of Argosy's."""
    assert ended.code != 0
    for word in words:
        assert word in ended.text
    assert "argosy/supervise" not in ended.text
    assert "argosy/cli" not in ended.text
    assert "Traceback" not in ended.text


@pytest.mark.parametrize(
    ("words", "said_"),
    [
        (["nope.py"], "does not exist: nope.py"),
        (["."], "is a directory: ."),
        (["--nope", "waits.py"], "No such option"),
        (["-n", "0", "waits.py"], "must be positive"),
        (["-n", "x", "waits.py"], "-n must be a number"),
        (["-n", "-3", "waits.py"], "the number of ranks must be positive: -3"),
        (["--restart", "sometimes", "waits.py"], "no such restart policy"),
        (["--restart", "group:pp", "waits.py"], "no such dimension: 'pp'"),
        (["--nnodes", "2", "waits.py"], "--nnodes needs --dir"),
        (["--mesh", "dp=", "waits.py"], "--mesh must look like"),
        (["--secret", "NOT_THERE", "waits.py"], "not in the environment"),
        (["--secret", "RANK=waits.py", "waits.py"], "not a name for a secret: 'RANK'"),
        (["--", "no-such-program"], "no such program"),
        (["--name", "a/b", "waits.py"], "not a name for a run"),
        (["--name", "leftovers", "waits.py"], "not a name for a run"),
        (["--dir", "x/last", "waits.py"], "not a name for a run"),
        (["--", "/etc/passwd"], "the program is not executable: /etc/passwd"),
        (["--", "/etc/"], "the program is a directory: /etc/"),
        (["--log-dir", "/proc/nope", "waits.py"], "cannot be used"),
        (["--dir", "/proc/nope", "waits.py"], "cannot be used"),
        (["waits.py", os.fsdecode(b"\xfe")], "not UTF-8: b'\\xfe'"),
        (["--master-addr", "203.0.113.9", "waits.py"], "cannot listen"),
    ],
)
def test_a_command_that_cannot_work_is_refused(host: Console, words: list[str], said_: str):
    before = sorted(host.cwd.rglob("*"))
    is_clear(host.argosy("run", *words), said_)
    if "cannot listen" not in said_:  # That one was a run, with logs of its own.
        assert sorted(host.cwd.rglob("*")) == before


@pytest.mark.system
def test_a_name_that_two_runs_have_must_be_told_apart(host: Console):
    (host.cwd / "go").touch()
    for place in ("one", "two"):
        assert host.argosy("run", "--dir", f"{place}/same", "waits.py").code == 0
    is_clear(host.argosy("why", "same"), "2 runs are called 'same'", "one/same", "two/same")
    assert host.argosy("why", "one/same").code == 0
    assert f"{host.cwd}/two/same" in host.argosy("ps", "--all").text
    near = replace(host, cwd=host.cwd / "two")
    assert near.argosy("logs", "same").code == 0


@needs_root
def test_a_runtime_directory_of_somebody_else_is_no_empty_listing(host: Console, tmp_path: Path):
    (tmp_path / "r").mkdir()
    os.chown(tmp_path / "r", 65534, 65534)
    is_clear(host.argosy("ps", env={"ARGOSY_RUNTIME_DIR": str(tmp_path / "r")}), "the runtime directory is not yours")


def test_a_module_that_does_not_exist_is_refused_as_python_does(host: Console):
    ended = host.argosy("run", "-m", "no_such_module")
    assert ended.code == 1
    assert "No module named no_such_module" in ended.text
    assert "src/argosy/" not in ended.text


def test_an_error_inside_argosy_shows_where(host: Console):
    """The frames between the script and the user's code stay hidden."""
    (host.cwd / "s.py").write_text("from argosy.core import format_ranks\nformat_ranks(5)\n")
    ended = host.argosy("run", "s.py")
    assert ended.code == 1
    assert "src/argosy/core/" in ended.text
    assert "src/argosy/supervise" not in ended.text


def test_a_syntax_error_is_shown_as_python_shows_it(host: Console):
    (host.cwd / "s.py").write_text("def f(:\n")
    ended = host.argosy("run", "-n", "2", "s.py")
    assert ended.code == 1
    assert "SyntaxError" in ended.text
    assert "src/argosy/" not in ended.text


def test_a_program_that_cannot_be_executed_says_why(host: Console):
    program = host.cwd / "tool"
    program.write_text("no program at all")
    program.chmod(0o755)
    ended = host.argosy("run", "--", str(program))
    assert ended.code == 127
    assert "Exec format error" in ended.text
    assert "Traceback" not in ended.text


@needs_root
def test_a_script_that_cannot_be_read_is_refused(host: Console, tmp_path: Path):
    """As a user who may not."""
    secret = tmp_path / "mine.py"
    secret.touch(mode=0o600)
    program = (
        "import os, sys\nos.setuid(65534)\n"
        "from argosy.cli.launch_builder import check_target\nfrom argosy.core import ConfigError\n"
        "try: check_target('script', sys.argv[1])\n"
        "except ConfigError as error: print(error)\n"
    )
    for directory in [tmp_path, *tmp_path.parents]:
        if str(directory) not in ("/", "/tmp") and directory.stat().st_uid == 0:
            directory.chmod(directory.stat().st_mode | 0o011)
    ended = host.run([sys.executable, "-c", "import argosy.cli.launch_builder\n" + program, str(secret)])
    assert "cannot be read" in ended.text


@pytest.mark.system
def test_a_second_launch_into_a_directory_is_refused(host: Console):
    assert host.argosy("run", "-d", "--dir", "here", "waits.py").code == 0
    is_clear(host.argosy("run", "--dir", "here", "waits.py"), "another launch works on this directory", "argosy stop")
    assert len(ranks(host, "here", count=1)) == 1
    (host.cwd / "go").touch()
    until(lambda: not look(host).runs, "the end")
    assert host.argosy("run", "--dir", "here", "waits.py").code == 0


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[Path]:
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)], check=True)
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    if not ROOT or shutil.which("mount") is None:
        pytest.skip("only root can mount a small disk")
    try:
        with small_disk(tmp_path / "disk", "1m") as path:
            yield path
    except subprocess.CalledProcessError:
        pytest.skip("mounting is not allowed here")


def test_no_space_for_the_runs_directory_is_refused(host: Console, disk: Path):
    ballast = os.open(disk / "ballast", os.O_WRONLY | os.O_CREAT)
    with suppress(OSError):
        while os.write(ballast, bytes(4096)):
            pass
    os.close(ballast)
    ended = host.argosy("run", "--dir", str(disk / "run"), "waits.py")
    is_clear(ended, "No space left on device")


def test_a_disk_without_room_for_a_line_is_reported(host: Console, disk: Path):
    (disk / "ballast").write_bytes(bytes((1 << 20) - (40 << 10)))
    (host.cwd / "s.py").write_text("print('x' * 65536)\n")
    ended = host.argosy("run", "--dir", str(disk / "run"), "s.py")
    assert ended.code == 0
    assert "the disk is full, output is lost" in ended.text


def test_launches_of_one_second_have_names_of_their_own(host: Console):
    (host.cwd / "go").touch()
    clients = [host.start("run", "waits.py", out=host.cwd / f"out{number}") for number in range(5)]
    assert [client.wait(PATIENCE_S) for client in clients] == [0] * 5
    assert len([*(host.cwd / "runs").glob("waits-*")]) == 5


def test_a_working_directory_that_was_removed_is_named(host: Console):
    words = f"mkdir gone; cd gone; rmdir ../gone; exec {host.python} -m argosy run {host.cwd}/waits.py"
    is_clear(host.run(["bash", "-c", words]), "the working directory cannot be used: No such file or directory")


def test_few_descriptors_are_enough_for_a_rank(cold_console: Console):
    (cold_console.cwd / "s.py").write_text("print('alive')\n")
    words = f"ulimit -n 100; exec {cold_console.python} -m argosy run s.py"
    ended = cold_console.run(["bash", "-c", words])
    assert (ended.code, "alive" in ended.text) == (0, True), ended.text


def test_a_disk_that_fills_up_does_not_end_the_run_and_is_reported(host: Console, disk: Path, tmp_path: Path):
    (host.cwd / "s.py").write_text(
        "import time\nfor _ in range(40):\n    print('x' * 65536, flush=True)\n    time.sleep(0.05)\n"
        "time.sleep(3)\nopen('survived', 'w').close()\n"
    )
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "-r", "3", "--dir", str(disk / "run"), "s.py", out=out)
    said(out, "the disk is full, output is lost")
    assert client.wait(PATIENCE_S) == 0
    assert (host.cwd / "survived").exists()


def limited(console: Console, *words: str, files: int) -> Ended:
    """Run argosy with few descriptors."""
    program = (
        "import os, resource, sys\n"
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}))\n"
        "os.execv(sys.executable, [sys.executable, '-m', 'argosy', *sys.argv[1:]])\n"
    )
    return console.run([sys.executable, "-c", program, *words])


@pytest.mark.system
def test_a_client_without_descriptors_fails_clearly(host: Console):
    (host.cwd / "go").touch()
    tries = [limited(host, "run", "-n", "2", "waits.py", files=files) for files in range(3, 10)]
    assert tries[0].code != 0
    assert any("argosy: Too many open files" in ended.text for ended in tries)
    for ended in tries:
        assert ended.code == 0 or "argosy/supervise" not in ended.text, ended.text


@pytest.mark.system
def test_an_agent_without_descriptors_refuses_and_recovers(host: Console):
    agent = daemon(host, "agent")
    (host.cwd / "go").touch()
    taken = {int(name) for name in os.listdir(f"/proc/{agent}/fd")}
    free = next(number for number in range(len(taken) + 1) if number not in taken)
    soft, hard = resource.prlimit(agent, resource.RLIMIT_NOFILE)
    resource.prlimit(agent, resource.RLIMIT_NOFILE, (free + 1, hard))  # For one more, no run can do with that.
    try:
        is_clear(host.argosy("run", "-n", "2", "waits.py"))
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (free, hard))
        is_clear(host.argosy("run", "-n", "2", "waits.py"))
    finally:
        resource.prlimit(agent, resource.RLIMIT_NOFILE, (soft, hard))
    assert host.argosy("run", "-n", "2", "waits.py").code == 0
    assert daemon(host, "agent") == agent


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100_000,
    struct.pack("<II", 5, 0) + b"\xc1" * 5,
    struct.pack("<II", 1 << 30, 0),
    struct.pack("<II", 100, 3) + b"half",
    b"\x01",
    struct.pack("<II", 14, 0) + b"\x81\xa4type\xa8Surprise"[:14],
]


@pytest.mark.parametrize("name", ["agent", "warden"])
def test_garbage_on_a_socket_is_refused_logged_and_harms_nobody(host: Console, name: str):
    assert host.argosy("run", "-d", "--name", "calm", "waits.py").code == 0
    before = ranks(host, "calm", count=1)[0].pid
    daemons = {what: daemon(host, what) for what in ("agent", "warden")}
    peers: list[socket.socket] = []
    for garbage in GARBAGE:
        peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        peer.settimeout(30.0)
        peer.connect(str(host.runtime / f"{name}.sock"))
        peer.sendall(garbage)
        peers.append(peer)
    assert peers[0].recv(1) == b""  # Refused.
    said(host.runtime / f"{name}.out", "dropped pid")
    assert {what: daemon(host, what) for what in daemons} == daemons
    for peer in peers:
        peer.close()
    assert ranks(host, "calm", count=1)[0].pid == before
    (host.cwd / "go").touch()


@needs_root
def test_another_user_cannot_reach_the_sockets(host: Console):
    program = (
        "import os, socket, sys\nos.setuid(65534)\n"
        "try: socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError: print('refused')\n"
    )
    for name in ("agent", "warden"):
        ended = host.run([sys.executable, "-c", program, str(host.runtime / f"{name}.sock")])
        assert ended.text == "refused\n"
    assert host.runtime.stat().st_mode & 0o777 == 0o700


SECRET = "swordfish-5e1f-0042"


def test_a_secret_is_written_nowhere(host: Console, tmp_path: Path):
    (tmp_path / "token").write_text(SECRET + "-from-file\n")
    (host.cwd / "s.py").write_text(
        "import os, sys, time\n"
        f"assert os.environ['TOKEN'] == {SECRET[:9]!r} + {SECRET[9:]!r}\n"
        f"assert os.environ['FILED'].startswith({SECRET[:9]!r})\n"
        "print('has them', flush=True)\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "raise RuntimeError('crashed')\n"
    )
    home = replace(host, env={**host.env, "TOKEN": SECRET})
    words = ["--secret", "TOKEN", "--secret", f"FILED={tmp_path / 'token'}"]
    assert home.argosy("run", "-d", "-n", "2", "--name", "quiet", *words, "s.py").code == 0
    (tmp_path / "token").unlink()
    said(tmp_path / "runs/quiet/logs/1/1.0.out", "has them")
    pids = {rank.pid for rank in ranks(host, "quiet")}
    assert holders_of_secret(pids) == []
    assert files_with_secret(host.runtime, tmp_path, host.runtime.parent) == []
    (host.cwd / "go").touch()
    until(lambda: not look(host).runs, "the end")
    assert list((tmp_path / "runs/quiet/incidents").iterdir())
    assert files_with_secret(host.runtime, tmp_path, host.runtime.parent) == []
    assert SECRET not in host.argosy("why", "quiet").text


def holders_of_secret(spared: set[int]) -> list[str]:
    """Processes that show it in their arguments or, but for the ranks and ourselves, in their environment."""
    found: list[str] = []
    for pid in [int(name) for name in os.listdir("/proc") if name.isdecimal()]:
        for what in ("cmdline", "environ"):
            try:
                content = Path(f"/proc/{pid}/{what}").read_bytes()
            except OSError:
                continue
            if SECRET.encode() in content and not (what == "environ" and pid in spared):
                found.append(f"{pid} {what}")
    return found


def files_with_secret(*directories: Path) -> list[str]:
    found: list[str] = []
    for directory in directories:
        for path in directory.rglob("*"):
            if path.is_file() and not path.is_symlink() and SECRET.encode() in path.read_bytes():
                found.append(str(path))
    return found
