"""An arena holds whole versions only, and never overwrites the one that its rank continues from."""

import os
import signal
import subprocess
from pathlib import Path

import pytest
import torch
from warm import warm

from argosy.core import ArgosyError
from argosy.train.arena import Arena
from argosy.train.heal_decision import Version
from argosy.train.once import Once
from argosy.transfer import State, tensors_state


def assert_same(found: State, expected: State) -> None:
    assert found.values == expected.values
    assert {name: tensor.tolist() for name, tensor in found.tensors().items()} == {
        name: tensor.tolist() for name, tensor in expected.tensors().items()
    }


def filled(step: int, size: int = 1000) -> State:
    return of({"x": torch.full((size,), float(step)), "none": torch.empty(0)}, step)


def of(tensors: dict[str, torch.Tensor], step: int) -> State:
    state = tensors_state(tensors)
    state.values["step"] = step
    return state


def test_a_version_can_be_that_of_many_steps(tmp_path: Path):
    arena = Arena([tmp_path], 0)
    assert not arena.extend(4, "local")
    arena.put("local", Version(3), filled(3))
    assert all(arena.extend(step, "local") for step in (4, 5, 6))
    assert not arena.extend(8, "local")
    arena.put("local", Version(6), filled(6))  # The step was done again, and came out otherwise.
    arena.put("local", Version(6), filled(7))
    other = Arena([tmp_path], 0)
    assert [step for step in range(9) if other.get(step, "local") is not None] == [3, 4, 5, 6]
    for step, what in ((5, 3), (6, 7)):
        found = other.get(step, "local")
        assert found is not None
        assert_same(found, filled(what))
    other.put("local", Version(7), filled(8))
    assert other.get(5, "local") is None
    other.clear()
    assert Arena([tmp_path], 0).get(6, "local") is None


def test_a_arena_holds_the_last_two_versions(tmp_path: Path):
    arena = Arena([tmp_path], 3)
    for step in range(5):
        arena.put("full", Version(step), filled(step, 10 * (step + 1)))
    assert Arena([tmp_path], 3).held() == [Version(3), Version(4)]
    for step in (3, 4):
        found = Arena([tmp_path], 3).full(Version(step))
        assert found is not None
        assert_same(found, filled(step, 10 * (step + 1)))
    assert arena.full(Version(2)) is None
    assert Arena([tmp_path], 2).held() == []


def test_a1_a_version_that_was_torn_does_not_count(tmp_path: Path):
    arena = Arena([tmp_path], 0)
    arena.put("full", Version(1), filled(1))
    arena.put("full", Version(2), filled(2))
    bad = of({**filled(3).tensors(), "bad": torch.ones(3, device="meta")}, 3)
    with pytest.raises(NotImplementedError, match="meta tensor"):
        arena.put("full", Version(3), bad)  # torch refuses in the middle of the bytes.
    assert Arena([tmp_path], 0).held() == [Version(2)]


def test_a_version_that_was_only_begun_does_not_count(tmp_path: Path):
    (tmp_path / "0.full1").touch()
    assert Arena([tmp_path], 0).held() == []


WRITER = """
import os, sys
from pathlib import Path
import torch
from argosy.core import ArgosyError
from argosy.train.arena import Arena
from argosy.train.heal_decision import Version
from argosy.train.once import Once
from argosy.transfer import State, tensors_state
arena, step = Arena([Path(sys.argv[1])], 0), 0
while True:
    step += 1
    state = tensors_state({"x": torch.full((1 << 20,), float(step))})
    state.values["step"] = step
    arena.put("full", Version(step), state)
    if step == 4:
        print(os.getpid(), flush=True)
"""


def test_a1_whoever_is_killed_while_writing_leaves_a_whole_version(tmp_path: Path):
    with subprocess.Popen([*warm(), "-c", WRITER, str(tmp_path)], stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        os.kill(int(writer.stdout.readline()), signal.SIGKILL)
    arena = Arena([tmp_path], 0)
    assert arena.held()
    for version in arena.held():
        found = arena.full(version)
        assert found is not None
        assert found.values == {"step": version.step}
        assert torch.equal(found.tensors()["x"], torch.full((1 << 20,), float(version.step)))


def test_a2_another_attempt_replaces_the_first_one_and_not_what_it_began_with(tmp_path: Path):
    arena = Arena([tmp_path], 0)
    arena.put("full", Version(4, 1), filled(4))
    arena.put("full", Version(5, 1), filled(5), base=Version(4, 1))
    again = Arena([tmp_path], 0)  # A replacement, which was told to continue from step 4.
    again.put("full", Version(5, 2), filled(6), base=Version(4, 1))
    assert {(each.step, each.view) for each in again.held()} == {(4, 1), (5, 2)}
    found = Arena([tmp_path], 0).full(Version(5, 2))
    assert found is not None
    assert_same(found, filled(6))


def test_a3_what_does_not_fit_into_shared_memory_is_kept_on_disk(tmp_path: Path):
    small, disk = Path("/proc"), tmp_path / "disk"  # No bytes are free in /proc.
    disk.mkdir()
    said = list[str]()
    arena = Arena([small, disk], 0, said.append)
    for step in (1, 2, 3):
        arena.put("full", Version(step, 1), filled(step), base=Version(step - 1, 1))
    assert [each.step for each in Arena([small, disk], 0).held()] == [2, 3]
    assert said == [f"rank 0 keeps its state in {disk}: /proc has no space"]


def test_a_value_made_once_is_kept_where_there_is_room(tmp_path: Path):
    removed, there = tmp_path / "removed", tmp_path / "there"
    removed.mkdir()
    there.mkdir()
    assert Once([removed, there], 0).get(3, "x", lambda: 1, rehearsal=False) == 1
    removed.joinpath("0.once").unlink()
    removed.rmdir()
    assert Once([removed, there], 0).get(4, "x", lambda: 2, rehearsal=False) == 2
    again = Once([removed, there], 0)
    assert again.get(4, "x", lambda: 3, rehearsal=False) == 2
    there.joinpath("0.once").unlink()
    there.rmdir()
    with pytest.raises(ArgosyError, match=r"no room for the values of step\.once"):
        again.get(5, "x", lambda: 4, rehearsal=False)
