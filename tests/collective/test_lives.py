"""Groups are made and destroyed, by scripts and by processes that should not: nothing is mistaken for another."""

import pytest
from crew import crew

AGAIN = """
for turn in range(4):
    world = form()
    dist.all_reduce(x := torch.full((3,), float(turn)))
    pair = dist.new_group([0, 1])
    if rank < 2:
        dist.all_reduce(x, group=pair)
    dist.barrier()
    dist.destroy_process_group()
    print(x[0].item())
"""

DIES = """
import os, signal, time
from argosy.core import PeerLost
form()
dist.barrier()
if rank == 1:
    time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL) if round == "killed" else os._exit(0)
try:
    dist.new_group([0, 1, 2])
except PeerLost as error:
    print(error)
"""

FORKS = """
import os
from argosy.core import ConfigError
form()
dist.barrier()
if rank == 0:
    if not (pid := os.fork()):
        try:
            dist.all_reduce(torch.ones(2))
        except ConfigError as error:
            print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
dist.all_reduce(x := torch.ones(2))
print(x.tolist())
"""

LETTERS = """
from argosy.collective import CollectiveMismatch
form()
if rank == 0:
    dist.send(torch.ones(4), 1)
    dist.send(torch.ones(4), 1, tag=3)
elif rank == 1:
    try:
        dist.recv(torch.zeros(4, dtype=torch.int32), 0)
    except CollectiveMismatch as error:
        print(error)
    dist.recv(x := torch.zeros(4), 0, tag=3)
    print(x.tolist())
dist.barrier()
"""

ASTRAY = """
import datetime, os, sys
from argosy.core import ArgosyError
form(timeout=datetime.timedelta(seconds=5))
other = dist.new_group([0, 1])
dist.barrier()
try:
    dist.all_reduce(torch.ones(4), group=other if rank == 0 else None)  # line 8
except ArgosyError as error:
    print(error)
sys.stdout.flush(), os._exit(0)
"""

SEEN = """
import datetime
from argosy.core import DeadlinePassed
form()
told = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
dist.barrier()
with torch.profiler.profile() as profile:
    dist.all_reduce(torch.ones(4))
print("argosy:allreduce" in {event.key for event in profile.key_averages()})
if rank == 0:
    try:
        dist.all_reduce(torch.ones(4), async_op=True).wait(datetime.timedelta(milliseconds=100))
    except DeadlinePassed as error:
        print(error)
    told.set("gave up", "")
dist.barrier() if rank == 0 else (told.wait(["gave up"]), dist.all_reduce(torch.ones(4)), dist.barrier())
"""


def test_a_group_made_again_in_the_same_process_meets_its_peers_of_now():
    assert crew(AGAIN, 3) == [*["".join(f"{3.0 * turn * 2}\n" for turn in range(4))] * 2, "0.0\n3.0\n6.0\n9.0\n"]


@pytest.mark.parametrize(("how", "cause"), [("killed", "killed by SIGKILL"), ("left", "exit code 0")])
def test_who_makes_a_group_with_a_rank_that_is_gone_is_told(how: str, cause: str):
    said = crew(DIES, 3, must_end_well=False, rounds=[how])
    assert {said[0], said[2]} == {f"rank 1 is lost: {cause}\n"}


def test_a_forked_child_is_not_its_rank():
    assert crew(FORKS, 2) == ["a forked child cannot use the groups of its parent\n[2.0, 2.0]\n", "[2.0, 2.0]\n"]


def test_a_letter_of_another_type_is_not_taken():
    *_, sent, taken = crew(LETTERS, 2)[1].partition("rank 0 ")
    assert sent + taken.splitlines()[0].partition(" with")[0] == "rank 0 sent 16 bytes of float32"
    assert "expects 16 bytes of int32" in taken
    assert taken.splitlines()[1] == "[1.0, 1.0, 1.0, 1.0]"


def test_a_rank_that_is_in_another_group_is_said_to_be_there():
    told = [text for text in crew(ASTRAY, 2, must_end_well=False) if "timed out after 5 s" in text]
    assert told
    assert all("and is in all_reduce #" in text and "of another group" in text for text in told)


def test_profilers_see_operations_and_waits_name_them():
    first, other = crew(SEEN, 2)
    assert "True\ntimed out after 0.1 s: all_reduce, called at " in first
    assert other.endswith("True\n")
