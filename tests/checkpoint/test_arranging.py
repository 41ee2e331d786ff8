"""Who writes what: ranks decide alone, and agree."""

import random
from collections import Counter

import torch

from argosy.checkpoint.arranging import shares
from argosy.transfer import Box, Layout, Member, State, Unit, describe, replicated


def test_a2_each_box_has_one_writer_where_ranks_have_different_tensors():
    """Stages of a pipeline, some tensors on several of them: ranks plan alone and agree."""
    rng = random.Random(0)
    for _ in range(50):
        size = rng.randrange(2, 6)
        layouts: dict[str, Layout] = {}
        for i in range(rng.randrange(3, 30)):
            holders = tuple(sorted(rng.sample(range(size), rng.randrange(1, size + 1))))
            layouts[f"t{i}"] = replicated((rng.choice([3, 20_000, 20_000_000]),), holders)
        written = Counter[tuple[str, Box]]()
        cells = Counter[str]()
        for rank in range(size):
            units = {
                name: Unit(name, {"parameter": Member("parameter", "parameter", "F32", layout)})
                for name, layout in layouts.items()
                if rank in layout.ranks
            }
            for share in shares(State(rank, size, units)):
                written[share.name, share.box] += 1
                cells[share.name] += share.box.cells
        assert set(written.values()) == {1}
        assert cells == {name: layout.shape[0] for name, layout in layouts.items()}


def test_a1_buffers_are_one_ranks_and_the_rest_is_shared():
    model = torch.nn.Sequential(*(torch.nn.BatchNorm1d(20_000) for _ in range(6)))
    writers: dict[str, set[int]] = {"buffer": set(), "parameter": set()}
    for rank in (0, 1):
        for share in shares(describe(model, ranks=(rank, 2))):
            writers[share.member.role].add(rank)
    assert writers == {"buffer": {0}, "parameter": {0, 1}}
