"""The keeper: snapshots outlive kill -9 of every rank; what dies is replaced; memory is bounded; damage is named."""

import gc
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint.keepers import Run, a_run, flip, holdings, wait_for
from checkpoint.trainings import is_saved
from click.testing import CliRunner

from argosy.checkpoint import CorruptShard, DirectoryInUse, KeepLast, Overtaken, Saver, import_, list_steps, restore
from argosy.checkpoint.arena import Arena
from argosy.checkpoint.format import Draft, UnitInfo
from argosy.checkpoint.keeper.shelf import Later, Make, Never, Reuse, Slot, choose_slot, surplus, versions
from argosy.checkpoint.keeper.source import step_of_drafts
from argosy.cli.ckpt import command


def test_snapshots_outlive_all_ranks_and_the_line_says_from_where(run: Run):
    store = f"{run.directory}.store"
    ranks = [run.train(RANK=str(r), WORLD_SIZE="2", RENDEZVOUS=store) for r in (0, 1)]
    for process in ranks:
        process.until("copied", 4)
    for process in ranks:
        process.kill()
    found = restore(run.directory)
    assert found.step >= 3
    assert is_saved(found, found.step)
    # What was begun without the rank that died first did not take the memory of what was whole.
    assert str(found).startswith(f"step {found.step} from the keeper of this host in ")
    assert str(found).endswith("s, verified")
    # As many ranks as one likes go on from there.
    with run.train() as again:
        step, *source = again.until("begun")
        assert source == ["the keeper of this host"]
        assert step >= found.step
        again.kill()


def test_the_keeper_writes_what_dead_ranks_left(run: Run):
    with run.train() as process:
        process.until("copied", 2)
        wait_for(lambda: holdings(run), "a snapshot in the keeper")  # A copy is handed over when it is complete.
        process.kill()
    held = restore(run.directory).step
    wait_for(lambda: any(each.step == held for each in list_steps(run.directory)), "its newest snapshot on disk")


def test_a_killed_keeper_costs_no_save(run: Run):
    """One save is committed, one waits, one comes later: all are durable."""
    said: list[str] = []
    with Saver(run.directory, keep=[KeepLast(5)], keeping=run.keeping(), say=said.append) as saver:
        state = {"a": np.arange(1000)}
        stuck(run.directory)
        saver.save(state, 1).wait(300)
        waiting = saver.save(state, 2)
        waiting.copied.result(30)
        (keeper,) = run.keepers()
        keeper.suspend()
        (run.directory / "checkpoints/pins.json").unlink()
        keeper.kill()
        waiting.wait(300)
        state["a"] += 1
        saver.save(state, 3).wait(300)
        assert restore(run.directory, step=1).source == "disk"
        assert restore(run.directory, step=2).source == "disk"
        assert np.array_equal(restore(run.directory, step=3).tensors["a"].numpy(), np.arange(1000) + 1)
    assert any("is written by its ranks" in line for line in said)


@pytest.mark.system
def test_k2_a_stopped_keeper_holds_training_up_once_and_is_killed(run: Run):
    said: list[str] = []
    with Saver(run.directory, keep=[KeepLast(9)], keeping=run.keeping(), say=said.append) as saver:
        state = {"a": np.arange(100_000)}
        saver.save(state, 1).wait(300)
        (keeper,) = run.keepers()
        keeper.suspend()
        for step in (2, 3, 4):
            state["a"] += 1
            saver.save(state, step).wait(300)
        assert sum("does not answer" in line and "is killed" in line for line in said) == 1
        assert run.keepers() == []
        found = restore(run.directory)
        assert (found.step, found.source) == (4, "disk")
        assert not saver.mark.is_kept
        owner = json.loads((run.directory / "checkpoints/owner.json").read_text())
        assert owner["pid"] == os.getpid(), "the directory is this run's still"
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save(state, 5).wait(300)
        assert restore(run.directory).source == "the keeper of this host"


@pytest.mark.system
def test_k3_new_ranks_replace_a_keeper_of_their_run_that_is_stopped(run: Run):
    """All ranks were killed beside it: the next ones do not fail until no restarts are left."""
    store, ranks = f"{run.directory}.store", 2
    first = [run.train(RANK=str(r), WORLD_SIZE=str(ranks), RENDEZVOUS=f"{store}0") for r in range(ranks)]
    for process in first:
        process.until("copied", 4)
    (stopped,) = run.keepers()
    stopped.suspend()
    for process in first:
        process.kill()
    again = [run.train(RANK=str(r), WORLD_SIZE=str(ranks), RENDEZVOUS=f"{store}1") for r in range(ranks)]
    for process in again:
        process.until("copied", 3)
    (keeper,) = run.keepers()
    assert keeper.pid != stopped.pid
    for process in again:
        process.kill()


def test_bits_flipped_in_an_arena_are_named(run: Run):
    """Tensor and rank, and the next good copy is taken."""
    state = {"weight": np.arange(50_000), "moment": np.arange(50_000) * 2}
    rng = random.Random(0)
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save(state, 1).wait(300)
        for offset in rng.sample(range(4096, 4096 + 800_000), 6):
            flip(run, offset)
            found = restore(run.directory)
            assert found.source == "disk"
            tensor = "moment" if offset < 4096 + 400_000 else "weight"
            named = (
                "step 1 from the keeper of this host: digest mismatch in "
                rf"\S+/rank-00000.safetensors: {tensor}\[0:50000\]"
            )
            assert re.match(named, found.skipped[-1]), found.skipped
            assert np.array_equal(found.tensors["moment"].numpy(), state["moment"])
            flip(run, offset)
        flip(run, 40, draft=True)
        found = restore(run.directory)
        assert found.source == "disk"
        assert "digest mismatch in rank 0 in the keeper of this host: the index" in found.skipped[-1]


def test_the_line_of_a_restore_says_from_where(run: Run):
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save({"a": np.arange(1000)}, 1204).wait(300)
        for source in ("the keeper of this host", "disk"):
            line = str(restore(run.directory))
            assert re.fullmatch(rf"step 1,204 from {source} in \d+\.\d s, verified", line)
            for keeper in run.keepers():
                keeper.kill()
                keeper.wait(300)


def test_bytes_max_bounds_the_keepers_memory(run: Run):
    said: list[str] = []
    size = 8 * 100_000
    limit = 2 * size + 100_000
    with Saver(run.directory, keeping=run.keeping(bytes_max=limit), say=said.append) as saver:
        for step in range(1, 6):
            saver.save({"a": np.full(100_000, step)}, step).wait(300)
            assert _memory_of(run) <= limit
        assert said == []
        for step in (6, 7):
            saver.save({"a": np.full(400_000, step)}, step).wait(300)
    assert len(said) == 2  # Once, not with every save.
    assert "the keeper has no memory for snapshots and ends" in said[0]
    assert f"bytes_max is {limit:,}" in said[0]
    found = restore(run.directory)
    assert found.step == 7
    assert found.tensors["a"].tolist() == [7] * 400_000


def _memory_of(run: Run) -> int:
    """The shared memory of arenas that the keeper holds."""
    (keeper,) = run.keepers()
    inodes: dict[int, int] = {}
    for entry in Path(f"/proc/{keeper.pid}/fd").iterdir():
        try:
            if "argosy-arena" in os.readlink(entry):
                status = entry.stat()
                inodes[status.st_ino] = status.st_size
        except OSError:
            continue
    return sum(inodes.values())


def test_a_slow_store_holds_no_training_up(run: Run):
    """The disk hangs: snapshots go on in memory, the newest is written when it answers, older ones are overtaken."""
    with Saver(run.directory, keep=[KeepLast(9)], keeping=run.keeping()) as saver:
        state = {"a": np.zeros(1000)}
        saver.save(state, 1).wait(300)
        go_on = stuck(run.directory)
        handles = []
        for step in range(2, 8):
            state["a"] += 1
            handles.append(saver.save(state, step))
            handles[-1].copied.result(30)
        wait_for(lambda: holdings(run)[0] == 7, "the newest in memory")  # Copied is not yet handed over.
        go_on()
        handles[-1].wait(300)
        saver.flush(60)
        ends = [handle.durable.exception(30) for handle in handles]
        assert sum(isinstance(error, Overtaken) for error in ends) >= 3
        assert ends[-1] is None
    assert list_steps(run.directory)[0].step == 7


def test_what_only_a_keeper_has_yet_can_be_exported(run: Run, tmp_path: Path):
    """As when the disk is full, and another one is not."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save({"m": model, "o": optimizer}, 1).wait(300)
        go_on = stuck(run.directory)
        for step in (2, 3):  # Behind the second nothing is written.
            model.weight.data += 1
            saver.save({"m": model, "o": optimizer}, step).copied.result(30)
        wait_for(lambda: holdings(run)[0] == 3, "the newest in memory")
        assert not list(run.directory.rglob("step-000000000003-*/root.json"))
        for kind in ("torch", "hf", "dcp"):
            words = ["export", str(run.directory), kind, str(tmp_path / kind)]
            said = CliRunner().invoke(command, words, catch_exceptions=False).stdout
            assert said.startswith(f"step 3 from the keeper of this host written to {tmp_path / kind} (2 tensors, 32 B")
        go_on()
    for kind in ("torch", "hf", "dcp"):
        import_(kind, tmp_path / kind, tmp_path / f"{kind}-again")
        assert torch.equal(restore(tmp_path / f"{kind}-again").tensors["weight"], model.weight)


def stuck(directory: Path) -> Callable[[], None]:
    """Block the keeper behind its next commit, as a dead file server would; returns what ends it."""
    pins = directory / "checkpoints/pins.json"  # Read before anything is deleted.
    os.mkfifo(pins)

    def go_on() -> None:
        fd = os.open(pins, os.O_WRONLY)  # Returns when the keeper waits there.
        pins.unlink()
        os.write(fd, b"[]")
        os.close(fd)

    return go_on


def test_two_runs_on_one_directory(run: Run, monkeypatch: pytest.MonkeyPatch):
    for keeping in (run.keeping(), None):  # Who is closed lets the directory go.
        with Saver(run.directory.with_name("other"), keeping=keeping) as saver:
            saver.save({"weight": np.zeros(3)}, 1).wait(300)
    with run.train() as first:
        first.until("copied", 1)
        with pytest.raises(DirectoryInUse, match=r"another run \(pid"):
            Saver(run.directory)
        with a_run(run.directory) as other:
            monkeypatch.setenv("ARGOSY_RUNTIME_DIR", str(other.home))
            with pytest.raises(DirectoryInUse, match=r"another run \(pid"):
                Saver(run.directory, keeping=other.keeping())
        first.until("copied", 9)
        first.kill()


def test_half_a_snapshot_is_not_taken_for_one():
    arena = Arena(100)
    arena.begin()
    assert arena.sequence % 2 == 1
    assert arena.finish() % 2 == 0
    arena.begin()
    arena.begin()
    assert arena.sequence % 2 == 1
    arena.close()


def test_nothing_is_left_behind(run: Run):
    gc.collect()  # What earlier tests left to it.
    before = len(os.listdir("/proc/self/fd"))
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save({"a": np.arange(10)}, 1).wait(300)
    assert len(os.listdir("/proc/self/fd")) <= before
    # Arenas have no names: they are gone with the processes that hold them, and those end with the run.
    assert "argosy-arena" not in Path("/proc/self/maps").read_text()
    wait_for(lambda: not (run.directory / "checkpoints/owner.json").exists(), "the directory let go")


KB = 1000


def slot(number: int, phase: str, step: int = 0, rank: int = 0, **more: object) -> Slot:
    return Slot(number, rank, 100 * KB, phase, f"step-{step}", step, 1, order=step, **more)  # type: ignore[arg-type]


def test_h1_the_newest_two_whole_versions_stay():
    slots = [slot(1, "held", 1), slot(2, "held", 2), slot(3, "held", 3), slot(4, "held", 4, users=1)]
    assert [each.id for each in surplus(slots)] == [1, 2]
    halves = [Slot(i, r, KB, "held", "n", 9, 2) for i, r in ((5, 0),)]
    assert versions([*slots, *halves])[0] == (4, "step-4")
    assert versions([*slots, *halves, Slot(6, 1, KB, "held", "n", 9, 2)])[0] == (9, "n")


def test_h1_a_step_that_is_saved_again_is_waited_for():
    whole = [slot(1, "held", 4, durable=True)]
    half = Slot(2, 0, 100 * KB, "held", "step-4 again", 4, 2, order=5)
    assert surplus([*whole, half]) == []
    late = Slot(3, 0, 100 * KB, "held", "step-4 before", 4, 2, order=3)
    assert surplus([*whole, half, late]) == [late]


def test_h1_a_rank_that_saves_ahead_of_the_others_keeps_its_part_of_the_newest_whole_version():
    parts = [Slot(1, 0, KB, "held", "step-3", 3, 2, durable=True), Slot(2, 1, KB, "held", "step-3", 3, 2, durable=True)]
    ahead = [Slot(3, 1, KB, "lent"), Slot(4, 1, KB, "lent")]
    assert choose_slot([*parts, *ahead], 1, KB, 9 * KB) == Later()
    assert choose_slot(parts, 1, KB, 2 * KB) == Reuse(2)  # There is room for one.


def test_h3_memory_stays_within_its_bound():
    held = [slot(1, "held", 1, durable=True), slot(2, "held", 2, durable=True)]
    assert choose_slot(held, 0, 100 * KB, 300 * KB) == Make(100 * KB)
    assert choose_slot(held, 0, 100 * KB, 299 * KB) == Reuse(1)
    assert choose_slot(held, 0, 100 * KB + 1, 299 * KB) == Make(100 * KB + 1, (1,))
    assert isinstance(choose_slot(held, 0, 400 * KB, 299 * KB), Never)
    busy = [slot(1, "held", 1, users=1)]
    assert isinstance(choose_slot(busy, 0, 100 * KB, 199 * KB), Later)
    assert choose_slot([slot(1, "free")], 0, 50 * KB, 100 * KB) == Reuse(1)
    assert choose_slot([slot(1, "free", rank=5)], 0, 50 * KB, 100 * KB) == Make(50 * KB, (1,))


def test_the_asked_step_is_found_wherever_it_is(run: Run):
    with Saver(run.directory, keep=[KeepLast(5)], keeping=run.keeping()) as saver:
        for step in (1, 2, 3, 4):
            saver.save({"a": np.full(10, step)}, step).wait(300)
        assert restore(run.directory, step=4).source == "the keeper of this host"
        assert restore(run.directory, step=1).source == "disk"
        flip(run, 4100)
        for segment in run.directory.rglob("step-000000000004-*/*.safetensors"):
            data = bytearray(segment.read_bytes())
            data[4100] ^= 1
            segment.write_bytes(data)
        with pytest.raises(CorruptShard, match=r"rank-00000.safetensors: a\[0:10\]"):
            restore(run.directory, step=4)


def test_what_each_rank_says_of_its_parameters_comes_from_a_keeper_too():
    """In a pipeline the last stage's are known to the last rank alone."""
    drafts = [
        Draft(
            step=1, name="step-1", rank=rank, size=2, entries=[], border=0, bytes=0, room=0,
            units={f"stage{rank}.w": UnitInfo({"lr": rank})},
        )
        for rank in (0, 1)
    ]  # fmt: skip
    assert {name: unit.options for name, unit in step_of_drafts("step-1", drafts).units.items()} == {
        "stage0.w": {"lr": 0},
        "stage1.w": {"lr": 1},
    }
