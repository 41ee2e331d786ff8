"""A few ranks load a state into other layouts: prints one JSON line. Started by bench/scale.py.

relayout.py DIRECTORY MEGABYTES        with RANK, WORLD_SIZE and RENDEZVOUS in the environment
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from argosy.checkpoint import Saver, restore
from argosy.transfer import Adoption, Layout, Member, Placement, Split, State, Unit, sharded

LAYERS, SIDE = 16, 1024
directory, size = sys.argv[1], int(sys.argv[2]) << 20
rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
names = [f"{layer}.{key}" for layer in range(LAYERS) for key in ("parameter", "exp_avg", "exp_avg_sq")]
shape = (size // len(names) // 4 // SIDE, SIDE)


def held(layout: Layout) -> torch.Tensor | None:
    """Memory for what this rank has of a tensor, touched."""
    pieces = layout.by_rank.get(rank, ())
    return torch.randn(sum(piece.box.cells for piece in pieces)) if pieces else None


def state_of(placements: tuple[Placement, ...]) -> State:
    layout = sharded(shape, (ranks,), placements)
    state = State(rank, ranks)
    for name in names:
        member = Member("parameter", "parameter", "F32", layout, held(layout))
        state.units[name] = Unit(name, {"parameter": member})
    targets = {name: member for name, _, member in state.members()}
    state.adopt = lambda _: Adoption(targets, lambda: None)
    return state


def load(into: State) -> float:
    for path in Path(directory).rglob("*.safetensors"):
        fd = os.open(path, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    dist.barrier()
    begun = time.perf_counter()
    restore(directory, into=into)
    return time.perf_counter() - begun


def loading() -> dict[str, list[float]]:
    """Saved by rows; loaded by rows again, and by columns, of which every rank needs a part of each chunk."""
    with Saver(directory) as saver:
        saver.save(state_of((Split(0),)), 1).wait()
    rows, columns = state_of((Split(0),)), state_of((Split(1),))
    found: dict[str, list[float]] = {"rows": [], "columns": []}
    for _ in range(4):
        found["rows"].append(load(rows))
        found["columns"].append(load(columns))
    return {way: times[1:] for way, times in found.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["RENDEZVOUS"], ranks), rank=rank, world_size=ranks)
    answer = loading()
    if rank == 0:
        print(json.dumps(answer))
