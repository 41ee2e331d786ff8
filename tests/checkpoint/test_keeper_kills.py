"""Kill -9 of ranks and keepers, aimed at snapshot, commit and restore: what loads is a saved step."""

import random
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from threading import Thread

import forked_calls
import numpy as np
import psutil
import pytest
from checkpoint.keepers import Run, holdings, remove, wait_for
from checkpoint.trainings import is_saved

from argosy.checkpoint import KeepLast, Saver, StepNotFound, restore
from argosy.checkpoint.keeper.life import Life, Place, Pulse
from argosy.checkpoint.keeper.source import keeper_sources

MOMENTS = {"restoring": 0.1, "saving": 0.01, "copied": 0.05, "durable": 0.02}
"""What a training says, and for how many seconds what follows may be hit."""
VICTIMS = ("rank", "keeper", "both")


def kill_something(run: Run, rng: random.Random, moment: str, victim: str) -> int:
    """Train, and kill at a moment; returns the last step that was acknowledged."""
    with run.train() as training:
        begun = 0
        training.until("restoring")
        if moment != "restoring":
            begun = training.until("begun")[0]
            training.until(moment, begun + rng.randrange(1, 4))
        time.sleep(rng.random() * MOMENTS[moment])
        for keeper in run.keepers() if victim != "rank" else []:
            keeper.kill()
        if victim == "keeper":
            time.sleep(rng.random() * 0.3)  # The rank goes on without it for a while.
        return max(begun, training.kill())


def kills(run: Run, times: int, seed: int) -> None:
    rng = random.Random(seed)
    acknowledged = 0
    plan = [
        (moment, victim) for n, victim in enumerate(VICTIMS) for m, moment in enumerate(MOMENTS) if (n + m) % 2 == 0
    ]
    plan += [(moment, victim) for victim in VICTIMS for moment in MOMENTS if (moment, victim) not in plan]
    for number in range(times):
        moment, victim = plan[number % len(plan)]
        what = f"seed {seed}, kill {number}: {victim} at {moment}"
        acknowledged = max(acknowledged, kill_something(run, rng, moment, victim))
        if acknowledged:
            found = restore(run.directory)
            assert found.step >= acknowledged, what
            assert is_saved(found, found.step), what
            for step in holdings(run):
                with suppress(StepNotFound):  # A shipment that was under way took its memory.
                    assert is_saved(restore(run.directory, step=step), step), what
        for keeper in run.keepers():
            with suppress(psutil.Error):
                assert keeper.num_fds() < 64, f"{what}: {keeper.cmdline()} keeps files open"


@pytest.mark.system
def test_ten_kills_lose_nothing(run: Run):
    """Of every victim, and at every moment."""
    kills(run, 10, seed=0)


@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(1, 11))
def test_a_thousand_kills_lose_nothing(run: Run, seed: int):
    kills(run, 100, seed)


@pytest.mark.parametrize("pause_s", [0.0, 0.2])
def test_a_rank_killed_while_it_starts_a_keeper_leaves_one_keeper_not_two(run: Run, pause_s: float):
    with run.train() as training:
        training.until("restoring")
        wait_for(run.keepers, "a keeper that begins")
        time.sleep(pause_s)
        training.kill()
    for step in (1, 2):  # The second would be refused if another keeper held the directory.
        with Saver(run.directory, keeping=run.keeping()) as saver:
            saver.save({"a": np.arange(10) + step}, step).wait(300)
        assert len(run.keepers()) == 1
    # The rank may have saved a step of its own before it was killed.
    assert restore(run.directory, step=2).tensors["a"].tolist() == list(range(2, 12))


def read_and_wait(directory: str) -> None:
    (source,) = keeper_sources(directory)
    source.open(source.candidates()[0].name)
    print("reads", flush=True)
    time.sleep(60)


def test_what_a_killed_reader_held_is_free_again(run: Run):
    """Restoring ranks that die do not keep the keeper's memory."""
    size = 8 * 100_000
    with Saver(run.directory, keeping=run.keeping(bytes_max=2 * size + 100_000)) as saver:
        for step in (1, 2):
            saver.save({"a": np.full(100_000, step)}, step).wait(300)
        with forked_calls.start(read_and_wait, str(run.directory), stdout=subprocess.PIPE) as reader:
            assert reader.stdout
            assert reader.stdout.readline() == b"reads\n"
            reader.kill()
        for step in (3, 4, 5):
            saver.save({"a": np.full(100_000, step)}, step).wait(300)
        wait_for(lambda: holdings(run) == [5, 4], "the newest two")


def test_a_directory_that_is_removed_while_it_is_written_to_is_said_at_once(run: Run):
    """Rank 0 of two writes, rank 1 never comes: nobody waits for it below a directory that is gone."""
    from argosy.checkpoint.commit_step import Committer
    from argosy.checkpoint.format import Draft
    from argosy.checkpoint.stores import open_store

    store = open_store(run.directory, new=True)
    committer = Committer(store, 0, 2, (KeepLast(1),), lambda _: None)

    def remove() -> None:
        wait_for(lambda: list(run.directory.rglob("rank-00000.json")), "the index of rank 0")
        run.directory.rename(f"{run.directory}.gone")  # At once, as a directory cannot be removed.

    draft = Draft(step=1, name="step-000000000001-aa", rank=0, size=2, entries=[], border=0, bytes=0, room=0)
    remover = Thread(target=remove)
    remover.start()
    with pytest.raises(FileNotFoundError, match="removed while it was written"):
        committer.commit(draft, memoryview(bytearray(8192)))
    remover.join()


def test_a_keeper_does_not_outlive_its_directory(run: Run):
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save({"a": np.arange(10)}, 1).wait(300)
        keepers = run.keepers()
        assert len(keepers) == 1
        remove(run.directory)
        psutil.wait_procs(keepers, 300)
        assert run.keepers() == []
        # The training lives: its next save makes the directory, the keeper and the hold on it anew.
        saver.save({"a": np.arange(10) + 1}, 2).wait(300)
        assert restore(run.directory).tensors["a"].tolist() == list(range(1, 11))


def test_l1_a_directory_that_is_gone_for_a_moment_ends_nothing(tmp_path: Path):
    record = tmp_path / "run.json"
    record.write_text('{"launch":1,"state":"running"}')
    place = tmp_path / "checkpoints"
    place.mkdir()
    pulse = Pulse(Life("r", str(tmp_path), 1, "no-agent"), Place(str(place)))
    assert pulse.beats(1.0)
    place.rename(tmp_path / "elsewhere")
    assert pulse.beats(5.0)
    (tmp_path / "elsewhere").rename(place)
    assert pulse.beats(50.0)
    place.rmdir()
    assert pulse.beats(54.0)
    assert not pulse.beats(56.0)
    place.mkdir()
    pulse = Pulse(Life("r", str(tmp_path), 1, "no-agent"), Place(str(place)))
    assert pulse.beats(0.0)
    record.unlink()
    assert pulse.beats(4.0)
    assert not pulse.beats(6.0)
