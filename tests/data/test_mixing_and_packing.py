"""Mixing by quotas and packing by windows, compared with slow and plain implementations."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from seeds import each

from argosy.core import ConfigError
from argosy.data import Loader, Mix, Pack, Shuffle, document_mask
from argosy.data.order import Order
from argosy.data.pack import PackPlan, pack_window
from argosy.data.plan import MixPlan, quotas


@each("seed", range(30))
def test_quotas_are_as_near_to_the_weights_as_whole_numbers_can_be(seed: int):
    weights = np.random.default_rng(seed).uniform(0.01, 1, 1 + seed % 7).tolist()
    result = quotas(weights, 1000)
    assert sum(result) == 1000
    exact = [weight / sum(weights) * 1000 for weight in weights]
    assert all(abs(whole - each) < 1 for whole, each in zip(result, exact, strict=True))


def test_weights_that_cannot_be_kept_are_refused():
    for weights in ([1.0, 0.0], [1.0, -1.0], [1.0, 1e-9], [float("nan"), 1.0]):
        with pytest.raises(ConfigError):
            Mix([[1], [2]], weights)


@each("seed", range(8))
def test_x1_x2_a_mix_is_what_a_plain_count_gives(seed: int):
    random = np.random.default_rng(seed)
    lengths = random.integers(1, 90, 1 + seed % 4).tolist()
    mix = Mix([range(length) for length in lengths], random.uniform(0.1, 1, len(lengths)).tolist())
    plan = MixPlan(mix, seed)
    rows = plan.rows(0, 3000)
    drawn: list[list[int]] = [[] for _ in lengths]
    for source, _, index in rows.tolist():
        drawn[source].append(index)
    for block in range(3):
        counts = np.bincount(rows[block * 1000 : block * 1000 + 1000, 0], minlength=len(lengths))
        assert counts.tolist() == plan.quotas
    for number, (length, seen) in enumerate(zip(lengths, drawn, strict=True)):
        assert seen == plan.orders[number].at(np.arange(len(seen)))[1].tolist()
        for start in range(0, len(seen) - length + 1, length):
            assert sorted(seen[start : start + length]) == list(range(length))
    pieces = np.concatenate([plan.rows(start, 37) for start in range(0, 2997, 37)])
    assert np.array_equal(pieces, rows[: len(pieces)])


def test_a_mix_resumes():
    mix = Mix([np.arange(30), np.arange(100, 150)], [3, 1])
    whole = [batch.tolist() for batch, _ in zip(Loader(mix, 16), range(20), strict=False)]
    loader = Loader(mix, 16)
    for _, _ in zip(loader, range(7), strict=False):
        pass
    resumed = Loader(mix, 16)
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())))
    assert [batch.tolist() for batch, _ in zip(resumed, range(12), strict=False)] == whole[8:20]


def plain_packing(lengths: list[int], row: int) -> list[list[tuple[int, int, int]]]:
    """Best fit, largest first, without any index."""
    pieces = [(m, s, min(s + row, n)) for m, n in enumerate(lengths) for s in range(0, n, row)]
    pieces.sort(key=lambda piece: (-(piece[2] - piece[1]), piece[0], piece[1]))
    rows: list[list[tuple[int, int, int]]] = []
    for piece in pieces:
        size = piece[2] - piece[1]
        free = [(row - sum(stop - start for _, start, stop in each), number) for number, each in enumerate(rows)]
        fitting = sorted(each for each in free if each[0] >= size)
        if fitting:
            rows[fitting[0][1]].append(piece)
        else:
            rows.append([piece])
    return sorted(rows, key=lambda each: (each[0][0], each[0][1]))


@each("seed", range(40))
def test_g1_packing_is_what_the_plain_implementation_gives(seed: int):
    random = np.random.default_rng(seed)
    row = int(random.integers(1, 60))
    lengths = random.integers(0, 3 * row, int(random.integers(0, 80))).tolist()
    packed = pack_window(lengths, row)
    assert [[tuple(piece) for piece in each] for each in packed] == plain_packing(lengths, row)
    tokens = sorted((p.sample, t) for each in packed for p in each for t in range(p.start, p.stop))
    assert tokens == [(member, token) for member, length in enumerate(lengths) for token in range(length)]
    assert all(sum(p.stop - p.start for p in each) <= row for each in packed)


def documents(count: int) -> list[Any]:
    random = np.random.default_rng(count)
    return [index * 1000 + np.arange(random.integers(1, 40)) for index in range(count)]


@pytest.mark.parametrize("workers", [0, 1])
def test_packed_rows_hold_every_token_once_per_epoch(workers: int):
    source = documents(70)
    with Loader(Pack(source, 32, window=16), 5, epochs=2, workers=workers) as loader:
        batches = list(loader)
    seen = sorted(token for batch in batches for token in batch["tokens"][batch["documents"] > 0].tolist())
    assert seen == sorted(token for document in source for token in document.tolist() * 2)
    for batch in batches:
        for tokens, positions, numbers in zip(batch["tokens"], batch["positions"], batch["documents"], strict=True):
            inside = numbers > 0
            assert (tokens[inside] % 1000 == positions[inside]).all()
            assert (numbers.diff()[inside[1:]] >= 0).all()


def test_packed_rows_resume_from_a_small_state():
    source = Pack(documents(70), 32, window=16)
    whole = [batch["tokens"].tolist() for batch in Loader(source, 5, epochs=3)]
    for stop in (1, 8, 20):
        loader = Loader(source, 5, epochs=3)
        for _, _ in zip(range(stop), loader, strict=False):
            pass
        state = json.loads(json.dumps(loader.state_dict()))
        resumed = Loader(source, 5, epochs=3)
        resumed.load_state_dict(state)
        assert [batch["tokens"].tolist() for batch in resumed] == whole[stop:]
        plan = PackPlan(source, Shuffle.full(), 0)
        plan.restore(state, state["cursor"], resize=False)
        assert plan.state(state["cursor"]) == {key: state[key] for key in plan.state(state["cursor"])}


def test_the_mask_keeps_documents_apart():
    numbers = np.array([1, 1, 2, 2, 0])
    expected = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert document_mask(numbers).astype(int).tolist() == expected
    assert document_mask(torch.tensor(numbers)).int().tolist() == expected


def test_windows_do_not_go_across_epochs():
    order = Order(70, Shuffle.full(), 0)
    plan = PackPlan(Pack(documents(70), 32, window=16), Shuffle.full(), 0)
    indices = np.concatenate([plan._packed(window)[0] for window in range(10)])
    assert np.array_equal(indices, order.at(np.arange(140))[1])
