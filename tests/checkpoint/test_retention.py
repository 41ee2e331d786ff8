"""Which steps are kept, and what is never deleted."""

from pathlib import Path

import torch
from checkpoint.disk import MemoryFiles
from checkpoint.keepers import wait_for

from argosy.checkpoint import KeepBest, KeepLast, Saver, prune_steps
from argosy.checkpoint.commit_step import plan_prune
from argosy.checkpoint.format import Root, seal, step_name
from argosy.checkpoint.operations import Rmdir


def steps_of(path: Path) -> list[int]:
    return sorted(
        int(each.name.split("-")[1]) for each in (path / "checkpoints").glob("step-*") if (each / "root.json").exists()
    )


def saved_steps(path: Path, keep: list[object], metrics: list[dict[str, float]], **options: object) -> list[int]:
    """The steps that are left when step 1, 2, … were saved with these metrics."""
    with Saver(path, keep=keep) as keeper:
        for number, metric in enumerate(metrics, start=1):
            keeper.save(torch.nn.Linear(2, 2), number, metrics=metric, **options).wait(300)
    return steps_of(path)


def test_keep_best_keeps_the_lowest_or_the_highest(tmp_path: Path):
    losses = [{"val": value} for value in (5.0, 1.0, 4.0, float("nan"), 2.0, 6.0)]
    assert saved_steps(tmp_path / "low", [KeepBest("val", 2)], losses) == [2, 5, 6]  # The newest is kept always.
    assert saved_steps(tmp_path / "high", [KeepBest("val", 2, highest=True)], losses) == [1, 6]
    assert saved_steps(tmp_path / "both", [KeepLast(2), KeepBest("val", 1)], losses) == [2, 5, 6]
    without = [{}, {"val": 3.0}, {}, {}]
    assert saved_steps(tmp_path / "some", [KeepBest("val", 1)], without) == [2, 4]


def test_pinned_and_tagged_steps_are_kept(tmp_path: Path):
    model = torch.nn.Linear(2, 2)
    with Saver(tmp_path, keep=[KeepLast(2)]) as keeper:
        for number in range(1, 7):
            keeper.save(model, number, tag="first" if number == 1 else None).wait(300)
            if number == 3:
                keeper.pin(3)
        wait_for(lambda: steps_of(tmp_path) == [1, 3, 5, 6], "what is not kept deleted")
        keeper.unpin(3)
        keeper.save(model, 7).wait(300)
    assert steps_of(tmp_path) == [1, 6, 7]


def root_of(step: int, session: str) -> bytes:
    return seal(Root(step=step, session=session, saved_at=step, size=2, parts=[]))


def test_a_run_that_went_back_keeps_the_saves_that_are_under_way():
    """From step 100 on again, with step 200 still there: another rank's next save has a lower step and no root yet."""
    files = MemoryFiles({
        f"{step_name(200, 'aaaaaaaa0002')}/root.json": root_of(200, "aaaaaaaa0002"),
        f"{step_name(110, 'bbbbbbbb0001')}/root.json": root_of(110, "bbbbbbbb0001"),
        f"{step_name(120, 'bbbbbbbb0002')}/rank-00001.json": b"",
        f"{step_name(105, 'aaaaaaaa0009')}/rank-00001.json": b"",
    })  # fmt: skip
    operations, _ = plan_prune(files, [KeepLast(2)], step_name(110, "bbbbbbbb0001"))
    assert {o.path for o in operations if isinstance(o, Rmdir)} == {step_name(105, "aaaaaaaa0009")}


def test_nothing_is_deleted_while_the_list_of_pins_is_damaged(tmp_path: Path):
    said: list[str] = []
    model = torch.nn.Linear(2, 2)
    with Saver(tmp_path, keep=[KeepLast(1)], say=said.append) as keeper:
        keeper.save(model, 1).wait(300)
        keeper.pin(1)
        (tmp_path / "checkpoints/pins.json").write_bytes(b"[\xb1]")
        keeper.save(model, 2).wait(300)
        keeper.save(model, 3).wait(300)
        keeper.flush()
    assert steps_of(tmp_path) == [1, 2, 3]
    assert "nothing is deleted: digest mismatch in pins.json" in said[0]


def test_a_step_that_a_kept_one_refers_to_stays_and_is_said(tmp_path: Path):
    """One step more than `KeepLast` asks for: what does not change is in the file of an older step."""
    frozen, moving = torch.arange(3000.0), torch.zeros(100)
    with Saver(tmp_path, keep=[KeepLast(2)]) as keeper:
        for number in range(1, 7):
            keeper.save({"frozen": frozen, "moving": moving + number}, number).wait(300)
    assert steps_of(tmp_path) == [2, 5, 6]  # From the second save on it is known to be frozen.
    for dry_run in (True, False):
        gone, kept = prune_steps(tmp_path, [KeepLast(1)], dry_run=dry_run)
        reasons = {int(name.split("-")[1]): reason for name, reason in kept.items()}
        assert [int(name.split("-")[1]) for name in gone] == [5]
        assert reasons[2] == "needed by step 6, which refers to its unchanged tensors"
    assert steps_of(tmp_path) == [2, 6]
    (next((tmp_path / "checkpoints").glob("step-000000000002-*")) / "root.json").write_bytes(b"torn")
    gone, kept = prune_steps(tmp_path, [KeepLast(1)])
    assert (gone, sorted(kept.values())[-1]) == ([], "its manifest cannot be read")
