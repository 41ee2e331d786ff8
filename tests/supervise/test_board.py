"""The board of a run: its ranks tell each other things through their agent, also through one that is killed."""

import os
import signal

from console import Console, said
from daemons import daemon, script

TALKS = """
import os, sys, time
from argosy.fabric import AgentBoard, here

place = here()
board, rank = AgentBoard(place.run, place.socket), place.rank.index
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
    assert client.wait(90) == 0, out.read_text()
    assert out.read_text().count("is content") == 3


def test_a_new_generation_of_all_ranks_has_an_empty_board(host: Console) -> None:
    text = """
import os
from argosy.fabric import AgentBoard, here

place = here()
board = AgentBoard(place.run, place.socket)
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
