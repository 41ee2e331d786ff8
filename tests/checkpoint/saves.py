"""Saves by two ranks and a root as values, and what a restore makes of the files that they left."""

import msgspec
import numpy as np
from checkpoint.disk import CrashingDisk, MemoryFiles

from argosy.checkpoint.chunk_reader import Reading, Sinks
from argosy.checkpoint.format import BLOCK, CorruptShard, Draft, Root, StepNotFound, step_name
from argosy.checkpoint.operations import (
    Operation,
    Segment,
    index_name,
    make_root,
    plan_rest,
    plan_root,
    plan_start,
    segment_name,
)
from argosy.checkpoint.step_index import all_chunks, find_step
from argosy.checkpoint.write_plan import Arrangement, make_index
from argosy.transfer import Copy, Member, Split, Spot, State, Unit, sharded

CELLS = 3000
METRICS = {"loss": 0.5}


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, CELLS, dtype=np.uint32)


def rank_plan(step: int, rank: int, attempt: str) -> tuple[list[Operation], bytes, bytes]:
    """The operations of a rank, the arena they refer to, and its index."""
    layout = sharded((CELLS,), (2,), (Split(0),))
    half = values(step)[rank * CELLS // 2 : (rank + 1) * CELLS // 2].copy()
    state = State(rank, 2, {"w": Unit("w", {"parameter": Member("parameter", "parameter", "U32", layout, half)})})
    arranged = Arrangement(state)
    size, room = arranged.size, len(arranged.header)
    arena = np.zeros(size, np.uint8)
    arena[:room] = np.frombuffer(arranged.header, np.uint8)
    name = step_name(step, attempt)
    sums = arranged.table([half.ctypes.data], arena.ctypes.data).perform()
    draft = Draft(step=step, name=name, rank=rank, size=2, entries=[], border=size, bytes=size, room=room)
    data = msgspec.json.encode(make_index(draft, arranged.entries(sums, f"{name}/{segment_name(rank)}")))
    # Pieces of a block: the second one is written while the snapshot is being made.
    segment = Segment(f"{name}/{segment_name(rank)}", size, BLOCK)
    return plan_start(segment) + plan_rest(segment, size, f"{name}/{index_name(rank)}", data), arena.tobytes(), data


def save(step: int, attempt: str) -> tuple[list[list[Operation]], list[bytes], list[Operation]]:
    """The plans of both ranks, their arenas, and the plan of the root."""
    name = step_name(step, attempt)
    plans = [rank_plan(step, rank, attempt) for rank in (0, 1)]
    indexes = [(f"{name}/{index_name(rank)}", plans[rank][2]) for rank in (0, 1)]
    root = Root(step=step, session=attempt, saved_at=float(step), size=2, parts=[], metrics=METRICS)
    root = make_root(root, indexes)
    return [plan[0] for plan in plans], [plan[1] for plan in plans], plan_root(name, root)


SAVES = {step: save(step, f"{step:08x}") for step in (1, 2, 3)}


def committed(step: int) -> dict[str, bytes]:
    """The files of a whole save."""
    disk = CrashingDisk()
    ranks, arenas, root = SAVES[step]
    for plan, arena in zip([*ranks, root], [*arenas, b""], strict=True):
        disk.arena = arena
        for operation in plan:
            disk.perform(operation)
    return disk.after_kill()


def loaded(files: dict[str, bytes]) -> int | None:
    """The step that a restore would take: the newest whose every byte is verified; C1 is checked here."""
    try:
        for step in find_step(MemoryFiles(files), None, "memory"):
            found = np.zeros(CELLS, np.uint32)

            def sink(entry, box, address, found=found):
                to = Spot(found.ctypes.data + 4 * box.start[0], (1,))
                return [Copy(box, entry.shape, 4, Spot(address, (1,)), to)]

            try:
                Reading(MemoryFiles(files), all_chunks(step.entries), Sinks(copies=sink)).fill()
            except CorruptShard:
                continue
            assert {(each.name, each.shape, each.dtype) for each in step.entries} == {("w", (CELLS,), "U32")}, "C1"
            assert step.root.metrics == METRICS, "C1: what is said of it"
            assert np.array_equal(found, values(step.root.step)), "C1: what loads is not a saved step"
            return step.root.step
    except StepNotFound:
        pass
    return None
