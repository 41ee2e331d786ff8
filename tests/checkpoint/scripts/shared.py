"""A rank that saves by rows, then restores into other layouts: prints what it read. shared.py DIRECTORY"""

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.checkpoint import Saver, restore
from argosy.transfer import Adoption, Member, Placement, Split, State, Unit, sharded

SHAPE, NAMES = (1024, 1024), [f"w{i}" for i in range(6)]
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def whole(name: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(NAMES.index(name))
    return torch.randn(SHAPE, generator=generator)


def state(placement: Placement) -> State:
    layout = sharded(SHAPE, (ranks,), (placement,))
    made = State(rank, ranks)
    for name in NAMES:
        shape = layout.by_rank[rank][0].box.shape
        made.units[name] = Unit(
            name, {"parameter": Member("parameter", "parameter", "F32", layout, torch.zeros(shape))}
        )
    made.units["step"] = Unit(
        "step", {"value": Member("value", "buffer", "F32", sharded((), (ranks,), ("replicate",)))}
    )
    made.units["step"].members["value"] = Member(
        "value", "buffer", "F32", sharded((), (ranks,), ("replicate",)), torch.zeros(())
    )
    targets = {name: member for name, _, member in made.members()}
    made.adopt = lambda _: Adoption(targets, lambda: None)
    return made


def expected(name: str, placement: Placement) -> torch.Tensor:
    return whole(name) if placement == "replicate" else whole(name).chunk(ranks, placement.dim)[rank]


def read_so_far() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


dist.init_process_group("gloo", store=dist.FileStore(f"{sys.argv[1]}.store", ranks), rank=rank, world_size=ranks)
saved = state(Split(0))
for name in NAMES:
    saved.units[name].members["parameter"].local.copy_(expected(name, Split(0)))
saved.units["step"].members["value"].local.fill_(7)
with Saver(sys.argv[1]) as saver:
    saver.save(saved, 1).wait()
found: dict[str, int] = {}
ways: dict[str, Placement] = {"rows": Split(0), "columns": Split(1), "replicas": "replicate"}
for way, placement in ways.items():
    into = state(placement)
    dist.barrier()
    before = read_so_far()
    restore(sys.argv[1], into=into)
    found[way] = read_so_far() - before
    for name in NAMES:
        assert torch.equal(into.units[name].members["parameter"].local, expected(name, placement)), (way, name)
    assert into.units["step"].members["value"].local == 7
print(json.dumps(found))
