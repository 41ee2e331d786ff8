"""A queue: what was put comes once, to one rank; again until it is committed; whoever is killed meanwhile."""

import os
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from argosy.core import ConfigError, DeadlinePassed
from argosy.data import Loader, Queue, SourceChanged, Unreadable
from argosy.data.spool import Decide, TooFew, decide_order
from argosy.fabric import dump, load

SCRIPT = Path(__file__).with_name("scripts") / "queue_end.py"


def ranks(directory: Path, size: int, batch: int = 4, **how: Any) -> list[Queue]:
    """The same queue as each of `size` ranks has it."""
    queues = [Queue(directory, batch, **how) for _ in range(size)]
    for rank, queue in enumerate(queues):
        queue.place(rank, size)
    return queues


def taken(queues: list[Queue]) -> list[Any]:
    """What each rank gets in this step, piece by piece."""
    return [list(queue.batches()) for queue in queues]


def commit(queues: list[Queue]) -> None:
    for queue in queues:
        queue.commit()


# -- the order ---------------------------------------------------------------------------------------


def test_o2_the_first_items_by_name_take_the_free_places():
    assert decide_order(8, 2, [0, 4], ["c", "a", "b"]) == Decide(8, ["a", "b"])
    assert decide_order(8, 4, [0, 4], ["c", "a", "b"]) == TooFew(3, 4)


def test_o2_a_stretch_ends_where_the_next_one_begins():
    assert decide_order(8, 4, [0, 10, 20], ["c", "a", "b"]) == Decide(8, ["a", "b"])


def test_q1_each_item_comes_to_one_rank_and_the_same_again_until_it_is_committed(tmp_path: Path):
    first, second = queues = ranks(tmp_path, 2)
    for number in range(8):
        first.put({"number": number, "array": np.full(3, number)})
    once, again = taken(queues), taken(queues)
    assert [[item["number"] for item in pieces[0]] for pieces in once] == [[0, 1], [2, 3]]
    again[0][0][0]["array"][:] = 99  # What an attempt does to its items does not reach the next one.
    assert [item["array"].tolist() for pieces in taken(queues) for item in pieces[0]] == [[n] * 3 for n in range(4)]
    commit(queues)
    assert [item["number"] for pieces in taken(queues) for item in pieces[0]] == [4, 5, 6, 7]
    assert (first.cursor, second.step, len(first)) == (4, 1, 0)


def test_a_rank_gets_its_items_in_microbatches(tmp_path: Path):
    queues = ranks(tmp_path, 2, batch=8, micro=2)
    for number in range(8):
        queues[0].put(number)
    assert taken(queues) == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    handed = queues[1].handed
    assert handed is not None
    assert (handed.position, handed.count, len(handed.names), queues[1].pieces) == (6, 2, 2, 2)


def test_q2_back_at_an_older_state_the_same_items_come_in_the_same_order(tmp_path: Path):
    queues = ranks(tmp_path, 2)
    for number in range(12):
        queues[0].put(number)
    state, seen = queues[0].state_dict(), [taken(queues)]
    for _ in range(2):
        commit(queues)
        seen.append(taken(queues))
    again = ranks(tmp_path, 2)  # Another launch.
    again[0].put(12)
    for queue in again:
        queue.load_state_dict(state)
    for before in seen:
        assert taken(again) == before
        commit(again)
    assert len(again[0]) == 1


def test_q2_with_another_batch_and_other_ranks_they_come_in_the_same_order(tmp_path: Path):
    queues = ranks(tmp_path, 2)
    for number in range(12):
        queues[0].put(number)
    taken(queues)
    commit(queues)
    taken(queues)  # Two stretches of four are decided; the third is not.
    (wide,) = ranks(tmp_path, 1, batch=6)
    assert taken([wide]) == [[list(range(6))]]
    commit([wide])
    assert taken([wide]) == [[list(range(6, 12))]]


def test_q3_only_what_a_checkpoint_counts_is_deleted(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1)
    for number in range(12):
        queue.put(number)
    for _ in range(3):
        taken([queue])
        commit([queue])
    queue.forget(6)
    queue.load_state_dict({"queue": 1, "cursor": 4, "step": 1})
    assert taken([queue]) == [[[4, 5, 6, 7]]]
    queue.forget(12)
    assert len(list((tmp_path / "taken").iterdir())) == 4, "the last ones stay, for rehearsals"


def test_batches_that_are_left_out_stay_so_and_places_that_were_deleted_get_new_items(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1, capacity=99)
    for number in range(28):
        queue.put(number)
    taken([queue])
    queue.skip(2)  # The first batch, and a place that nobody had decided.
    assert (taken([queue]), queue.step) == ([[[4, 5, 6, 7]]], 2)
    commit([queue])
    assert taken([queue]) == [[[8, 9, 10, 11]]]
    queue.forget(12)
    queue.load_state_dict({"queue": 1, "cursor": 6, "step": 1})
    assert taken([queue]) == [[[12, 13, 14, 15]]], "what lay there is gone"
    commit([queue])
    assert taken([queue]) == [[[16, 17, 8, 9]]], "two free places, then a stretch that is still there"


def test_in_a_rehearsal_items_are_looked_at_and_not_taken(tmp_path: Path):
    first, second = ranks(tmp_path, 2)
    assert list(second.rehearse()) == []
    first.put("a")
    assert list(second.rehearse()) == [["a", "a"]]
    assert (len(first), second.cursor) == (1, 0)


# -- keys --------------------------------------------------------------------------------------------


def test_a_key_is_added_once_and_decides_the_order(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1, batch=3, capacity=9)
    assert [queue.put(n, key=(7, n)) for n in (10, 2, 2, 9)] == [True, True, False, True]
    assert taken([queue]) == [[[2, 9, 10]]]
    assert not queue.put(2, key=(7, 2)), "it is known while it may come again"
    commit([queue])
    assert not queue.put(2, key=(7, 2))
    assert queue.put(2, key=(8, 2))


# -- bounds ------------------------------------------------------------------------------------------


def test_a_full_queue_makes_put_wait_until_items_are_taken(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1, batch=2, capacity=2)
    queue.put(0)
    queue.put(1)
    putting = threading.Thread(target=queue.put, args=[2])
    putting.start()
    time.sleep(0.1)
    assert (putting.is_alive(), len(queue)) == (True, 2)
    assert taken([queue]) == [[[0, 1]]]
    putting.join(300)
    assert (putting.is_alive(), len(queue)) == (False, 1)


def test_waits_have_an_end_that_says_what_is_missing(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1, batch=2, capacity=2, patience_s=0.05)
    queue.put(0)
    with pytest.raises(DeadlinePassed, match="2 items in the queue") as caught:
        taken([queue])
    assert caught.value.hint == "1 are there: check that a process puts items"
    queue.put(1)
    with pytest.raises(DeadlinePassed, match="room in the queue") as caught:
        queue.put(2)
    assert "2 items wait, of at most 2" in caught.value.hint


def test_a_full_disk_makes_both_ends_wait_for_room(small_disk: Path):
    (queue,) = ranks(small_disk / "queue", 1, batch=1, patience_s=0.1)
    queue.put("before")
    ballast = small_disk / "ballast"
    with ballast.open("wb", buffering=0) as file, suppress(OSError):
        while file.write(bytes(4096)):
            pass
    with pytest.raises(DeadlinePassed) as caught:
        queue.put("after")
    assert "No space left on device" in caught.value.hint
    with pytest.raises(DeadlinePassed) as caught:
        taken([queue])
    assert "No space left on device" in caught.value.hint
    ballast.unlink()
    queue.put("after")
    assert (taken([queue]), len(queue)) == ([[["before"]]], 1)
    assert list((small_disk / "queue" / "unfinished").iterdir()) == []


def test_a_wait_for_items_ends_when_it_has_become_useless(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1)

    def check() -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        next(iter(queue.batches(check)))


# -- wrong use ---------------------------------------------------------------------------------------


def test_what_cannot_be_is_refused(tmp_path: Path):
    with pytest.raises(ConfigError, match="a queue of 3 items cannot hold a batch of 4"):
        Queue(tmp_path, 4, capacity=3)
    with pytest.raises(ConfigError, match="multiple of micro"):
        Queue(tmp_path, 4, 3)
    queue = Queue(tmp_path, 4)
    with pytest.raises(ConfigError, match="5 ranks cannot share a batch of 4"):
        queue.place(0, 5)
    with pytest.raises(ConfigError, match=r"a key must be an integer.*: \(1, -2\)"):
        queue.put(0, key=(1, -2))
    with pytest.raises(ConfigError, match=r"cannot be sent to another process: lock"):
        queue.put({"lock": threading.Lock()})
    with pytest.raises(SourceChanged, match="not a queue's state"):
        queue.load_state_dict(Loader(range(4), 2).state_dict())
    with pytest.raises(SourceChanged, match="not a loader's state"):
        Loader(range(4), 2).load_state_dict(queue.state_dict())


def test_a_directory_that_others_write_to_is_refused(tmp_path: Path):
    Queue(tmp_path, 4)
    (tmp_path / "new").chmod(0o777)
    with pytest.raises(ConfigError, match="other users can write to"):
        Queue(tmp_path, 4)


def test_an_item_that_somebody_deleted_is_named(tmp_path: Path):
    (queue,) = ranks(tmp_path, 1, batch=1)
    queue.put(0, key=5)
    taken([queue])
    (tmp_path / "taken" / f"{5:012d}").unlink()
    with pytest.raises(Unreadable, match="000000000005: No such file"):
        taken([queue])


def test_a_queue_can_be_sent_to_whoever_puts(tmp_path: Path):
    queue = Queue(tmp_path, 4, 2, capacity=10, patience_s=7)
    queue.commit()
    sent: Queue = load(dump(queue, in_band=True)[0])
    sent.put("far")
    assert (sent.capacity, sent.micro, sent.patience_s, sent.cursor, len(queue)) == (10, 2, 7, 0, 1)


# -- kills -------------------------------------------------------------------------------------------


def start(directory: Path, *words: object) -> subprocess.Popen[str]:
    path = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, str(SCRIPT), str(directory), *map(str, words)]
    return subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, text=True)


def killed(process: subprocess.Popen[str]) -> list[list[int]]:
    """Kill it; the lines that it printed, as numbers."""
    process.kill()
    out, _ = process.communicate()
    return [[int(word) for word in line.split()] for line in out.splitlines(keepends=True) if line.endswith("\n")]


def test_whoever_is_killed_each_item_comes_once_and_none_is_lost(tmp_path: Path):
    """Two producers and two ranks, each killed several times; ranks go on at the cursor that they had noted."""
    dice, until = random.Random(3), 400
    makers = [start(tmp_path, "put", 0), start(tmp_path, "put", 10_000)]
    takers = [start(tmp_path, "take", rank, 2, until) for rank in range(2)]
    put: list[list[int]] = []
    seen: list[list[list[int]]] = [[], []]
    for kill in range(10):
        time.sleep(dice.uniform(0.05, 0.3))
        if kill % 2:
            victim = dice.randrange(2)
            put += killed(makers[victim])
            makers[victim] = start(tmp_path, "put", 20_000 + kill * 10_000)
        else:
            victim = dice.randrange(2)
            seen[victim] += killed(takers[victim])
            takers[victim] = start(tmp_path, "take", victim, 2, until)
    for rank, taker in enumerate(takers):
        out, _ = taker.communicate(timeout=300)
        seen[rank] += [[int(word) for word in line.split()] for line in out.splitlines()]
    for maker in makers:
        put += killed(maker)
    steps: dict[tuple[int, int], list[int]] = {}
    for rank, lines in enumerate(seen):
        for cursor, *numbers in lines:
            assert steps.setdefault((cursor, rank), numbers) == numbers, "another attempt, other items"
    assert sorted(steps) == [(cursor, rank) for cursor in range(0, until, 8) for rank in range(2)]
    counts = Counter(number for numbers in steps.values() for number in numbers)
    assert max(counts.values()) == 1
    waiting = Queue(tmp_path / "queue", 8)
    left = {load(path.read_bytes())["number"] for path in (waiting.directory / "new").iterdir()}
    assert {number for (number,) in put} <= set(counts) | left, "what was put is there"
    assert not left & set(counts)
