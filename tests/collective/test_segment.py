"""The end of an arrival is the same for all ranks, whatever breaks it meanwhile; both engines."""

import os
import random
import threading
import time
from types import ModuleType

import pytest

from argosy import _reference
from argosy._select import native, native_is_compiled
from argosy.collective import segment as segments
from argosy.collective.request import Kind, Request
from argosy.collective.segment import GroupSegment, Shape
from argosy.core import PeerLost

SIZE = 3
NOTHING = [(0, 0)]
ENGINES = [pytest.param(_reference, id="reference")]
if native_is_compiled:
    ENGINES.append(pytest.param(native, id="native"))


def end_of_a_barrier(module: ModuleType, chance: random.Random, timeout_s: float, abort: bool) -> list[int]:
    """Ranks arrive in threads, each a little later than it was told; returns how the barrier ended for each."""
    fd = segments.create(SIZE, 1)
    ranks = [GroupSegment(fd, Shape(SIZE, 1), rank) for rank in range(SIZE)]
    os.close(fd)
    codes = [-1] * SIZE
    delays = [chance.uniform(0, 0.0005) for _ in range(SIZE + 1)]
    head = Request(Kind.ALL_REDUCE, "barrier").pack(1, "")

    def arrive(rank: int) -> None:
        time.sleep(delays[rank])
        codes[rank] = module.run_collective(ranks[rank].address, rank, head, NOTHING, NOTHING, timeout_s)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in range(SIZE)]
    for thread in threads:
        thread.start()
    if abort:
        time.sleep(delays[SIZE])
        module.abort_segment(ranks[0].address, 1)
    for thread in threads:
        thread.join()
    return codes


@pytest.mark.parametrize("module", ENGINES)
def test_an_abort_meets_all_ranks_or_none(module: ModuleType):
    chance = random.Random(1)
    ends = [end_of_a_barrier(module, chance, 10.0, abort=True) for _ in range(200)]
    assert all(codes in ([0] * SIZE, [1] * SIZE) for codes in ends), ends
    assert len({tuple(codes) for codes in ends}) == 2  # both happened, or the test shows nothing


@pytest.mark.parametrize("module", ENGINES)
def test_a_deadline_meets_all_ranks_or_none(module: ModuleType):
    chance = random.Random(2)
    ends = [end_of_a_barrier(module, chance, 0.0004, abort=False) for _ in range(200)]
    assert all((0 in codes) == (set(codes) == {0}) for codes in ends), ends


@pytest.mark.parametrize("module", ENGINES)
def test_only_the_first_abort_counts(module: ModuleType):
    fd = segments.create(2, 1)
    segment = GroupSegment(fd, Shape(2, 1), 0)
    os.close(fd)
    assert module.abort_segment(segment.address, 2)
    assert not module.abort_segment(segment.address, 1)
    segment.set_cause("killed by SIGKILL")
    assert segment.abort_reason() == (2, "killed by SIGKILL")


def test_a_number_that_is_another_segments_by_now_is_not_opened():
    first = segments.create(2, 1)
    inode = os.fstat(first).st_ino
    GroupSegment(first, Shape(2, 1), 0)
    os.close(first)
    other = segments.create(2, 1)
    os.dup2(other, first)
    with pytest.raises(PeerLost, match="abandoned this generation"):
        segments.open_peer_segment((os.getpid(), first, inode), Shape(2, 1), 1)
    segments.open_peer_segment((os.getpid(), first, os.fstat(other).st_ino), Shape(2, 1), 1)
    for fd in {first, other}:
        os.close(fd)


def test_later_groups_get_less_and_all_together_the_room():
    room, taken = segments.ROOM_BYTES, 0
    windows: list[int] = []
    for _ in range(12):
        windows.append(segments.window_for(room - taken))
        taken += Shape(4, windows[-1]).stride
    assert windows == sorted(windows, reverse=True)
    assert windows[0] == segments.WINDOW_MAX
    assert taken <= room
    assert segments.window_for(0) == 1
