"""The loader without workers: by cursor, again after a rollback, on at commit, from a state."""

import json
import pickle
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from argosy.core import ConfigError
from argosy.data import Loader, SampleError, Shuffle, Skip, SourceChanged, Threads, TooManySkipped, seed_generators
from argosy.observe import Ring, read_spans, record_spans


class Numbers:
    """Sample i is i, with something drawn."""

    def __init__(self, length: int, broken: frozenset[int] = frozenset()) -> None:
        self.length, self.broken = length, broken

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> dict[str, Any]:
        if index in self.broken:
            raise ValueError(f"cannot read {index}")
        draws = [random.random(), float(np.random.rand()), float(torch.rand(()))]
        return {"index": index, "row": np.full(3, index, np.float32), "draws": np.array(draws), "name": f"n{index}"}


def everything(loader: Loader) -> list[int]:
    return [index for batch in loader for index in batch["index"].tolist()]


def all_ranks(size: int, **how: Any) -> list[int]:
    """What all ranks load together, step by step in rank order."""
    loaders = [Loader(Numbers(50), 12, 2, epochs=3, **how) for _ in range(size)]
    for rank, loader in enumerate(loaders):
        loader.place(rank, size)
    result: list[int] = []
    while not loaders[0].exhausted:
        for loader in loaders:
            for batch in loader.batches():
                result += batch["index"].tolist()
            loader.commit()
    return result


def test_each_sample_once_per_epoch_and_batches_straddle_epochs():
    loader = Loader(Numbers(50), 12, epochs=3)
    sizes = [len(batch["index"]) for batch in loader]
    assert sizes == [12] * 12 + [6]
    seen = everything(Loader(Numbers(50), 12, epochs=3))
    assert [sorted(seen[start : start + 50]) for start in (0, 50, 100)] == [list(range(50))] * 3


@pytest.mark.parametrize("size", [2, 3, 4, 6])
def test_d1_the_order_does_not_depend_on_ranks(size: int):
    assert all_ranks(size) == all_ranks(1)


def test_d2_a_step_is_handed_out_again_until_it_is_committed():
    loader = Loader(Numbers(50), 8, 4, seed=5)
    first = [batch["index"].tolist() for batch in loader.batches()]
    draws = [batch["draws"] for batch in loader.batches()]
    for batch in loader.batches():
        batch["draws"].zero_()  # What a rolled-back attempt did to its batch is not seen by the next one.
        batch.clear()
    again = list(loader.batches())
    assert [batch["index"].tolist() for batch in again] == first
    assert all(torch.equal(batch["draws"], before) for batch, before in zip(again, draws, strict=True))
    loader.commit()
    assert (loader.cursor, loader.step) == (8, 1)
    assert [batch["index"].tolist() for batch in loader.batches()] != first


def test_a_commit_amid_the_microbatches_is_refused():
    loader = Loader(Numbers(50), 8, 4)
    batches = loader.batches()
    next(batches)
    loader.commit()
    with pytest.raises(ConfigError, match="committed"):
        next(batches)


@pytest.mark.parametrize("stop", [0, 1, 4, 7])
def test_a_state_goes_on_with_another_batch_size_and_other_ranks(stop: int):
    whole = everything(Loader(Numbers(50), 12, epochs=2))
    loader = Loader(Numbers(50), 12, 4, epochs=2)
    for _ in range(stop):
        for _ in loader.batches():
            pass
        loader.commit()
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = Loader(Numbers(50), 7, epochs=2)
    resumed.load_state_dict(state)
    assert everything(resumed) == whole[12 * stop :]


def test_a_state_saved_in_the_plain_loop_counts_the_step_that_was_handed_out():
    loader = Loader(Numbers(50), 8, 4)
    batches = iter(loader)
    next(batches)
    assert loader.state_dict()["cursor"] == 0
    next(batches)
    assert loader.state_dict()["cursor"] == 8


def test_the_state_is_small():
    loader = Loader(Numbers(50), 8, seed=123456789)
    loader.cursor = 10**12
    assert len(json.dumps(loader.state_dict())) <= 200
    assert len(pickle.dumps(loader.state_dict())) <= 200


def test_a_changed_seed_or_shuffle_is_named():
    state = Loader(Numbers(50), 8).state_dict()
    with pytest.raises(SourceChanged, match="seed"):
        Loader(Numbers(50), 8, seed=1).load_state_dict(state)
    with pytest.raises(SourceChanged, match="shuffle"):
        Loader(Numbers(50), 8, shuffle=Shuffle.none()).load_state_dict(state)
    with pytest.raises(SourceChanged, match="not a loader's state"):
        Loader(Numbers(50), 8).load_state_dict({"cursor": 3})


def test_a_source_that_grew_is_refused_or_goes_on_by_policy():
    loader = Loader(Numbers(50), 30)
    first = everything_of(loader, 1)
    state = loader.state_dict()
    with pytest.raises(SourceChanged, match="had 50 samples when the state was saved, now 60"):
        Loader(Numbers(60), 30).load_state_dict(state)
    grown = Loader(Numbers(60), 10, resized=True)
    grown.load_state_dict(state)
    rest = everything_of(grown, 2)
    assert sorted(first + rest) == list(range(50))
    assert sorted(everything_of(grown, 6)) == list(range(60))


def test_a_source_that_shrank_begins_a_new_epoch_by_policy():
    loader = Loader(Numbers(50), 30)
    everything_of(loader, 1)
    shrunk = Loader(Numbers(20), 10, resized=True)
    shrunk.load_state_dict(loader.state_dict())
    assert sorted(everything_of(shrunk, 2)) == list(range(20))


def everything_of(loader: Loader, steps: int) -> list[int]:
    result: list[int] = []
    for _ in range(steps):
        result += [index for batch in loader.batches() for index in batch["index"].tolist()]
        loader.commit()
    return result


@pytest.mark.parametrize("length", [1, 3])
def test_a_source_smaller_than_a_batch_comes_several_times(length: int):
    seen = everything_of(Loader(Numbers(length), 7), 3)
    assert len(seen) == 21
    assert [sorted(seen[start : start + length]) for start in range(0, 21, length)] == [list(range(length))] * (
        21 // length
    )


def test_an_empty_source_and_one_without_length_are_refused():
    with pytest.raises(ConfigError, match="empty"):
        Loader([], 4)
    with pytest.raises(ConfigError, match="__len__"):
        Loader(iter([1]), 4)


@pytest.mark.parametrize(
    ("how", "match"),
    [
        ({"batch": 2.0}, "batch must be an integer"),
        ({"seed": None}, "seed must be an integer"),
        ({"epochs": 0}, "epochs must be at least 1"),
        ({"shuffle": True}, "Shuffle.full()"),
        ({"workers": "2"}, "workers must be a number"),
        ({"source": "train.bin"}, "not the name of a file"),
        ({"source": {"a": 1}}, "not by keys"),
    ],
)
def test_what_the_loader_cannot_take_is_said_at_once(how: dict[str, Any], match: str):
    with pytest.raises(ConfigError, match=match):
        Loader(**{"source": Numbers(5), "batch": 2, **how})


@pytest.mark.parametrize("workers", [0, 1])
def test_a_tensor_is_a_source(workers: int):
    """It has methods `gather` and `where`, which are not ours."""
    with Loader(torch.arange(12).view(6, 2), 2, epochs=1, workers=workers) as loader:
        assert sorted(torch.cat(list(loader))[:, 0].tolist()) == [0, 2, 4, 6, 8, 10]


def test_a_sample_that_raises_is_named_with_its_line():
    with pytest.raises(SampleError) as caught:
        everything(Loader(Numbers(10, frozenset({4})), 5, epochs=1))
    assert "sample 4 of epoch 0 (Numbers[4])" in str(caught.value)
    assert "ValueError: cannot read 4 (in __getitem__, " in str(caught.value)
    assert "skip=Skip" in caught.value.hint
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_sample_that_raises_is_skipped_with_a_record_up_to_the_limit():
    source = Numbers(40, frozenset({4, 7}))
    loader = Loader(source, 10, epochs=1, skip=Skip(limit=2))
    assert sorted(everything(loader)) == sorted(set(range(40)) - {4, 7})
    assert sorted(each.identity.index for each in loader.skipped) == [4, 7]
    assert loader.state_dict()["skipped"] == 2
    with pytest.raises(TooManySkipped, match="more than 1 samples failed"):
        everything(Loader(source, 10, epochs=1, skip=Skip(limit=1)))
    with pytest.raises(SampleError):
        everything(Loader(source, 10, epochs=1, skip=Skip(errors=(OSError,))))


def test_a_rolled_back_step_counts_its_skipped_samples_once():
    loader = Loader(Numbers(4, frozenset({1})), 4, skip=Skip(limit=1))
    for _ in range(5):
        list(loader.batches())
    loader.commit()
    assert loader.skipped_count == 1


def test_samples_draw_the_same_whatever_was_drawn_before_and_disturb_nobody():
    first = next(iter(Loader(Numbers(50), 8)))["draws"]
    seed_generators(99)
    expected = [random.random(), float(np.random.rand()), float(torch.rand(()))]
    seed_generators(99)
    second = next(iter(Loader(Numbers(50), 8)))["draws"]
    assert torch.equal(first, second)
    assert [random.random(), float(np.random.rand()), float(torch.rand(()))] == expected
    assert not torch.equal(first, next(iter(Loader(Numbers(50), 8, seed=1)))["draws"])


def test_batches_are_collated_as_torch_does():
    batch = next(iter(Loader(Numbers(50), 8, shuffle=Shuffle.none())))
    assert batch["index"].dtype == torch.int64
    assert batch["row"].shape == (8, 3)
    assert batch["name"] == [f"n{index}" for index in range(8)]
    ragged = [np.zeros(length) for length in (1, 2, 3)]
    with pytest.raises(ConfigError, match=r"different shapes.*\(1,\), \(2,\)"):
        next(iter(Loader(ragged, 3)))
    assert next(iter(Loader(ragged, 3, collate=len))) == 3


def test_threads_hand_out_the_same():
    with Loader(Numbers(50), 12, 3, epochs=2, workers=Threads(3)) as loader:
        assert everything(loader) == everything(Loader(Numbers(50), 12, 3, epochs=2))


def test_the_wait_for_data_is_counted_and_recorded_as_a_span(tmp_path: Path):
    record_spans(Ring.create(tmp_path / "ring"))
    try:
        loader = Loader(Numbers(50), 10, epochs=1)
        everything(loader)
    finally:
        record_spans(Ring.void())
    assert loader.waits.count == 5
    assert loader.waits.longest_s <= loader.waits.total_s
    spans = read_spans(tmp_path / "ring")
    assert [(each.name, each.step) for each in spans] == [("data", step) for step in range(5)]
    assert sum(each.seconds for each in spans) <= loader.waits.total_s


@pytest.mark.parametrize("workers", [0, Threads(2)])
def test_memory_serves_again_only_when_a_batch_is_dropped(workers: Any):
    source = [np.full(1 << 16, index) for index in range(30)]
    with Loader(source, 2, epochs=4, workers=workers) as loader:
        kept = [(batch, loader.handed.ids) for number, batch in enumerate(loader) if number % 3]
        assert all((batch == torch.tensor(ids)[:, None]).all() for batch, ids in kept)
