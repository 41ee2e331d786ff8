"""Random numbers by key: the same for the same key, whatever was drawn before."""

import random

import numpy as np
import pytest
import torch

from argosy.core import ConfigError
from argosy.data import Loader, Threads, sample_rng, seed_generators


def draw() -> list[float]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.randn()),
        float(torch.rand(())),
        float(torch.randn(())),
    ]


def test_k1_a_key_decides_what_all_generators_draw():
    seed_generators(7, 3, 0)
    first = draw()
    draw()
    seed_generators(7, 3, 0)
    assert draw() == first
    for key in ((7, 3, 1), (7, 4, 0), (8, 3, 0), (73, 0), ("7", 3, 0)):
        seed_generators(*key)
        assert draw() != first


def test_what_the_training_draws_is_not_disturbed_by_samples_in_its_process():
    """Normal numbers come in pairs, of which the second is kept for later."""
    for spent in (0, 1, 2, 3):
        results: list[list[float]] = []
        for disturbed in (False, True):
            seed_generators(5)
            for _ in range(spent):
                random.gauss(0, 1), np.random.randn(), torch.randn(())
            if disturbed:
                next(iter(Loader(Randomness(), 4)))
            results.append(draw())
        assert results[0] == results[1]


class Randomness:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return random.gauss(0, 1) + float(np.random.randn()) + float(torch.randn(()))


class Drawing:
    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> float:
        return float(sample_rng().random())


def test_sample_rng_is_keyed_by_sample_even_in_threads():
    alone = [batch.tolist() for batch in Loader(Drawing(), 8, epochs=2)]
    with Loader(Drawing(), 8, epochs=2, workers=Threads(3)) as loader:
        assert [batch.tolist() for batch in loader] == alone
    flat = [value for batch in alone for value in batch]
    assert len(set(flat)) == 80


def test_sample_rng_outside_a_sample_is_refused():
    import threading

    caught: list[BaseException] = []

    def ask() -> None:
        try:
            sample_rng()
        except ConfigError as error:
            caught.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    thread.join()
    with pytest.raises(ConfigError, match="called outside a sample"):
        raise caught[0]
