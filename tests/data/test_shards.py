"""Iterables through fixed logical shards: one order for any ranks, workers, rollbacks and resumes."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest

from argosy.core import ConfigError
from argosy.data import Loader, SampleError, Shards, Threads, merge_states


def lines(shard: int, shards: int, epoch: int) -> Iterator[int]:
    """Shard s has s + 3 items in every epoch."""
    yield from (shard * 1000 + epoch * 100 + item for item in range(shard + 3))


class Stateful:
    """Endless; counts what was read, so that a test sees whether it skipped."""

    def __init__(self, shard: int, shards: int, epoch: int) -> None:
        self.shard, self.item, self.entered = shard, 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            self.item += 1
            yield self.shard * 1000 + self.item - 1, self.entered

    def state_dict(self) -> dict[str, int]:
        return {"item": self.item}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.item = self.entered = state["item"]


def plain(shards: int, count: int) -> list[int]:
    def stream(shard: int) -> Iterator[int]:
        for epoch in itertools.count():
            yield from lines(shard, shards, epoch)

    streams = [stream(shard) for shard in range(shards)]
    return [next(streams[position % shards]) for position in range(count)]


def take(loaders: list[Loader], steps: int) -> list[int]:
    result: list[int] = []
    for _ in range(steps):
        for loader in loaders:
            for _ in range(2):  # The first attempt is rolled back.
                attempt = [item for batch in loader.batches() for item in batch.tolist()]
            result += attempt
            loader.commit()
    return result


@pytest.mark.parametrize(("size", "workers"), [(1, 0), (2, 0), (3, 0), (1, 2), (2, 1)])
@pytest.mark.parametrize("batch", [6, 8])
def test_i1_the_order_is_a_plain_round_of_the_shards(size: int, workers: int, batch: int):
    loaders = [Loader(Shards(lines, 4), batch, 2, workers=workers) for _ in range(size)]
    for rank, loader in enumerate(loaders):
        loader.place(rank, size)
    assert take(loaders, 20) == plain(4, 20 * batch)
    for loader in loaders:
        loader.close()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_resume_with_other_ranks_goes_on(workers: int):
    loaders = [Loader(Shards(lines, 4), 8, 2) for _ in range(2)]
    for rank, loader in enumerate(loaders):
        loader.place(rank, 2)
    take(loaders, 7)
    state = json.loads(json.dumps(merge_states([loader.state_dict() for loader in loaders])))
    with Loader(Shards(lines, 4), 8, 2, workers=workers) as resumed:
        resumed.load_state_dict(state)
        assert take([resumed], 5) == plain(4, 96)[56:]


def test_states_are_used_instead_of_skipping():
    loader = Loader(Shards(Stateful, 4), 8)
    take_pairs(loader, 10)
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(Shards(Stateful, 4), 8)
    resumed.load_state_dict(state)
    items, entered = take_pairs(resumed, 1)
    assert items == [shard * 1000 + item for item in (20, 21) for shard in range(4)]
    assert entered == [20] * 8


def take_pairs(loader: Loader, steps: int) -> tuple[list[int], list[int]]:
    items: list[int] = []
    entered: list[int] = []
    for _ in range(steps):
        for first, second in loader.batches():
            items += first.tolist()
            entered += second.tolist()
        loader.commit()
    return items, entered


def nothing(shard: int, shards: int, epoch: int) -> list[int]:
    return []


def breaks(shard: int, shards: int, epoch: int) -> Iterator[Any]:
    yield 1
    raise OSError("the network is gone")


def test_what_cannot_be_read_is_named():
    with pytest.raises(SampleError, match=r"item 0 of shard 0 of 4: Unreadable: .*it is empty"):
        next(iter(Loader(Shards(nothing, 4), 4)))
    with pytest.raises(SampleError, match="item 1 of shard 0 of 2: OSError: the network is gone"):
        next(iter(Loader(Shards(breaks, 2), 4)))


def test_what_needs_a_length_or_several_hands_is_refused():
    with pytest.raises(ConfigError, match="shards have no common epoch"):
        Loader(Shards(lines, 4), 4, epochs=1)
    with pytest.raises(ConfigError, match="processes"):
        next(iter(Loader(Shards(lines, 4), 4, workers=Threads(2))))
