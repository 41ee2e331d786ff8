"""Every crash of a save by two ranks and a root: C1, C2 and C3 hold, and each sync that is left out is caught."""

import ctypes
import random
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from checkpoint.disk import CrashingDisk, MemoryFiles

from argosy.checkpoint.arranging import arrange, copies, entry, shares
from argosy.checkpoint.format import CorruptShard, Index, Root, StepNotFound, step_name, sums_text
from argosy.checkpoint.operations import (
    Ack,
    Operation,
    Rename,
    Sync,
    SyncDir,
    Unlink,
    index_name,
    make_root,
    plan_deletions,
    plan_rank,
    plan_root,
    segment_name,
)
from argosy.checkpoint.reading import all_chunks, find_step
from argosy.checkpoint.verifying import read_chunks
from argosy.transfer import Member, Split, State, Unit, copy_boxes, sharded

CELLS = 3000
Actor = tuple[int, list[Operation], bytes]


def values(step: int) -> np.ndarray:
    return np.random.default_rng(step).integers(0, 2**32, CELLS, dtype=np.uint32)


def rank_plan(step: int, rank: int, attempt: str) -> tuple[list[Operation], bytes, bytes]:
    """The operations of a rank, the arena they refer to, and its index."""
    layout = sharded((CELLS,), (2,), (Split(0),))
    half = values(step)[rank * CELLS // 2 : (rank + 1) * CELLS // 2].copy()
    state = State(rank, 2, {"w": Unit("w", {"parameter": Member("parameter", "parameter", "U32", layout, half)})})
    found = shares(state)
    text, _, size = arrange(found)
    arena = np.zeros(size, np.uint8)
    arena[: len(text)] = np.frombuffer(text, np.uint8)
    name = step_name(step, attempt)
    sums = [sums_text(s) for s in copy_boxes(copies(found[0], half.ctypes.data, arena.ctypes.data))]
    index = Index(rank=rank, step=step, entries=[entry(found[0], f"{name}/{segment_name(rank)}", sums)])
    data = msgspec.json.encode(index)
    return plan_rank(name, rank, size, data), arena.tobytes(), data


def save(step: int, attempt: str) -> tuple[list[list[Operation]], list[bytes], list[Operation]]:
    """The plans of both ranks, their arenas, and the plan of the root."""
    name = step_name(step, attempt)
    plans = [rank_plan(step, rank, attempt) for rank in (0, 1)]
    indexes = [(f"{name}/{index_name(rank)}", plans[rank][2]) for rank in (0, 1)]
    root = make_root(Root(step=step, session=attempt, saved_at=float(step), size=2, parts=[]), indexes)
    return [plan[0] for plan in plans], [plan[1] for plan in plans], plan_root(name, root)


Change = Callable[[list[Operation]], list[Operation]]


def same(operations: list[Operation]) -> list[Operation]:
    return operations


SAVES = {step: save(step, f"{step:08x}") for step in (1, 2, 3)}


def history(rng: random.Random, change: Change = same, *, waits: bool = True) -> Iterator[CrashingDisk]:
    """Save steps 1, 2 and 3, keeping two; yield the disk after each operation, ranks interleaved at random."""
    disk = CrashingDisk()
    for step, (ranks, arenas, root) in SAVES.items():
        queues = [change(list(plan)) for plan in ranks]
        root_queue = change(list(root))
        while any(queues) or root_queue:
            ready = [i for i in (0, 1) if queues[i]]
            if root_queue and (not ready or (not waits and rng.random() < 0.3)):
                disk.perform(root_queue.pop(0))
            else:
                chosen = rng.choice(ready)
                disk.arena = arenas[chosen]
                disk.perform(queues[chosen].pop(0))
            yield disk
        if step == 3:
            present: dict[str, list[str]] = {}
            for path in disk.names:
                present.setdefault(path.partition("/")[0], []).append(path.partition("/")[2])
            known = {step_name(s, f"{s:08x}"): Root(step=s, session="", saved_at=s, size=2, parts=[]) for s in SAVES}
            keep = [step_name(s, f"{s:08x}") for s in (2, 3)]
            for operation in change(plan_deletions(present, known, keep)):
                disk.perform(operation)
                yield disk


def loaded(files: dict[str, bytes]) -> int | None:
    """The step that a restore would take: the newest whose every byte is verified; C1 is checked here."""
    try:
        for step in find_step(MemoryFiles(files), None):
            found = np.zeros(CELLS, np.uint32)

            def sink(entry, box, address, found=found):
                raw = ctypes.string_at(address, box.cells * 4)
                found[box.start[0] : box.stop[0]] = np.frombuffer(raw, np.uint32)
                return []

            try:
                read_chunks(MemoryFiles(files), all_chunks(step.entries), sink)
            except CorruptShard:
                continue
            assert np.array_equal(found, values(step.root.step)), "C1: what loads is not a saved step"
            return step.root.step
    except StepNotFound:
        pass
    return None


def violation(disk: CrashingDisk, files: dict[str, bytes]) -> str | None:
    """What this crash broke, if anything."""
    newest = max(disk.acked, default=None)
    step = loaded(files)
    if newest is not None and (step is None or step < newest):
        return f"C2: step {newest} was acknowledged, {step} loads"
    for kept in {2, 3} & set(disk.acked):
        alone = {path: data for path, data in files.items() if path.startswith(f"step-{kept:012d}-")}
        if loaded(alone) != kept:
            return f"C3: step {kept} is kept and does not load"
    return None


def crashes(seed: int, change: Change = same, *, samples: int, waits: bool = True) -> Iterator[str]:
    rng = random.Random(seed)
    for disk in history(rng, change, waits=waits):
        states = [disk.after_kill(), disk.after_power_cut()]
        states += [disk.after_anything(rng) for _ in range(samples)]
        for files in states:
            if found := violation(disk, files):
                yield found


@pytest.mark.parametrize("seed", range(6))
def test_c1_c2_c3_hold_at_every_prefix_of_a_save(seed: int):
    assert next(crashes(seed, samples=8), None) is None


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(100, 400))
def test_c1_c2_c3_hold_in_a_hundred_thousand_crashes(seed: int):
    assert next(crashes(seed, samples=12), None) is None


def without(kind: type, which: str) -> Change:
    def change(operations: list[Operation]) -> list[Operation]:
        return [o for o in operations if not (isinstance(o, kind) and which in str(getattr(o, "path", "")))]

    return change


@pytest.mark.parametrize(
    ("kind", "which"),
    [
        (Sync, ".safetensors"),
        (Sync, "rank-00000.json"),
        (Sync, "rank-00001.json"),
        (Sync, "root.json"),
        (SyncDir, "step-"),
        (SyncDir, "."),
    ],
)
def test_each_sync_is_needed(kind: type, which: str):
    remove = without(kind, which)
    if which == ".":

        def remove(operations: list[Operation]) -> list[Operation]:
            return [o for o in operations if o != SyncDir(".")]

    found = (next(crashes(seed, remove, samples=4), None) for seed in range(20))
    assert any(found)


def test_the_root_must_wait_for_the_ranks():
    found = (next(crashes(seed, samples=2, waits=False), None) for seed in range(20))
    assert any(found)


def test_an_acknowledgement_before_the_sync_is_caught():
    def early(operations: list[Operation]) -> list[Operation]:
        acks = [o for o in operations if isinstance(o, Ack)]
        return acks + [o for o in operations if not isinstance(o, Ack)]

    assert any(next(crashes(seed, early, samples=2), None) for seed in range(5))


def test_c3_what_a_kept_step_refers_to_is_not_deleted():
    names = [step_name(step, "aa") for step in (1, 2, 3)]
    roots = {name: Root(step=i + 1, session="", saved_at=0, size=1, parts=[]) for i, name in enumerate(names)}
    roots[names[2]] = msgspec.structs.replace(roots[names[2]], needs=[names[0]])
    present = {name: ["root.json", "rank-00000.json", "rank-00000.safetensors"] for name in names}
    deleted = [o for o in plan_deletions(present, roots, [names[2]]) if isinstance(o, Unlink)]
    assert {o.path.partition("/")[0] for o in deleted} == {names[1]}
    assert deleted[0].path.endswith("root.json")


def test_a_save_under_way_is_not_deleted_and_an_old_attempt_is():
    names = [step_name(step, "aa") for step in (1, 2, 3)]
    roots = {names[1]: Root(step=2, session="", saved_at=0, size=1, parts=[])}
    present = {name: ["rank-00000.json"] for name in names}
    deleted = plan_deletions(present, roots, [names[1]])
    assert {o.path.partition("/")[0] for o in deleted} == {names[0]}


def test_c1_a_flipped_byte_anywhere_is_found():
    disk = CrashingDisk()
    ranks, arenas, root = SAVES[1]
    for plan, arena in zip(ranks, arenas, strict=True):
        disk.arena = arena
        for operation in plan:
            disk.perform(operation)
    for operation in root:
        disk.perform(operation)
    clean = disk.after_kill()
    assert loaded(clean) == 1
    rng = random.Random(0)
    for path, data in clean.items():
        for _ in range(30):
            at = rng.randrange(4096 if path.endswith("safetensors") else 0, len(data) - 1)
            flipped = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
            assert loaded({**clean, path: flipped}) is None
        assert loaded({**clean, path: data[:-9]}) is None
        assert loaded({name: each for name, each in clean.items() if name != path}) is None


def test_names_appear_only_when_bytes_are_durable():
    for plan in SAVES[1][0]:
        renames = [i for i, o in enumerate(plan) if isinstance(o, Rename)]
        syncs = [i for i, o in enumerate(plan) if isinstance(o, Sync)]
        assert max(syncs) < min(renames)
