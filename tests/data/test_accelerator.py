"""What happens where there is an accelerator, shown with a fake of the few calls of torch: none was at hand."""

from types import SimpleNamespace
from typing import Any

import numpy as np

from argosy.data.keyed_random import seed_devices
from argosy.data.loader import as_tensors


class Tensor:
    def __init__(self, array: Any) -> None:
        self.array, self.pinned = array, False

    def pin_memory(self) -> "Tensor":
        copy = Tensor(self.array.copy())
        copy.pinned = True
        return copy


def fake(*, available: bool) -> Any:
    return SimpleNamespace(from_numpy=Tensor, accelerator=SimpleNamespace(is_available=lambda: available))


def test_batches_are_pinned_where_there_is_an_accelerator_and_then_let_go_of_their_slab():
    slab = np.arange(12).reshape(3, 4)
    batch = {"x": slab, "names": ["a", "b", "c"]}
    made = as_tensors(batch, fake(available=True))
    assert made["x"].pinned
    assert made["names"] == ["a", "b", "c"]
    assert not np.shares_memory(made["x"].array, slab)
    plain = as_tensors(batch, fake(available=False))
    assert not plain["x"].pinned
    assert np.shares_memory(plain["x"].array, slab)


def test_generators_of_devices_are_keyed_when_they_are_in_use():
    seeds: list[int] = []
    generators = [SimpleNamespace(manual_seed=seeds.append)] * 2
    for used in (False, True):
        cuda = SimpleNamespace(is_initialized=lambda used=used: used, default_generators=generators)
        seed_devices((1 << 64) - 1, SimpleNamespace(cuda=cuda))
        assert seeds == ([(1 << 63) - 1] * 2 if used else [])
