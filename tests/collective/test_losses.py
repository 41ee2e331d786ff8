"""Every wait ends: by a loss that is named, by a deadline that names who is missing, by a mismatch on all ranks."""

from pathlib import Path

import pytest
from console import PATIENCE_S
from crew import crew

SCRIPTS = Path(__file__).parent / "scripts"
OPERATIONS = [
    "all_reduce",
    "small all_reduce",
    "async all_reduce",
    "all_gather",
    "reduce_scatter",
    "broadcast",
    "all_to_all",
    "barrier",
    "recv",
    "send",
    "a living rank",
    "sparse all_reduce",
]
APART = ["apart " + name for name in ("all_reduce", "async all_reduce", "barrier", "recv", "send", "a living rank")]

DEADLINE = """
import datetime
from argosy.core import DeadlinePassed
told = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
world = form(timeout=datetime.timedelta(seconds=5))
dist.barrier()
if rank == 1:  # It comes when the others have given up.
    told.wait([f"gave up {each}" for each in range(size) if each != 1])
try:
    if round == "monitored":
        world.monitored_barrier(datetime.timedelta(seconds=3))
    elif round == "recv":
        dist.recv(torch.ones(3), 1, tag=7) if rank == 0 else dist.barrier()  # line 13
    else:
        dist.barrier() if rank == 1 else dist.all_reduce(torch.ones(3))  # line 15
except DeadlinePassed as error:
    print(error)
told.set(f"gave up {rank}", "")
import os, sys; sys.stdout.flush(); os._exit(0)
"""

MISMATCH = """
from argosy.collective import CollectiveMismatch
world = form()
calls = [
    lambda: dist.all_reduce(torch.ones(3 + (rank == 1))),
    lambda: dist.all_reduce(torch.ones(3, dtype=torch.float64 if rank == 1 else torch.float32)),
    lambda: dist.all_reduce(torch.ones(3)) if rank == 1 else dist.broadcast(torch.ones(3), 0),
    lambda: dist.broadcast(torch.ones(3), rank % 2),
    lambda: dist.all_reduce(torch.ones(3), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM),
    lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1] * 3, [1] * 3 if rank else [2, 1, 0]),
    lambda: dist.all_reduce(torch.ones(900_000 + (rank == 1))),
]
pair = dist.new_group([1, 2])
if rank:
    calls.append(lambda: dist.broadcast(torch.ones(rank), 2, group=pair))
for call in calls:
    try:
        call()
    except CollectiveMismatch as error:
        print(error)
dist.all_reduce(x := torch.ones(3))
assert x[0] == size
"""

REJECTED = """
form()
calls = [
    lambda: dist.all_gather([torch.empty(2)] * (size - 1), torch.ones(2)),
    lambda: dist.reduce_scatter(torch.empty(2), [torch.ones(2)] * (size + 1)),
    lambda: dist.all_to_all([torch.empty(2)] * size, [torch.ones(2)] * (size - 1)),
    lambda: dist.broadcast(torch.ones(2), 99),
    lambda: dist.reduce(torch.ones(2), 99),
    lambda: dist.scatter(torch.empty(2), [torch.ones(2)] if rank == 0 else None, 0) if rank == 0 else int("x"),
]
for call in calls:
    try:
        call()
    except (RuntimeError, ValueError) as error:
        print(error)
dist.all_reduce(x := torch.ones(3))
assert x[0] == size
"""

WRONG_SIZE = """
from argosy.collective import CollectiveMismatch
form()
pair = dist.new_group([1, 2])
if rank == 2:
    dist.send(torch.ones(4), 1, group=pair, tag=5)
    dist.send(torch.ones(2), 1, group=pair)
elif rank == 1:
    for tag in (0, 5):  # the second was put aside
        try:
            dist.recv(torch.empty(3), 2, group=pair, tag=tag)
        except CollectiveMismatch as error:
            print(error)
dist.barrier()
"""

LEFT = """
import os, signal, sys, threading, time, traceback
from argosy.core import PeerLost
form()
told = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
dist.barrier()
def interrupt():
    main = threading.main_thread().ident
    while "all_reduce" not in [frame.name for frame in traceback.extract_stack(sys._current_frames()[main])]:
        time.sleep(0.01)
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGINT)
if rank == 0:
    told.wait(["interrupted"])
else:
    threading.Thread(target=interrupt).start()
try:
    dist.all_reduce(torch.ones(3))
except (PeerLost, KeyboardInterrupt) as error:
    print(type(error).__name__, error)
told.set("interrupted", "")
"""

STOPPED = """
import os, signal, threading, time
world = form()
x = torch.ones(4)
dist.all_reduce(x)
if rank == 1:
    pid = os.getpid()
    if os.fork() == 0:
        time.sleep(0.2); os.kill(pid, signal.SIGSTOP); time.sleep(1); os.kill(pid, signal.SIGCONT); os._exit(0)
for i in range(60):
    time.sleep(0.01)
    dist.all_reduce(x := torch.full((100_000,), float(rank + i)))
    assert x[0] == size * i + sum(range(size)), x
print("good")
"""

EXITS = """
import os, sys
from argosy.core import PeerLost
form()
dist.barrier()
if rank == 0:
    os._exit(3)
try:
    dist.barrier()
except PeerLost as error:
    print(error)
sys.stdout.flush(); os._exit(0)
"""

REPLACED = """
import ctypes, os, signal, sys
from argosy.collective import joining
if rank == 1 and ctypes.CDLL(None).unshare(0x10000000):
    print("skip"); sys.stdout.flush(); os._exit(0)
ready, go = os.pipe()
spare = rank == 1 and os.fork() == 0
if spare:
    os.close(go)
    os.read(ready, 1)  # until the one whose place it takes is gone
    with joining():
        world = form()
else:
    world = form()
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with world.latched() as latch:
        dist.all_reduce(torch.ones(3))
        assert not latch.vote()
    print(latch.loss)
world.reform(None, 1)
dist.all_reduce(x := torch.full((3,), float(rank + 1)))
print(x.tolist(), world._transport.shared is None, spare)
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""


@pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])
def test_a_killed_rank_is_named_on_every_other_in_each_operation(compiled: bool):
    operations = OPERATIONS if compiled else ["all_reduce", "reduce_scatter", "broadcast", "barrier"]
    said = crew(SCRIPTS / "losses.py", 3, compiled=compiled, must_end_well=False, rounds=operations)
    for text in said[:2]:
        lines = text.splitlines()
        assert len(lines) == 2 * len(operations), text
        for first, again in zip(lines[::2], lines[1::2], strict=True):
            message, late_ms = first.split("|")
            assert message == again == "rank 2 is lost: killed by SIGKILL"
            assert float(late_ms) < 1000 * PATIENCE_S  # no hang; the figure itself is bench/collectives.py's


def test_a_killed_rank_is_named_where_ranks_share_no_host():
    """Rank 1 and the victim are of one host, rank 0 of another, which cannot know how a rank ended."""
    first, other, _ = crew(SCRIPTS / "losses.py", 3, must_end_well=False, rounds=APART)
    if "skip" in first:
        pytest.skip("no user namespaces here")
    for text, causes in ((first, ("its connection closed", "its connection broke")), (other, ("killed by SIGKILL",))):
        lines = [line for line in text.splitlines() if "is lost: " in line]  # Gloo logs its own errors
        assert len(lines) == 2 * len(APART), text
        for first_said, again in zip(lines[::2], lines[1::2], strict=True):
            message, late_ms = first_said.split("|")
            assert message == again
            assert message.startswith(tuple(f"rank 2 is lost: {cause}" for cause in causes)), text
            assert float(late_ms) < 1000 * PATIENCE_S  # no hang, where Gloo alone would wait for half an hour


def test_a_group_without_shared_memory_goes_on_with_a_replacement():
    first, other = crew(REPLACED, 2, must_end_well=False)
    if "skip" in other:
        pytest.skip("no user namespaces here")
    lost, formed = [line for line in first.splitlines() if line.endswith("False") or "is lost" in line]
    assert lost.startswith("rank 1 is lost: its connection ")
    assert formed == "[3.0, 3.0, 3.0] True False"
    assert "[3.0, 3.0, 3.0] True True" in other


def test_a_deadline_names_who_has_not_arrived():
    for text in crew(DEADLINE, 3):
        assert text == (
            "timed out after 5 s: all_reduce #2 of float32 at script.py:15: "
            "waited for rank 1 (last in barrier #1 at script.py:6)\n"
        )


def test_a_deadline_of_one_barrier_is_its_own():
    for text in crew(DEADLINE, 3, rounds=["monitored"]):
        assert text.startswith("timed out after 3 s: barrier #2 at script.py:11: waited for rank 1 (last in barrier #1")


def test_a_deadline_of_a_message_names_the_peer_and_what_it_did_last():
    told = "recv from rank 1 (last in barrier #1 at script.py:6) of 12 bytes with tag 7 at script.py:13"
    assert crew(DEADLINE, 2, rounds=["recv"]) == [f"timed out after 5 s: {told}\n"] * 2


@pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])
def test_a_mismatch_is_an_error_on_every_rank_and_the_group_goes_on(compiled: bool):
    said = crew(MISMATCH, 3, compiled=compiled)
    lines = said[0].splitlines()
    assert len(lines) == 7
    of_the_pair = (
        "ranks called different collectives: rank 1: broadcast #1 of float32 with root 2 at script.py:15, "
        "sends [0, 0] receives [0, 4] bytes; "
        "rank 2: broadcast #1 of float32 with root 2 at script.py:15, sends [8, 0] receives [0, 0] bytes\n"
    )
    assert said[1] == said[2] == said[0] + of_the_pair
    assert lines[0] == (
        "ranks called different collectives: ranks 0,2: all_reduce #1 of float32 at script.py:5, 12 bytes; "
        "rank 1: all_reduce #1 of float32 at script.py:5, 16 bytes"
    )
    assert "broadcast #3 of float32 with root 0 at script.py:7" in lines[2]
    assert "rank 1: all_reduce #3 of float32 at script.py:7" in lines[2]
    assert "ranks 0,2: all_reduce #5 of float32 at" in lines[4]
    assert "rank 1: all_reduce #5 of float32 by maximum at" in lines[4]


def test_a_message_of_another_size_is_told_to_who_receives_it_with_both_call_sites():
    assert crew(WRONG_SIZE, 3)[1].splitlines() == [
        "rank 2 sent 8 bytes of float32 with tag 0 at script.py:7, recv at script.py:11 expects 12 bytes of float32",
        "rank 2 sent 16 bytes of float32 with tag 5 at script.py:6, recv at script.py:11 expects 12 bytes of float32",
    ]


def test_arguments_that_cannot_be_are_told_to_the_caller_and_the_group_goes_on():
    lines = crew(REJECTED, 3)[0].splitlines()
    assert lines == [
        "all_gather: 2 output tensors for a group of 3 ranks",
        "reduce_scatter: 4 input tensors for a group of 3 ranks",
        "all_to_all: 2 input tensors for a group of 3 ranks",
        "broadcast: no rank 99 in a group of 3 ranks",
        "reduce: no rank 99 in a group of 3 ranks",
        "scatter: 1 input tensors for a group of 3 ranks",
    ]


def test_a_rank_that_is_interrupted_in_an_operation_is_named():
    first, interrupted = crew(LEFT, 2)
    assert interrupted == "KeyboardInterrupt \n"
    assert first == "PeerLost rank 1 is lost: it left all_reduce: KeyboardInterrupt\n"


def test_a_rank_that_was_stopped_for_a_second_is_not_lost():
    assert crew(STOPPED, 2) == ["good\n"] * 2


def test_a_rank_that_exits_without_a_word_is_named_with_its_code():
    assert crew(EXITS, 3, must_end_well=False)[1:] == ["rank 0 is lost: exit code 3\n"] * 2
