"""Every crash of a save by two ranks and a root: C1, C2 and C3 hold, and each sync that is left out is caught."""

import random
from collections.abc import Callable, Iterator

import msgspec
import pytest
from checkpoint.disk import CrashingDisk
from checkpoint.saves import SAVES, loaded

from argosy.checkpoint.format import Root, step_name
from argosy.checkpoint.operations import Ack, Operation, Rename, Sync, SyncDir, Unlink, plan_deletions

Change = Callable[[list[Operation]], list[Operation]]


def same(operations: list[Operation]) -> list[Operation]:
    return operations


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


def test_c1_c2_c3_hold_at_every_prefix_of_a_save():
    for seed in (0, 1):
        assert next(crashes(seed, samples=8), None) is None, f"seed {seed}"


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


def test_names_appear_only_when_bytes_are_durable():
    for plan in SAVES[1][0]:
        renames = [i for i, o in enumerate(plan) if isinstance(o, Rename)]
        syncs = [i for i, o in enumerate(plan) if isinstance(o, Sync)]
        assert max(syncs) < min(renames)
