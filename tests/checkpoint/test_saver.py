"""Saving and restoring in one process: what comes back is bitwise what went in, or a clear error."""

import errno
import json
import mmap
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import argosy
from argosy.checkpoint import (
    CorruptShard,
    DirectoryInUse,
    KeepLast,
    Saver,
    StepNotFound,
    TornSnapshot,
    Unreadable,
    restore,
)
from argosy.checkpoint.format import Entry
from argosy.checkpoint.operations import WRITE_BYTES, Create, Operation, Sync, Write
from argosy.core import ConfigError
from argosy.transfer import Adoption, State, Unit, flat_members


def network() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.BatchNorm1d(16), torch.nn.Linear(16, 4))


def trained(steps: int, seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    model = network()
    state = {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}
    for _ in range(steps):
        step(state)
    return state


def step(state: dict[str, object]) -> None:
    model, optimizer = state["model"], state["optimizer"]
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def content(state: dict[str, object]) -> dict[str, bytes]:
    found = {name: tensor.numpy().tobytes() for name, tensor in state["model"].state_dict().items()}
    for index, entry in state["optimizer"].state_dict()["state"].items():
        found |= {f"{index}.{key}": value.numpy().tobytes() for key, value in entry.items()}
    return found


def saver(path: Path, **options: object) -> Saver:
    return Saver(path, sample=1, **options)  # Everything is summed again, not a part.


def test_what_comes_back_is_what_went_in(tmp_path: Path):
    state = trained(3)
    with saver(tmp_path) as keeper:
        keeper.save(state, 3).wait(300)
        saved = content(state)
        step(state)
        assert content(state) != saved
        restored = restore(tmp_path, into=state)
        assert content(state) == saved
        assert restored.step == 3
        assert str(restored).startswith("step 3 from disk in")
        assert str(restored).endswith("verified")


def test_a_fresh_optimizer_gets_its_state_and_options(tmp_path: Path):
    state = trained(3)
    with saver(tmp_path) as keeper:
        keeper.save(state, 3).wait(300)
    other = trained(0, seed=1)
    other["optimizer"].param_groups[0]["lr"] = 7.0
    restore(tmp_path, into=other)
    assert content(other) == content(state)
    assert other["optimizer"].param_groups[0]["lr"] == 0.1
    assert other["optimizer"].param_groups[0]["betas"] == (0.9, 0.999)
    torch.manual_seed(5)
    step(state)
    torch.manual_seed(5)
    step(other)
    assert content(other) == content(state)


def test_alone_it_gives_tensors(tmp_path: Path):
    state = trained(2)
    with saver(tmp_path) as keeper:
        keeper.save({**state, "note": {"epoch": 3, "seen": [1, 2]}}, 2).wait(300)
    found = argosy.restore(tmp_path)
    assert torch.equal(found.tensors["0.weight"], state["model"][0].weight)
    assert found.values["note"] == {"epoch": 3, "seen": [1, 2]}
    assert found.options["0.weight"]["lr"] == 0.1


def _source() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(argosy.__file__).parents[1])}


@pytest.mark.parametrize(
    "array",
    [
        np.array(1.5, np.float32),
        np.zeros((0, 3), np.int64),
        np.array([True, False]),
        np.array([1 + 2j], np.complex64),
        np.array([1 + 2j, 3], np.complex128),
        np.arange(6, dtype=np.uint16).reshape(2, 3),
    ],
)
def test_any_shape_and_dtype(tmp_path: Path, array: np.ndarray):
    with saver(tmp_path) as keeper:
        keeper.save({"a": array, "b": np.arange(5)}, 1).wait(300)
    into = {"a": np.ones_like(array), "b": np.zeros(5, int)}
    restore(tmp_path, into=into)
    assert into["a"].tobytes() == array.tobytes()
    assert restore(tmp_path).tensors["a"].numpy().dtype == array.dtype


def test_tensors_of_one_flat_buffer_and_cells_of_nobody(tmp_path: Path):
    """As ZeRO has them: several tensors in one memory, behind them padding, which stays."""
    shapes = {"a": (3, 5), "b": (7,)}

    def flat_state(buffer: torch.Tensor) -> State:
        members = flat_members(shapes, {"exp_avg": ("moment", "F32", buffer)}, 1, align=16)
        state = State(units={name: Unit(name, found) for name, found in members.items()})
        targets = {name: member for name, _, member in state.members()}
        state.adopt = lambda _: Adoption(targets, lambda: None)
        return state

    saved, into = torch.arange(32.0), torch.full((32,), -1.0)
    with saver(tmp_path) as keeper:
        keeper.save(flat_state(saved), 1).wait(300)
    restore(tmp_path, into=flat_state(into))
    assert into.tolist() == [*range(22), *[-1.0] * 10]


def test_low_precision_and_transposed_tensors(tmp_path: Path):
    things = {
        "half": torch.randn(7).bfloat16(),
        "turned": torch.arange(12.0).reshape(3, 4).t(),
        "eighth": torch.randn(5).to(torch.float8_e4m3fn),
    }
    with saver(tmp_path) as keeper:
        keeper.save({"things": things, "model": torch.nn.Linear(1, 1)}, 1).wait(300)
    into = {name: torch.empty_like(tensor) for name, tensor in things.items()}
    restore(tmp_path, into={"things": into, "model": torch.nn.Linear(1, 1)})
    assert all(torch.equal(into[name].float(), things[name].float()) for name in things)
    assert into["turned"].stride() == (1, 4)


def test_a_state_without_tensors(tmp_path: Path):
    counters = {"epoch": 1}
    with saver(tmp_path) as keeper:
        keeper.save({"counters": counters}, 1).wait(300)
    into = {"epoch": 0}
    restore(tmp_path, into={"counters": into})
    assert into == {"epoch": 1}


@pytest.mark.system
@pytest.mark.timeout(600)
def test_a_hundred_thousand_tensors(tmp_path: Path):
    arrays = {f"t{i}": np.full(3, i, np.int32) for i in range(100_000)}
    with saver(tmp_path) as keeper:
        keeper.save(arrays, 1).wait(300)
    found = restore(tmp_path).tensors
    assert len(found) == 100_000
    assert all(found[f"t{i}"].tolist() == [i] * 3 for i in range(0, 100_000, 97))


def test_another_model_is_refused_and_left_alone(tmp_path: Path):
    with saver(tmp_path) as keeper:
        keeper.save({"model": network()}, 1).wait(300)
    other = torch.nn.Sequential(torch.nn.Linear(8, 17), torch.nn.BatchNorm1d(17), torch.nn.Linear(17, 4))
    before = {name: tensor.clone() for name, tensor in other.state_dict().items()}
    with pytest.raises(ConfigError, match=r"has shape \[16\], here it is \[17\]"):
        restore(tmp_path, into={"model": other})
    with pytest.raises(ConfigError, match="is F32, here it is F64"):
        restore(tmp_path, into={"model": network().double()})
    with pytest.raises(ConfigError, match=r"no place for stored 1\.bias"):
        restore(tmp_path, into={"model": torch.nn.Sequential(torch.nn.Linear(8, 16))})
    with pytest.raises(ConfigError, match=r"not stored: 3\.bias"):
        restore(tmp_path, into={"model": torch.nn.Sequential(*network(), torch.nn.Linear(4, 4))})
    assert all(torch.equal(before[name], tensor) for name, tensor in other.state_dict().items())
    grown = torch.nn.Sequential(*network(), torch.nn.Linear(4, 4))
    assert restore(tmp_path, into={"model": grown}, partial=True).kept == ["3.bias", "3.weight"]


def test_names_can_be_changed(tmp_path: Path):
    model = torch.nn.Linear(3, 2)
    with saver(tmp_path) as keeper:
        keeper.save(model, 1).wait(300)
    other = torch.nn.Sequential(torch.nn.Linear(3, 2))
    restore(tmp_path, into=other, rename=lambda name: f"0.{name}")
    assert torch.equal(other[0].weight, model.weight)
    with pytest.raises(ConfigError, match="the same name"):
        restore(tmp_path, into=other, rename=lambda _: "x")


def test_parameters_without_moments_are_asked_for(tmp_path: Path):
    state = trained(1)
    with saver(tmp_path) as keeper:
        keeper.save(state, 1).wait(300)
    model = network()
    with pytest.raises(ConfigError, match="without their moments"):
        restore(tmp_path, into=model, roles={"parameter", "buffer"})
    restore(tmp_path, into=model, roles={"parameter", "buffer"}, fresh=True)
    assert torch.equal(model[0].weight, state["model"][0].weight)


def test_nothing_saved_is_said(tmp_path: Path):
    with pytest.raises(StepNotFound, match="no step was committed"):
        restore(tmp_path, into=network())
    with saver(tmp_path) as keeper:
        keeper.save(network(), 5).wait(300)
    with pytest.raises(StepNotFound, match="step 6 was not committed") as caught:
        restore(tmp_path, into=network(), step=6)
    assert caught.value.hint == "there are 5"


def test_a_flipped_bit_is_named_and_an_older_step_is_taken(tmp_path: Path):
    state = trained(1)
    with saver(tmp_path) as keeper:
        keeper.save(state, 1).wait(300)
        first = content(state)
        step(state)
        keeper.save(state, 2).wait(300)
    newest = next((tmp_path / "checkpoints").glob("step-000000000002-*/*.safetensors"))
    data = bytearray(newest.read_bytes())
    data[4096 + 70] ^= 4
    newest.write_bytes(data)
    step(state)
    before = content(state)
    with pytest.raises(CorruptShard, match=r"rank-00000.safetensors: 0\.bias.*: expected"):
        restore(tmp_path, into=state, step=2)
    assert content(state) == before
    restored = restore(tmp_path, into=state)
    assert content(state) == first
    assert restored.step == 1
    assert "skipped step 2: digest mismatch" in str(restored)


def test_a_newer_format_is_refused(tmp_path: Path):
    from argosy.checkpoint.format import digest

    with saver(tmp_path) as keeper:
        keeper.save(network(), 1).wait(300)
    path = next((tmp_path / "checkpoints").glob("step-*/root.json"))
    body = json.dumps({**json.loads(path.read_text())["body"], "format": 99}).encode()
    path.write_bytes(b'{"digest":"' + digest(body).encode() + b'","body":' + body + b"}")
    with pytest.raises(Unreadable) as caught:
        restore(tmp_path, into=network())
    assert "has format 99" in caught.value.hint


def test_a_write_during_the_copy_is_found():
    """Written behind the optimizer's back, as `.data` allows: the snapshot is discarded and training goes on."""
    from argosy.checkpoint.arena import Arena
    from argosy.checkpoint.snapshot import Snapshot
    from argosy.checkpoint.write_plan import Arrangement
    from argosy.transfer import describe

    module = torch.nn.Module()
    module.register_parameter("weight", torch.nn.Parameter(torch.zeros(32 << 20)))
    state = describe(module, torch.optim.SGD(module.parameters()))
    arranged = Arrangement(state)
    for _ in range(20):
        snapshot = Snapshot(arranged, state, Arena(arranged.size), sample=1)
        snapshot.until(len(arranged.header) + 1)  # Its first chunk is copied, the others are not.
        module.weight.data[5] += 1
        in_time = not snapshot._done.is_set()
        snapshot.wait()
        if in_time:
            break
    assert isinstance(snapshot.error, TornSnapshot)
    assert "weight" in str(snapshot.error)
    with pytest.raises(TornSnapshot):
        snapshot.until(arranged.size)


def test_writing_begins_during_the_copy_and_what_was_written_of_a_torn_snapshot_is_removed(tmp_path: Path):
    from argosy.checkpoint.commit_step import Committer
    from argosy.checkpoint.format import Draft
    from argosy.checkpoint.stores import open_store

    size = 3 * WRITE_BYTES
    arena = memoryview(mmap.mmap(-1, size))
    committer = Committer(open_store(tmp_path, new=True), 0, 1, (KeepLast(1),), lambda _: None)
    draft = Draft(step=1, name="step-000000000001-aa", rank=0, size=1, entries=[], border=size, bytes=size, room=4096)
    seen: list[int] = []

    class Filling:
        def until(self, end: int) -> None:
            seen.append(end)

        def entries(self) -> list[Entry]:
            seen.append(len(list(tmp_path.rglob("*.safetensors"))))
            raise TornSnapshot("w was written to while it was copied")

    with pytest.raises(TornSnapshot):
        committer.commit(draft, arena, Filling())
    assert seen == [2 * WRITE_BYTES, 3 * WRITE_BYTES, 1]
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["rank-00000.failed"]
    with pytest.raises(StepNotFound):
        restore(tmp_path)


def test_memory_is_used_again_only_when_nothing_is_copied_into_it_any_more(tmp_path: Path):
    """The disk fails at once, the copy goes on: the next save must not get memory that is still written to."""
    from argosy.checkpoint.arena import Arena
    from argosy.checkpoint.commit_step import Committer
    from argosy.checkpoint.format import Draft
    from argosy.checkpoint.own_writer import OwnWriter
    from argosy.checkpoint.stores import open_store

    committer = Committer(open_store(tmp_path / "run", new=True), 0, 1, (KeepLast(1),), lambda _: None)
    committer.retry_after_s = ()
    writer = OwnWriter(committer)
    (tmp_path / "run").touch()  # Where a directory should be.
    seen: list[object] = []

    class Filling:
        arena = Arena(100)

        def until(self, end: int) -> None: ...

        def entries(self) -> list[Entry]:
            seen.append("copied")
            return []

    draft = Draft(step=1, name="step-000000000001-aa", rank=0, size=1, entries=[], border=100, bytes=100, room=4096)
    writer.submit(draft, Filling(), seen.append)
    assert seen[0] == "copied"
    assert isinstance(seen[1], OSError)
    assert writer.lend(100) is Filling.arena
    writer.close()


def test_the_next_step_waits_for_the_copy(tmp_path: Path):
    state = trained(1)
    with saver(tmp_path) as keeper:
        for number in range(2, 12):
            handle = keeper.save(state, number)
            saved = content(state)
            step(state)
            handle.wait(300)
            other = trained(0)
            restore(tmp_path, into=other, step=number)
            assert content(other) == saved
    assert not state["optimizer"]._optimizer_step_pre_hooks


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_any_failing_operation_leaves_the_last_step_and_is_tried_again(tmp_path: Path, number: int):
    state = trained(1)
    said: list[str] = []
    with saver(tmp_path, say=said.append) as keeper:
        keeper._committer.retry_after_s = (0.0,)
        keeper.save(state, 1).wait(300)
        count = 0

        def at(position: int, *, always: bool):
            seen = 0

            def before(_: Operation) -> None:
                nonlocal seen, count
                seen += 1
                count = max(count, seen)
                if seen == position or (always and seen > position):
                    raise OSError(number, os.strerror(number))

            return before

        keeper._committer.before = at(10**6, always=False)
        keeper.save(state, 2).wait(300)
        position = 0
        for position in range(1, count + 1):
            step(state)
            keeper._committer.before = at(position, always=True)
            with pytest.raises(OSError, match=os.strerror(number)):
                keeper.save(state, 2 + position).wait(300)
            assert restore(tmp_path, into=trained(0)).step in (2 + position - 1, 2, 2 + position)
            said.clear()
            # What was written in vain gives its room back.
            assert all((path.parent / "root.json").exists() for path in tmp_path.rglob("*.1.safetensors"))
            keeper._committer.before = None
        keeper._committer.before = at(3, always=False)
        handle = keeper.save(state, 100)
        handle.wait(300)
        assert any("retrying" in line for line in said)
        assert restore(tmp_path, into=trained(0)).step == 100


def test_a_missing_shard_is_named(tmp_path: Path):
    state = trained(1)
    with saver(tmp_path) as keeper:
        keeper.save(state, 1).wait(300)
    next((tmp_path / "checkpoints").glob("step-*/rank-00000.safetensors")).unlink()
    with pytest.raises(CorruptShard, match=r"rank-00000.safetensors is missing: the segment: expected \d+ bytes"):
        restore(tmp_path, into=state, step=1)


def test_a_directory_that_is_removed_is_made_again(tmp_path: Path):
    """With all that the next step needs: what did not change is written again, not referred to."""
    state = trained(1)
    with saver(tmp_path / "run") as keeper:
        keeper.save(state, 1).wait(300)
        keeper.save(state, 2).wait(300)
        shutil.rmtree(tmp_path / "run")
        keeper.save(state, 3).wait(300)
        assert json.loads((tmp_path / "run/checkpoints/owner.json").read_text())["pid"] == os.getpid()
    other = trained(0)
    assert restore(tmp_path / "run", into=other).step == 3
    assert content(other) == content(state)


def test_unchanged_tensors_are_referred_to_and_kept(tmp_path: Path):
    model = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(4, 4))
    model[0].requires_grad_(False)
    state = {"model": model, "optimizer": torch.optim.AdamW(model[1].parameters())}
    with saver(tmp_path, keep=[KeepLast(1)]) as keeper:
        for number in range(1, 5):
            model[0](torch.zeros(1, 256))
            state["optimizer"].zero_grad()
            model[1](torch.randn(1, 4)).sum().backward()
            state["optimizer"].step()
            keeper.save(state, number).wait(300)
    sizes = {each.parent.name[5:17]: each.stat().st_size for each in tmp_path.rglob("*.safetensors")}
    assert sizes["000000000004"] < 20_000
    assert sizes["000000000001"] > 256 * 256 * 4
    other = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.Linear(4, 4))
    restore(tmp_path, into={"model": other, "optimizer": torch.optim.AdamW(other[1].parameters())})
    assert torch.equal(other[0].weight, model[0].weight)
    assert torch.equal(other[1].weight, model[1].weight)


def test_segments_are_safetensors_files(tmp_path: Path):
    import safetensors.torch as safetensors

    state = trained(1)
    with saver(tmp_path) as keeper:
        keeper.save(state, 1).wait(300)
    found = safetensors.load_file(next(tmp_path.rglob("*.safetensors")))
    assert torch.equal(found["0.weight"], state["model"][0].weight)


def test_a_second_run_is_refused_while_the_first_lives(tmp_path: Path):
    program = (
        "import sys; from argosy.checkpoint import Saver; saver = Saver(sys.argv[1]); print('owns', flush=True);"
        "sys.stdin.readline()"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=_source()) as first:
        assert first.stdout
        assert first.stdout.readline() == "owns\n"
        with pytest.raises(DirectoryInUse, match=f"pid {first.pid}"):
            Saver(tmp_path)
        first.kill()
    with Saver(tmp_path) as second:  # The dead owner is replaced.
        second.save(network(), 1).wait(300)


def test_bulk_writes_are_aligned_for_direct_io(tmp_path: Path):
    seen: list[Operation] = []
    with saver(tmp_path) as keeper:
        keeper._committer.before = seen.append
        keeper.save({"a": np.zeros(5_000_001, np.uint8)}, 1).wait(300)
    bulk = [o for o in seen if isinstance(o, Write) and not isinstance(o.data, bytes)]
    assert all(o.offset % 4096 == 0 and o.data.length % 4096 == 0 for o in bulk)
    assert [type(o) for o in seen].count(Sync) == 3
    assert next(o for o in seen if isinstance(o, Create)).path.endswith(".safetensors")


def test_nothing_is_left_in_shared_memory(tmp_path: Path):
    before = len(os.listdir("/proc/self/fd"))
    with saver(tmp_path) as keeper:
        keeper.save(network(), 1).wait(300)
    assert len(os.listdir("/proc/self/fd")) == before
    assert "argosy-arena" not in Path("/proc/self/maps").read_text()
