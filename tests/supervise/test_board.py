"""The board of a run: its ranks tell each other things through their agent, also through one that is killed."""

import json
import os
import signal
import subprocess
import sys
import time

from console import PATIENCE_S, Console, said, until
from daemons import daemon, ranks, script

TALKS = """
import os, sys, time
from argosy.fabric import AgentBoard, here

place = here()
board, rank = AgentBoard(place), place.rank.index
board.set(f"early/{rank}", b"1")
assert board.get([f"early/{each}" for each in range(place.size)], 60) == [b"1"] * place.size
before = board.add("count", 1)
while board.add("count", 0) < place.size:
    time.sleep(0.01)
if rank == 0:
    print("all counted", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
assert board.add("count", 0) == place.size
assert board.get(["never"]) is None
assert board.get([f"early/{each}" for each in range(place.size)], 60) == [b"1"] * place.size
board.set(f"late/{rank}", b"2")
assert board.get([f"late/{each}" for each in range(place.size)], 60) == [b"2"] * place.size
print("rank", rank, "is content", flush=True)
"""


def test_what_ranks_said_is_known_again_after_the_death_of_the_agent(host: Console) -> None:
    out = host.cwd / "out"
    client = host.start("run", "-n", "3", "--name", "talks", script(host, TALKS), out=out)
    said(out, "all counted")
    os.kill(daemon(host, "agent"), signal.SIGKILL)
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert out.read_text().count("is content") == 3


def test_a_new_generation_of_all_ranks_has_an_empty_board(host: Console) -> None:
    text = """
import os
from argosy.fabric import AgentBoard, here

place = here()
board = AgentBoard(place)
assert board.add("count", 1) <= place.size
board.set(f"met/{place.rank.index}", b"")
assert board.get([f"met/{each}" for each in range(place.size)], 60) is not None
if place.rank.generation == 0:
    os._exit(3)
print("count", board.add("count", 0), flush=True)
"""
    ended = host.argosy("run", "-n", "2", "--max-restarts", "1", script(host, text))
    assert ended.code == 0, ended.text
    assert "count 2" in ended.text


def test_what_is_there_is_found_however_slow_the_agent_is(host: Console) -> None:
    text = """
import os, time
from argosy.fabric import AgentBoard, here

place = here()
board = AgentBoard(place)
board.set("key", b"value")
print("set", flush=True)
while not os.path.exists("go"):
    time.sleep(0.01)
print("asks", flush=True)
print("found", board.get(["key"]), board.get(["another"]), flush=True)
"""
    out = host.cwd / "out"
    client = host.start("run", "-n", "1", "--name", "slow", script(host, text), out=out)
    said(out, "set")
    agent = daemon(host, "agent")
    os.kill(agent, signal.SIGSTOP)
    (host.cwd / "go").touch()
    said(host.cwd / "runs/slow/logs/1/0.0.out", "asks")
    time.sleep(0.1)  # Longer than the rank waits for keys that are not there.
    os.kill(agent, signal.SIGCONT)
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    assert "found [b'value'] None" in out.read_text()


MEMBER = """
import json, os, time
from pathlib import Path
from argosy.fabric import AgentBoard, here

place = here()
board = AgentBoard(place)
if place.rank == type(place.rank)("main", 1, 0):
    Path("environ.new").write_text(json.dumps(dict(os.environ)))
    os.rename("environ.new", "environ")
while not os.path.exists("go"):
    time.sleep(0.01)
place.barrier()
print("rank", place.rank.index, "began in view", place.view, "and counts", board.add("count", 1), flush=True)
board.get([f"met/{each}" for each in range(place.size)], 0)
print("rank", place.rank.index, "is in view", board.view, flush=True)
"""

OLD = """
import sys
from argosy.fabric import AgentBoard, Replaced, here

place = here()
board = AgentBoard(place)
board.set("early", b"old")
print("said", flush=True)
sys.stdin.readline()
attempts = [
    lambda: board.set("early", b"older"),
    lambda: board.get(["early"]),
    lambda: board.add("count", 10),
    lambda: AgentBoard(place).add("count", 10),
    lambda: place.barrier(30),
]
for attempt in attempts:
    try:
        attempt()
    except Replaced as error:
        print("refused:", error, flush=True)
"""


def test_a_stopped_process_that_was_replaced_is_refused_when_it_continues(host: Console) -> None:
    out, environ = host.cwd / "out", host.cwd / "environ"
    client = host.start("run", "-n", "2", "--restart", "rank", "--name", "fenced", script(host, MEMBER), out=out)
    until(environ.exists, "the environment of rank 1")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    command = [sys.executable, "-c", OLD]
    with subprocess.Popen(command, env=json.loads(environ.read_text()), cwd=host.cwd, text=True, **pipes) as old:
        assert old.stdin is not None
        assert old.stdout is not None
        assert old.stdout.readline() == "said\n"
        old.send_signal(signal.SIGSTOP)
        os.kill(ranks(host, "fenced", count=2)[1].pid, signal.SIGKILL)
        ranks(host, "fenced", generation=1, count=1)
        old.send_signal(signal.SIGCONT)
        refusals, _ = old.communicate("\n", timeout=300)
    assert refusals.splitlines() == ["refused: rank 1 of generation 0 is not in view 2 of the run"] * 5
    (host.cwd / "go").touch()
    assert client.wait(PATIENCE_S) == 0, out.read_text()
    text = out.read_text()
    assert "rank 0 began in view 1 and counts" in text
    assert "rank 1 began in view 2 and counts" in text
    assert "counts 2" in text
    assert text.count("is in view 2") == 2
