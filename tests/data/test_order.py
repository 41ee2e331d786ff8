"""The order of samples: bijective, keyed, the same however it is asked for."""

import numpy as np
import pytest
from seeds import each

from argosy.core import ConfigError
from argosy.data.order import Order, Shuffle
from argosy.data.permute import Permutation, derive_key
from argosy.data.share import check_share, share

SHUFFLES = [Shuffle.full(), Shuffle.none(), Shuffle.blocks(7, 3), Shuffle.blocks(16, 1), Shuffle.blocks(5, 100)]


@each("size", [*range(1, 130), 1000, 4095, 4096, 4097, 1 << 20])
def test_f1_every_size_is_permuted_and_found_again(size: int):
    permutation = Permutation(size, derive_key("test", size))
    order = permutation.at(np.arange(size))
    assert np.array_equal(np.sort(order), np.arange(size))
    assert np.array_equal(permutation.find(order), np.arange(size))


def test_f2_the_order_is_pinned_because_checkpoints_rely_on_it():
    assert Permutation(10, 1).at(np.arange(10)).tolist() == [5, 6, 0, 1, 3, 7, 9, 2, 4, 8]
    assert Permutation(10**9, 7).at(np.array([0, 1, 899_999_999])).tolist() == [807990312, 92639726, 346715904]


def test_large_sizes_stay_inside_and_are_inverted():
    for size in (10**9, (1 << 40) + 1, 1 << 62):
        permutation = Permutation(size, 3)
        offsets = np.random.default_rng(0).integers(0, size, 1000)
        elements = permutation.at(offsets)
        assert elements.min() >= 0
        assert elements.max() < size
        assert np.array_equal(permutation.find(elements), offsets)


def test_neighbours_are_torn_apart():
    order = Permutation(100_000, 5).at(np.arange(100_000)).astype(float)
    assert abs(np.corrcoef(order[:-1], order[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(order, np.arange(100_000))[0, 1]) < 0.02


def test_another_key_is_another_order():
    orders = {tuple(Permutation(20, key).at(np.arange(20)).tolist()) for key in range(50)}
    assert len(orders) == 50


@pytest.mark.parametrize("shuffle", SHUFFLES)
@pytest.mark.parametrize("length", [1, 2, 6, 7, 8, 50, 113, 320])
def test_o1_each_epoch_has_each_index_once(shuffle: Shuffle, length: int):
    epochs, indices = Order(length, shuffle, seed=3).at(np.arange(3 * length))
    assert epochs.tolist() == sorted([0, 1, 2] * length)
    for epoch in range(3):
        assert sorted(indices[epochs == epoch].tolist()) == list(range(length))


@pytest.mark.parametrize("shuffle", SHUFFLES)
def test_o2_positions_may_be_asked_in_any_pieces(shuffle: Shuffle):
    order = Order(113, shuffle, seed=1)
    whole = order.at(np.arange(400))[1]
    pieces = np.concatenate([order.at(np.arange(start, min(start + 17, 400)))[1] for start in range(0, 400, 17)])
    assert np.array_equal(whole, pieces)
    scattered = np.random.default_rng(0).permutation(400)
    assert np.array_equal(order.at(scattered)[1], whole[scattered])


def test_blocks_keep_neighbours_near():
    """No more blocks are open at a time than the window holds."""
    indices = Order(1000, Shuffle.blocks(10, 4), seed=0).at(np.arange(1000))[1]
    for start in range(0, 960, 40):
        assert len(set((indices[start : start + 40] // 10).tolist())) <= 5


def test_epochs_differ_and_seeds_differ():
    first, second = (Order(50, Shuffle.full(), seed).at(np.arange(100))[1] for seed in (0, 1))
    assert first[:50].tolist() != first[50:].tolist()
    assert first.tolist() != second.tolist()


def test_a_source_that_grew_ends_its_epoch_as_it_began():
    order = Order(10, Shuffle.full(), seed=0)
    before = order.at(np.arange(20))[1]
    order.change_length(13, position=14)
    epochs, indices = order.at(np.arange(14, 20 + 13 + 13))
    assert indices[:6].tolist() == before[14:].tolist()
    assert epochs.tolist() == [1] * 6 + [2] * 13 + [3] * 13
    assert sorted(indices[6:19].tolist()) == sorted(indices[19:].tolist()) == list(range(13))
    assert order.end_of(3) == 33


def test_an_empty_source_is_refused():
    with pytest.raises(ConfigError, match="empty"):
        Order(0, Shuffle.full(), seed=0)


@pytest.mark.parametrize("size", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize(("count", "micro"), [(64, 8), (64, None), (61, 8), (5, 8), (3, None), (1, 4)])
def test_s1_the_shares_are_the_batch(count: int, micro: int | None, size: int):
    pieces = [piece for rank in range(size) for piece in share(count, micro, rank, size)]
    assert [sample for start, stop in pieces for sample in range(start, stop)] == list(range(count))


def test_s2_microbatches_are_cut_alike_for_any_number_of_ranks():
    cuts = [[piece for rank in range(size) for piece in share(64, 8, rank, size)] for size in range(1, 9)]
    assert all(cut == cuts[0] for cut in cuts)


@pytest.mark.parametrize(("batch", "micro", "size"), [(0, None, 1), (8, 3, 1), (8, 0, 1), (8, 4, 3), (2, None, 3)])
def test_what_cannot_be_shared_is_refused(batch: int, micro: int | None, size: int):
    with pytest.raises(ConfigError):
        check_share(batch, micro, size)
