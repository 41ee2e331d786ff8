"""Plan, write the manifest of, commit and open a state of 100 TB on 16,384 ranks, with fake bytes; prints JSON.

    python hundred_terabytes.py DIRECTORY [STAGES]

A decoder of 128 layers over 16 stages, each on 128 FSDP groups of 8 tensor-parallel ranks, restored on half the ranks.
Segments are sparse files of the right size. The ranks of one stage are planned; the other stages are alike, so their
indexes are the same with other names, and some are compared with what the planner says.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import msgspec
import numpy as np

from argosy.checkpoint.chunk_reader import grouped
from argosy.checkpoint.format import Draft, Index, Root, step_name
from argosy.checkpoint.operations import index_name, make_root, plan_root, segment_name
from argosy.checkpoint.restore_plan import Wish, fit
from argosy.checkpoint.restore_targets import wanted_chunks
from argosy.checkpoint.saver import said
from argosy.checkpoint.step_index import FilesSource
from argosy.checkpoint.stores import LocalStore
from argosy.checkpoint.write_plan import Arrangement, make_index
from argosy.transfer import Adoption, Member, Split, State, Unit, replicated, sharded

HIDDEN, LAYERS, TP = 73_728, 8, 8
COLUMNS, ROWS, VECTOR = (Split(0, TP), Split(0)), (Split(0), Split(1)), (Split(0), "replicate")
TENSORS = {
    "qkv": ((3 * HIDDEN, HIDDEN), COLUMNS),
    "out": ((HIDDEN, HIDDEN), ROWS),
    "up": ((4 * HIDDEN, HIDDEN), COLUMNS),
    "down": ((HIDDEN, 4 * HIDDEN), ROWS),
    "norm1": ((HIDDEN,), VECTOR),
    "norm2": ((HIDDEN,), VECTOR),
}


def stage_units(stage: int, dp: int) -> dict[str, Unit]:
    """What the ranks of a stage hold, with Adam's state."""
    ranks = tuple(range(stage * dp * TP, (stage + 1) * dp * TP))
    units: dict[str, Unit] = {}
    for layer in range(stage * LAYERS, (stage + 1) * LAYERS):
        for name, (shape, placements) in TENSORS.items():
            layout = sharded(shape, (dp, TP), placements, ranks)
            members = {"parameter": Member("parameter", "parameter", "F32", layout)}
            members |= {key: Member(key, "moment", "F32", layout) for key in ("exp_avg", "exp_avg_sq")}
            members["step"] = Member("step", "step", "F32", replicated((), ranks), None, "scalar")
            units[f"layers.{layer}.{name}"] = Unit(f"layers.{layer}.{name}", members, {"lr": 1e-4})
    return units


def planned(state: State, name: str) -> tuple[bytes, int]:
    """The index that a rank writes, and the size of its segment."""
    arranged = Arrangement(state)
    entries = arranged.entries(np.zeros((len(arranged.share_of), 2), np.uint64), f"{name}/{segment_name(state.rank)}")
    more = {"border": arranged.border, "bytes": arranged.size, "room": len(arranged.header), **said(state)}
    draft = Draft(step=1, name=name, rank=state.rank, size=state.size, entries=[], **more)
    return msgspec.json.encode(make_index(draft, entries)), arranged.size


def sorted_entries(index: bytes) -> list[object]:
    found = msgspec.json.decode(index, type=Index)
    return sorted((each.name, each.box, each.sums) for each in found.entries)


def moved(index: bytes, rank: int, stage: int, dp: int) -> bytes:
    """The index of the rank at the same place of another stage than the first."""
    there = rank + stage * dp * TP
    index = index.replace(f'"rank":{rank},'.encode(), f'"rank":{there},'.encode(), 1)
    index = index.replace(f"rank-{rank:05d}".encode(), f"rank-{there:05d}".encode())
    for layer in reversed(range(LAYERS)):
        index = index.replace(f"layers.{layer}.".encode(), f"layers.{layer + stage * LAYERS}.".encode())
    return index


def save(directory: Path, stages: int, dp: int) -> dict[str, float]:
    """Plan, index, then do what the root does."""
    store, name, total = LocalStore(directory), step_name(1, "aa"), stages * dp * TP
    (directory / name).mkdir(parents=True)
    plans: list[float] = []
    first, last = stage_units(0, dp), stage_units(stages - 1, dp)
    for rank in range(dp * TP):
        begun = time.perf_counter()
        index, size = planned(State(rank, total, first), name)
        plans.append(time.perf_counter() - begun)
        for stage in range(stages):
            there = rank + stage * dp * TP
            (directory / name / index_name(there)).write_bytes(moved(index, rank, stage, dp))
            with (directory / name / segment_name(there)).open("wb") as file:
                file.truncate(size)
        if rank % 100 == 7:
            there = rank + (stages - 1) * dp * TP
            found = (directory / name / index_name(there)).read_bytes()
            wanted = planned(State(there, total, last), name)[0]
            assert sorted_entries(found) == sorted_entries(wanted), "stages are not alike"
    begun = time.perf_counter()
    paths = [f"{name}/{index_name(rank)}" for rank in range(total)]
    root = Root(step=1, session="aa", saved_at=time.time(), size=total, parts=[])
    root = make_root(root, [(path, store.files.read(path)) for path in paths])
    manifest = time.perf_counter() - begun
    store.perform(plan_root(name, root))
    commit = time.perf_counter() - begun - manifest
    return {
        "plan": statistics.median(plans),
        "plan_max": max(plans),
        "manifest": manifest,
        "commit": commit,
        "terabytes": root.bytes / 1e12,
        "objects": len(store.files.listdir(name)),
    }


def restore(directory: Path, stages: int, dp: int) -> dict[str, float]:
    """Open the step as one rank of another layout does, up to the reads that it would make."""
    stage = stages // 2
    live = State(stage * dp * TP + dp * TP // 2, stages * dp * TP, stage_units(stage, dp))

    def adopt(stored: State) -> Adoption:
        here = {name: member for name, _, member in live.members()}
        return Adoption(here, lambda: None)

    live.adopt = adopt
    begun = time.perf_counter()
    source = FilesSource(LocalStore(directory).files, "disk")
    (candidate,) = source.candidates()
    _, step = source.open(candidate.name)
    opened = time.perf_counter() - begun
    fitted = fit(step, live, Wish(partial=True))
    wanted = wanted_chunks(fitted.entries, fitted.targets, live.rank)
    reads = list(grouped(wanted))
    held = sum(group.last - group.start for group in reads)
    return {"open": opened, "restore": time.perf_counter() - begun, "reads": len(reads), "gigabytes": held / 1e9}


def main() -> None:
    directory, stages = Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 16
    found = save(directory, stages, 128)
    found |= restore(directory, stages, 64)
    # Of this process alone: getrusage also counts the one that started it.
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    found["peak"] = int(line.split()[1]) / 2**20
    print(json.dumps(found))


if __name__ == "__main__":
    main()
