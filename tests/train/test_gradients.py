"""Gradients that are infinite or not a number are found, of whatever kind they are."""

from typing import Any

import pytest
import torch

from argosy.train.gradients import is_finite

KINDS: dict[str, Any] = {
    "float32": torch.ones(5, 7),
    "float64": torch.ones(5, dtype=torch.float64),
    "float16": torch.full((5,), 65504.0, dtype=torch.float16),
    "bfloat16": torch.ones(5, dtype=torch.bfloat16),
    "largest": torch.full((5,), torch.finfo(torch.float32).max),  # Their norm is infinite.
    "complex": torch.ones(5, dtype=torch.complex64),
    "transposed": torch.ones(5, 7).t(),
    "every second": torch.ones(10)[::2],
    "sparse": torch.eye(5).to_sparse(),
    "a scalar": torch.tensor(1.0),
}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swept", [True, False])
def test_one_number_among_many(kind: str, value: float, swept: bool):
    room = 1 << 20 if swept else 0
    found = KINDS[kind].clone()
    many = [*(each.clone() for each in KINDS.values()), torch.empty(0), found]
    assert is_finite(many, room)
    if found.is_sparse:
        found = many[-1] = found * value
    else:
        found.view(-1)[-1:].fill_(value) if found.is_contiguous() else found[-1:].fill_(value)
    assert not is_finite(many, room)


def test_none_at_all():
    assert is_finite([])


def test_what_lies_beside_a_gradient_is_not_looked_at():
    memory = torch.full((10,), float("nan"))
    memory[::2] = 1.0
    assert is_finite([memory[::2]])
