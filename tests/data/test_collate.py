"""Stacking samples as they come gives the same batch as stacking them at the end."""

import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from seeds import each

from argosy.core import ConfigError
from argosy.data.collate import BatchStack, in_heap, stack

Pair = namedtuple("Pair", "left right")


def one_of(dice: random.Random, depth: int) -> Any:
    """A maker of samples of one form, now and then of another dtype or order of keys."""
    kind = dice.choice(
        ["array", "tensor", "scalar", "number", "text", "none", "tuple", "list", "dict", "pair", "empty"]
    )
    if depth == 0 and kind in ("tuple", "list", "dict", "pair"):
        kind = "array"
    shape = tuple(dice.randrange(1, 4) for _ in range(dice.randrange(1, 3)))
    parts = [one_of(dice, depth - 1) for _ in range(2)] if kind in ("tuple", "list", "dict", "pair") else []
    odd = dice.random() < 0.2

    def make(number: int) -> Any:
        dtype = np.float64 if odd and number % 3 == 2 else np.float32
        match kind:
            case "array":
                return np.full(shape, number, dtype)
            case "tensor":
                return torch.full(shape, float(number))
            case "scalar":
                return np.float32(number)
            case "number":
                return number
            case "text":
                return f"t{number}"
            case "none":
                return None
            case "empty":
                return ()
            case "dict":
                keys = ["a", "b"] if not odd or number % 2 else ["b", "a"]
                return {key: parts["ab".index(key)](number) for key in keys}
            case "pair":
                return Pair(*(part(number) for part in parts))
            case _:
                made = [part(number) for part in parts]
                return tuple(made) if kind == "tuple" else made

    return make


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and left.shape == right.shape and bool((left == right).all())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    return bool(left == right)


@each("seed", range(200))
def test_as_they_come_is_as_at_the_end(seed: int):
    dice = random.Random(seed)
    make, count = one_of(dice, 2), dice.randrange(1, 7)
    samples = [make(number) for number in range(count)]
    growing = BatchStack(count + dice.randrange(2), in_heap)  # A skipped sample leaves room.
    for sample in samples:
        growing.add(sample)
    assert same(growing.finish(), stack(samples))


def test_a_source_that_uses_one_buffer_again_is_right():
    buffer, growing = np.zeros(3), BatchStack(2, in_heap)
    for number in (1, 2):
        buffer[...] = number
        growing.add(buffer)
    assert growing.finish().tolist() == [[1, 1, 1], [2, 2, 2]]


@pytest.mark.parametrize(
    ("first", "second"),
    [(np.zeros(2), np.zeros(3)), ({"a": 1}, {"b": 1}), ((1, 2), (1, 2, 3)), ((np.zeros(2), 1), (np.zeros(3), 1))],
)
def test_what_does_not_fit_together_is_said(first: Any, second: Any):
    growing = BatchStack(2, in_heap)
    growing.add(first)
    growing.add(second)
    with pytest.raises(ConfigError, match="different"):
        growing.finish()
