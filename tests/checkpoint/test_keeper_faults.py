"""What befalls a keeper from outside: its directory is replaced, it is stopped or read from, ranks disagree, leave."""

import os
import re
import shutil
import socket
import struct
from contextlib import suppress
from pathlib import Path

import forked_calls
import msgspec
import numpy as np
import psutil
import pytest
from checkpoint.keepers import Run, holdings, remove, until_left, wait_for

from argosy.checkpoint import KeepLast, Saver, StepNotFound, list_steps, restore
from argosy.checkpoint.keeper.life import Place
from argosy.checkpoint.keeper.shelf import mismatch
from argosy.checkpoint.keeper.source import KeeperSource, keeper_sources

SCRIPT = """
import os, sys, time
import numpy as np
from argosy.checkpoint import Keeping, KeepLast, Saver
from argosy.checkpoint.keeper.life import Life
import msgspec
directory, rank, size = sys.argv[1], int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
keeping = Keeping(life=msgspec.json.decode(sys.argv[2], type=Life))
if size > 1:
    import torch.distributed as dist
    dist.init_process_group("gloo", store=dist.FileStore(directory + ".meeting", size), rank=rank, world_size=size)

def ended(handle, timeout_s=300):
    error = handle.durable.exception(timeout_s)
    return "durable" if error is None else f"{type(error).__name__}: {error}"

"""


def scripts(run: Run, text: str, size: int = 1) -> list[str]:
    """Run a script as all ranks of a run; what each said."""
    return forked_calls.run(
        SCRIPT + text, run.directory, msgspec.json.encode(run.life).decode(), ranks=size, env=run.places()
    )


def save_one(directory: Path, step: int, **options: object) -> None:
    with Saver(directory, **options) as saver:
        saver.save({"a": np.full(10, step)}, step).wait(300)


def test_l2_what_a_keeper_holds_of_a_directory_is_not_restored_from_another_one_at_its_place(run: Run, tmp_path: Path):
    save_one(run.directory, 100, keeping=run.keeping())
    save_one(tmp_path / "other", 50)
    assert restore(run.directory).source == "the keeper of this host"
    keepers = run.keepers()
    assert len(keepers) == 1
    remove(run.directory)
    shutil.copytree(tmp_path / "other", run.directory)
    found = restore(run.directory)
    assert (found.step, found.source) == (50, "disk")
    psutil.wait_procs(keepers, 300)
    assert run.keepers() == []
    assert [each.step for each in list_steps(run.directory)] == [50]


def test_l2_a_copy_of_a_directory_at_its_place_is_another_one(run: Run, tmp_path: Path):
    save_one(run.directory, 1, keeping=run.keeping())
    keepers = run.keepers()
    until_left(run)
    shutil.copytree(run.directory, tmp_path / "copy")
    remove(run.directory)
    (tmp_path / "copy").rename(run.directory)
    assert restore(run.directory).source == "disk"
    save_one(run.directory, 2, keeping=run.keeping())
    psutil.wait_procs(keepers, 300)
    assert len(run.keepers()) == 1
    assert restore(run.directory).source == "the keeper of this host"


def test_l2_a_new_saver_of_a_removed_directory_begins_with_nothing(run: Run):
    """Also at once, while the old keeper has not noticed."""
    for step in (100, 5, 3):
        with Saver(run.directory, keeping=run.keeping()) as saver:
            with pytest.raises(StepNotFound):
                restore(run.directory)
            saver.save({"a": np.full(10, step)}, step).wait(300)
            assert restore(run.directory).source == "the keeper of this host"
            assert holdings(run) == [step]
        remove(run.directory)
        with pytest.raises(StepNotFound):
            restore(run.directory)


def test_l2_a_directory_that_is_replaced_under_a_training_costs_no_later_save(run: Run, tmp_path: Path):
    save_one(tmp_path / "other", 50)
    with Saver(run.directory, keep=[KeepLast(9)], keeping=run.keeping()) as saver:
        saver.save({"a": np.full(10, 1)}, 1).wait(300)
        for step in (60, 61, 62, 63):
            if step % 2 == 0:
                remove(run.directory)
            if step == 60:
                shutil.copytree(tmp_path / "other", run.directory)
            saver.save({"a": np.full(10, step)}, step).wait(300)
            assert restore(run.directory).tensors["a"].tolist() == [step] * 10
    assert [each.step for each in list_steps(run.directory)] == [63, 62]


def test_l2_a_place_that_is_moved_away_and_back_is_the_same(tmp_path: Path):
    directory = tmp_path / "checkpoints"
    late = Place(str(directory))
    assert late.look() == "there"  # It may be made by the first save.
    directory.mkdir()
    late.bind()
    place = Place(str(directory))
    directory.rename(tmp_path / "away")
    assert place.look() == late.look() == "gone"
    for _ in range(20):  # File systems like to use the number of a removed directory again.
        directory.mkdir()
        assert place.look() == late.look() == "replaced"
        directory.rmdir()
    (tmp_path / "away").rename(directory)
    assert place.look() == late.look() == "there"
    assert Place("s3://bucket/run").look() == "there"


GARBAGE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"\xff" * 100_000,
    struct.pack("<II", 5, 0) + b"\xc1" * 5,
    struct.pack("<II", 1 << 30, 0),
    struct.pack("<II", 100, 3) + b"half",
]


def test_garbage_on_its_socket_harms_neither_the_keeper_nor_a_save(run: Run):
    with Saver(run.directory, keeping=run.keeping()) as saver:
        saver.save({"a": np.full(10, 1)}, 1).wait(30)
        (keeper,) = run.keepers()
        (path,) = run.home.glob("keeper-*.sock")
        peers = [socket.socket(socket.AF_UNIX) for _ in GARBAGE]
        for peer, garbage in zip(peers, GARBAGE, strict=True):
            peer.connect(str(path))
            with suppress(BrokenPipeError):  # It may hang up in the middle.
                peer.sendall(garbage)
        saver.save({"a": np.full(10, 2)}, 2).wait(30)
        assert [each.pid for each in run.keepers()] == [keeper.pid]
        for peer in peers:
            peer.close()
    assert restore(run.directory, step=2).step == 2


def test_idle_readers_of_all_that_a_keeper_holds_do_not_hold_a_training_up(run: Run):
    said: list[str] = []
    with Saver(run.directory, keep=[KeepLast(9)], keeping=run.keeping(), say=said.append) as saver:
        for step in (1, 2):
            saver.save({"a": np.full(10_000, step)}, step).wait(300)
        readers = read_all(run)
        saver.save({"a": np.full(10_000, 3)}, 3).wait(300)
        readers += read_all(run)
        for step in (4, 5, 6, 7):
            saver.save({"a": np.full(10_000, step)}, step).wait(300)
        assert said == []
        assert holdings(run) == [7, 6]
        assert restore(run.directory).tensors["a"].tolist() == [7] * 10_000
        for reader in readers:
            reader.close()
        saver.save({"a": np.full(10_000, 8)}, 8).wait(300)
        assert holdings(run)[0] == 8


def read_all(run: Run) -> list[KeeperSource]:
    """Open each version that the keeper holds, as restores do that are suspended."""
    (first,) = keeper_sources(str(run.directory))
    names = [each.name for each in first.candidates()]
    first.close()
    readers: list[KeeperSource] = []
    for name in names:
        readers += keeper_sources(str(run.directory))
        readers[-1].open(name)
    return readers


APART = """
from argosy.checkpoint.state_input import describe_arrays

def parts(step):
    found = describe_arrays({f"a{rank}": np.full(900_000 if step > 2 and not rank else 10_000, step)})
    found.rank, found.size = rank, size
    return found

said = []
keeping = Keeping(life=keeping.life, bytes_max=2_000_000)
with Saver(directory, keep=[KeepLast(9)], keeping=keeping, say=said.append) as saver:
    for step in (1, 2, 3, 4):
        print(ended(saver.save(parts(step), step)))
print(*said, sep="\\n")
"""


def test_where_one_rank_has_no_memory_of_the_keeper_all_go_on_without_it(run: Run):
    """Rank 0's state outgrows what the keeper may hold; rank 1 has handed its part over."""
    outs = scripts(run, APART, 2)
    for out in outs:
        assert out.splitlines()[:4] == ["durable"] * 4, outs
    assert "the keeper has no memory for snapshots and ends: a snapshot takes" in outs[0]
    assert [each.step for each in list_steps(run.directory)] == [4, 3, 2, 1]


def memfds() -> int:
    """How many descriptors of arenas this process has (a mapping has one, too), and mappings of them."""
    found = Path("/proc/self/maps").read_text().count("argosy-arena")
    for each in Path("/proc/self/fd").iterdir():
        try:
            found += "argosy-arena" in os.readlink(each)
        except OSError:
            continue
    return found


def test_a_keeper_that_dies_leaves_no_memory_in_the_rank(run: Run):
    with Saver(run.directory, keep=[KeepLast(2)], keeping=run.keeping(), say=lambda _: None) as saver:
        state = {"a": np.arange(100_000)}
        for step in (1, 2, 3):
            saver.save(state, step).wait(300)
        assert 1 <= memfds() <= 9
        (keeper,) = run.keepers()
        keeper.kill()
        keeper.wait(300)
        wait_for(lambda: memfds() == 0, "its memory gone")
        saver.save(state, 4).wait(300)
    assert memfds() == 0
    assert restore(run.directory).step == 4


CLOSED = """
saver = Saver(directory, keep=[KeepLast(9)], keeping=keeping)
import torch
model = torch.nn.Linear(CELLS // 1000, 1000)
optimizer = torch.optim.SGD(model.parameters())
handles = [saver.save({"m": model, "o": optimizer}, step) for step in (1, 2)]
saver.close(timeout_s=0)
with Saver(directory, keep=[KeepLast(9)], keeping=keeping) as again:
    handles.append(again.save({"m": model, "o": optimizer}, 3))
for handle in handles:
    handle.copied.result(60)
    print(ended(handle))
deadline = time.monotonic() + 300
while (maps := open("/proc/self/maps").read().count("argosy-arena")) and time.monotonic() < deadline:
    time.sleep(0.01)
print(maps)
"""


@pytest.mark.parametrize("cells", [1000, 20_000_000])
def test_b1_a_saver_closed_in_the_middle_of_a_copy_lets_every_handle_end(run: Run, cells: int):
    (out,) = scripts(run, CLOSED.replace("CELLS", str(cells)))
    *ends, maps = out.splitlines()
    assert all(re.fullmatch(r"durable|Overtaken: .*", end) for end in ends), out
    assert ends[-1] == "durable"
    assert maps == "0"
    assert restore(run.directory).step == 3
    wait_for(lambda: not (run.directory / "checkpoints/owner.json").exists(), "the directory let go")


MISMATCH = """
import torch
saver = Saver(directory, keeping=keeping, say=lambda _: None)
for step in STEPS[rank]:
    print(ended(saver.save({"a": torch.arange(10)}, step)))
saver.close(timeout_s=200)
"""


@pytest.mark.parametrize(
    ("steps", "expected"),
    [
        (([1, 7], [2, 7]), ["saves step 1", "saves step 2"]),
        (([1, 5, 6], [5, 6]), ["saves step 1", "saves step 5"]),  # Rank 1 misses a save.
    ],
)
def test_ranks_that_save_different_steps_are_named_with_both(run: Run, steps: list[list[int]], expected: list[str]):
    outs = scripts(run, MISMATCH.replace("STEPS", repr(steps)), 2)
    for out in outs:
        first = out.splitlines()[0]
        assert all(text in first for text in [*expected, "rank 0", "rank 1", "same order"]), outs
    if steps[0][-1] == 7:
        assert [out.splitlines()[1] for out in outs] == ["durable"] * 2


def test_the_number_of_a_save_tells_whether_ranks_save_the_same():
    first, second = "step-000000000001-aaaaaaaa0001", "step-000000000002-aaaaaaaa0001"
    assert mismatch(first, 0, [(1, first), (0, second)]) is None
    assert mismatch(first, 0, [(2, second), (1, second)]) == (1, second)
    assert mismatch(first, 0, [(1, "step-000000000001.1-aaaaaaaa0001")]) is not None
    assert mismatch(first, 0, [(1, "step-000000000001-aaaaaaaa0002")]) is None
