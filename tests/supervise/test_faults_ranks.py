"""Ranks that misbehave: killed, flooding, leaking, stubborn, out of memory, gone too early."""

import os
import random
import shutil
import signal
import sys
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, desk, gone, pause, press_until_it_ends, ranks, script


@pytest.mark.system
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_ranks_killed_at_random_moments_come_back(host: Console, tmp_path: Path, seed: int):
    """Two at once, and one more while their replacements start."""
    chance = random.Random(seed)
    assert host.argosy("run", "-d", "-n", "4", "--restart", "rank", "--name", "many", "waits.py").code == 0
    first = ranks(host, "many", count=4)
    victims = chance.sample(range(4), 3)
    for index in victims[:2]:
        os.kill(first[index].pid, signal.SIGKILL)
    pause(chance.choice([0.0, 0.02, 0.1]))
    os.kill(first[victims[2]].pid, signal.SIGKILL)
    until(lambda: sum(rank.generation for rank in ranks(host, "many", count=4)) == 3, "three replacements")
    after = ranks(host, "many", count=4)
    survivor = next(index for index in range(4) if index not in victims)
    assert after[survivor].pid == first[survivor].pid
    (host.cwd / "go").touch()
    until(lambda: host.ps("many").get("state") == "ended", "the end")
    assert host.ps("many")["code"] == 0


def test_max_restarts_is_honoured_and_counted(host: Console):
    name = script(host, 'import os, sys\nprint("count", os.environ["TORCHELASTIC_RESTART_COUNT"])\nsys.exit(3)\n')
    ended = host.argosy("run", "-n", "2", "--max-restarts", "2", name)
    assert ended.code == 3
    counts = sorted(line.split()[-1] for line in ended.out.decode().splitlines() if "count" in line)
    assert set(counts) == {"0", "1", "2"}
    assert "2 of 2 restarts are used" in ended.text


def test_restart_rank_replaces_that_rank_alone(host: Console, tmp_path: Path):
    assert host.argosy("run", "-d", "-n", "3", "--restart", "rank", "--name", "one", "waits.py").code == 0
    before = ranks(host, "one", count=3)
    os.kill(before[1].pid, signal.SIGKILL)
    after = ranks(host, "one", generation=1, count=1)
    after = ranks(host, "one", count=3)
    assert [rank.generation for rank in after] == [0, 1, 0]
    assert (after[0].pid, after[2].pid) == (before[0].pid, before[2].pid)
    (host.cwd / "go").touch()


def test_ranks_lost_at_once_take_one_of_the_restarts(host: Console):
    words = ["-d", "-n", "4", "--restart", "rank", "--max-restarts", "1", "--name", "atonce"]
    assert host.argosy("run", *words, "waits.py").code == 0
    before = ranks(host, "atonce", count=4)
    for rank in before[1:]:
        os.kill(rank.pid, signal.SIGKILL)
    until(lambda: sum(rank.generation for rank in ranks(host, "atonce", count=4)) == 3, "three replacements")
    (host.cwd / "go").touch()
    until(lambda: host.ps("atonce").get("state") == "ended", "the end")
    assert host.ps("atonce")["code"] == 0


@pytest.mark.parametrize("words", [["s.py"], ["--", sys.executable, "s.py"]])
def test_ranks_have_the_limits_of_whoever_launches(host: Console, words: list[str]):
    """Not of whoever happened to start the daemons."""
    script(
        host,
        "from resource import *\nprint(getrlimit(RLIMIT_NOFILE), getrlimit(RLIMIT_CORE))\n",
    )
    assert host.argosy("run", *words).code == 0
    limits = 'ulimit -Sc 0; ulimit -Sn 300; ulimit -Hn 400; exec "$@"'
    ended = host.run(["bash", "-c", limits, "bash", sys.executable, "-m", "argosy", "run", *words])
    assert ended.out.decode().startswith("(300, 400) (0, ")


@pytest.mark.system
def test_a_flooded_log_keeps_head_and_tail_and_the_run_goes_on(host: Console):
    name = script(
        host,
        "import sys, time\n"
        "print('the first line')\n"
        "for number in range(60):\n"
        "    for _ in range(100): print(str(number) * 400)\n"
        "    time.sleep(0.1)\n"
        "print('the last line')\n",
    )
    host = desk(host, host.cwd)
    host.env = {**host.env, "ARGOSY_LOG_BYTES_MAX": str(256 * 1024)}
    ended = host.argosy("run", "--name", "flood", "-r", "3", name)
    assert ended.code == 0
    log = host.cwd / "runs/flood/logs/1/0.0.out"
    assert log.stat().st_blocks * 512 < 2 << 20
    shown = host.argosy("logs", "flood").text
    assert "the first line" in shown
    assert "the last line" in shown
    assert "of this log were cut here" in shown


LEAKS = """
import os, subprocess, sys, time
if {way!r} == "child":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
elif {way!r} == "session":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
elif {way!r} == "twice":
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            time.sleep(600)
        os._exit(0)
    time.sleep(0.2)
"""


@pytest.mark.parametrize("way", ["child", "session", "twice"])
@pytest.mark.parametrize("kind", ["forked", "executed"])
def test_leaked_grandchildren_do_not_outlive_the_run(host: Console, way: str, kind: str):
    name = script(host, LEAKS.format(way=way))
    words = [name] if kind == "forked" else ["--", sys.executable, name]
    assert host.argosy("run", "--name", "leak", *words).code == 0
    # The fixture fails if anything is left.


def test_who_ignores_sigterm_is_killed_after_the_grace(host: Console, tmp_path: Path):
    name = script(
        host,
        "import signal, time\nsignal.signal(15, signal.SIG_IGN)\n"
        "print('deaf', flush=True)\nwhile True: time.sleep(1)\n",
    )
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--grace", "0.5", name, out=out)
    said(out, "deaf")
    ranks(host, next(iter(os.listdir(host.cwd / "runs"))))
    client.send_signal(signal.SIGTERM)
    assert client.wait(PATIENCE_S) == 143


def test_raising_at_import_is_the_scripts_own_failure(host: Console):
    (host.cwd / "broken.py").write_text("raise RuntimeError('broken at import')\n")
    ended = host.argosy("run", "-n", "2", script(host, "import broken\n"))
    assert ended.code == 1
    assert "RuntimeError: broken at import" in ended.text
    assert "argosy/supervise" not in ended.text


@pytest.mark.system
def test_exiting_0_too_early_is_named_by_the_hang_report(host: Console, tmp_path: Path):
    name = script(
        host,
        "import os, time, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for step in range(5): dist.all_reduce(torch.ones(1))\n"
        "if dist.get_rank() == 1:\n"
        "    if os.fork() == 0: time.sleep(600)  # Keeps the connections open, so that nobody notices.\n"
        "    os._exit(0)\n"
        "dist.all_reduce(torch.ones(1))\n",
    )
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--hang-after", "3", "--name", "early", name, out=out)
    said(out, r"hang: rank 1 exited with code 0; rank 0 waits for it in all_reduce")
    client.send_signal(signal.SIGTERM)
    assert client.wait(PATIENCE_S) == 143


def test_a_group_formed_by_torch_turns_restart_rank_into_all(host: Console, tmp_path: Path):
    name = script(
        host,
        "import os, sys, torch, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "dist.all_reduce(torch.ones(1))\n"
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' and dist.get_rank() == 1: os._exit(5)\n"
        "dist.barrier()\n"
        "print('done', dist.get_rank())\n",
    )
    ended = host.argosy("run", "-n", "2", "--restart", "rank", name)
    assert ended.code == 0, ended.text
    assert "torch's own process group cannot take one rank back" in ended.text
    assert "restarting ranks 0-1" in ended.text


def test_a_client_that_is_killed_takes_its_run_along(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--name", "lease", "waits.py", out=out)
    said(out, "rank 1 ready")
    pids = [rank.pid for rank in ranks(host, "lease")]
    client.kill()
    client.wait(PATIENCE_S)
    until(lambda: all(gone(pid) for pid in pids), "the end of the ranks")


def test_a_detached_run_outlives_its_client(host: Console):
    assert host.argosy("run", "-d", "-n", "2", "--name", "free", "waits.py").code == 0
    assert len(ranks(host, "free")) == 2
    (host.cwd / "go").touch()
    until(lambda: host.ps("free").get("state") == "ended", "the end")
    assert host.ps("free")["code"] == 0


SLEEPS = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"


def test_ctrl_c_is_a_keyboard_interrupt_in_the_ranks(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", script(host, SLEEPS), out=out)
    said(out, "ready")
    client.send_signal(signal.SIGINT)
    assert client.wait(PATIENCE_S) in (130, -signal.SIGINT)
    text = out.read_text()
    assert "KeyboardInterrupt" in text
    assert "Traceback" in text
    assert "argosy/supervise" not in text


def test_ctrl_c_twice_kills(host: Console, tmp_path: Path):
    name = script(
        host,
        "import signal, time\nsignal.signal(2, signal.SIG_IGN)\n"
        "print('ready', flush=True)\nwhile True: time.sleep(1)\n",
    )
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", name, out=out)
    said(out, r"(?s)ready.*ready|\[0-1\].*ready")
    client.send_signal(signal.SIGINT)
    said(out, "stopping: ctrl-c")
    press_until_it_ends(client)
    assert client.returncode in (130, -signal.SIGINT)


@pytest.mark.parametrize("name", ["USR1", "USR2", "HUP"])
def test_signals_of_the_user_reach_the_ranks(host: Console, tmp_path: Path, name: str):
    text = (
        "import signal, sys\n"
        f"signal.signal(signal.SIG{name}, lambda *_: sys.exit(21))\n"
        "print('ready', flush=True)\nwhile True: signal.pause()\n"
    )
    out = tmp_path / "out"
    client = host.start("run", script(host, text), out=out)
    said(out, "ready")
    client.send_signal(signal.Signals[f"SIG{name}"])
    assert client.wait(PATIENCE_S) == 21


def test_a_run_whose_own_directory_is_removed_goes_on_and_ends_with_its_exit_code(host: Console, tmp_path: Path):
    out = tmp_path / "out"
    client = host.start("run", "-n", "2", "--restart", "rank", "--name", "bare", "waits.py", "0", "6", out=out)
    said(out, "rank 1 ready")
    first, agent = ranks(host, "bare", count=2), daemon(host, "agent")
    shutil.rmtree(tmp_path / "runs/bare")
    os.kill(first[0].pid, signal.SIGKILL)
    second = ranks(host, "bare", generation=1, count=1)
    assert second[1].pid == first[1].pid
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 6
    assert daemon(host, "agent") == agent
