"""What lies in a directory may be damaged, moved, foreign or made up: no wrong load, no loss, no crash."""

import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked_calls
import msgspec
import pytest
import torch
from torch import nn

import argosy
from argosy.checkpoint import (
    CorruptShard,
    KeepBest,
    KeepLast,
    Saver,
    StepNotFound,
    Unreadable,
    list_steps,
    restore,
)
from argosy.checkpoint.format import Index, Part, digest, seal, unseal
from argosy.core import ConfigError


def saved(path: Path, steps: range, **options: Any) -> Path:
    with Saver(path, keep=[KeepLast(9)], **options) as saver:
        for step in steps:
            saver.save({"w": torch.full((8,), float(step))}, step).wait(300)
    return path


def of_step(path: Path, step: int) -> Path:
    return next((path / "checkpoints").glob(f"step-{step:012d}*"))


def value(path: Path, step: int | None = None) -> float:
    return restore(path, step=step).tensors["w"][0].item()


def as_directory(root: Path) -> None:
    root.unlink()
    root.mkdir()


def as_loop(root: Path) -> None:
    root.unlink()
    root.symlink_to(root.name)


def as_file(root: Path) -> None:
    shutil.rmtree(root.parent)
    root.parent.write_text("not a directory")


@pytest.mark.parametrize("damage", [as_directory, as_loop, as_file])
def test_a_root_that_cannot_be_read_hides_no_other_step(tmp_path: Path, damage: Callable[[Path], None]):
    said: list[str] = []
    path = saved(tmp_path, range(1, 4))
    damage(of_step(path, 3) / "root.json")
    assert value(path) == 2
    with pytest.raises((CorruptShard, Unreadable)):
        restore(path, step=3)
    with Saver(path, keep=[KeepLast(1)], say=said.append) as saver:  # Who knows what it needs?
        saver.save({"w": torch.ones(8)}, 4).wait(300)
    assert any("could not be deleted: " in line for line in said)
    assert [each.step for each in list_steps(path) if not each.fault][:3] == [4, 2, 1]


def test_a_directory_that_cannot_be_read_is_not_an_empty_one(tmp_path: Path):
    path = saved(tmp_path, range(1, 2))
    (path / "checkpoints").rename(path / "away")
    (path / "checkpoints").write_text("not a directory")
    with pytest.raises((Unreadable, ConfigError)):
        restore(path)
    (path / "checkpoints").unlink()
    with pytest.raises(StepNotFound):
        restore(path)


@pytest.mark.system
def test_a_store_that_does_not_answer_is_not_an_empty_one(monkeypatch: pytest.MonkeyPatch):
    for name, text in {
        "AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "us-east-1",
        "AWS_ENDPOINT": "http://127.0.0.1:9", "AWS_ALLOW_HTTP": "true",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, text)
    with pytest.raises(Unreadable, match="s3://bucket/run cannot be read"):
        restore("s3://bucket/run")


def test_a_root_of_another_step_is_found_out(tmp_path: Path):
    path = saved(tmp_path, range(1, 3))
    shutil.copy(of_step(path, 1) / "root.json", of_step(path, 2) / "root.json")
    with pytest.raises(CorruptShard, match="the root manifest"):
        restore(path, step=2)
    assert value(path) == 1


def made_up(path: Path, step: int, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the index of a step, and all digests to what they should be then."""
    directory = of_step(path, step)
    body = json.loads((directory / "rank-00000.json").read_bytes())
    change(body)
    data = json.dumps(body).encode()
    (directory / "rank-00000.json").write_bytes(data)
    root = unseal((directory / "root.json").read_bytes(), "root.json")
    part = Part(root.parts[0].file, len(data), digest(data))
    (directory / "root.json").write_bytes(seal(msgspec.structs.replace(root, parts=[part])))


def twice(index: dict[str, Any]) -> None:
    other = {**index["entries"][0], "shape": [1 << 20], "box": [[0], [1 << 20]], "sums": []}
    index["entries"].append(other)


def entry(**changes: Any) -> Callable[[dict[str, Any]], None]:
    def change(index: dict[str, Any]) -> None:
        index["entries"][0] |= changes

    return change


CRAFTED = [
    twice, entry(dtype="Q9"), entry(sums=["nonsense"]), entry(shape=[-8], box=[[0], [-8]]), entry(offset=-4096),
    entry(box=[[4], [8]]), entry(box=[[0, 0], [8, 1]]), entry(file="../../../etc/passwd"), entry(file="/etc/passwd"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(CRAFTED)))
def test_a_made_up_index_is_a_damaged_one(tmp_path: Path, number: int):
    path = saved(tmp_path, range(1, 3))
    made_up(path, 2, CRAFTED[number])
    msgspec.json.decode((of_step(path, 2) / "rank-00000.json").read_bytes(), type=Index)
    assert value(path) == 1
    with pytest.raises(CorruptShard):
        restore(path, step=2)


def test_a_segment_that_was_cut_is_not_referred_to(tmp_path: Path):
    model, head = nn.Linear(64, 64), nn.Linear(64, 2)
    model.requires_grad_(requires_grad=False)
    state = {"model": model, "head": head}
    with Saver(tmp_path, sample=1) as saver:
        for step in range(1, 4):
            saver.save(state, step).wait(300)
            with torch.no_grad():
                head.weight += 1
        for each in (tmp_path / "checkpoints").glob("*/*.safetensors"):
            os.truncate(each, 8192)
        saver.save(state, 4).wait(300)
    assert torch.equal(restore(tmp_path, step=4).tensors["model.weight"], model.weight)


def test_steps_that_go_back_are_the_newest_and_stay(tmp_path: Path):
    """The loss exploded: back to step 200, and on from there."""
    said: list[str] = []
    with Saver(tmp_path, say=said.append) as saver:
        for step in (100, 200, 300, 400):
            saver.save({"w": torch.full((1,), float(step))}, step, tag="good" if step == 200 else None).wait(300)
        saver.save({"w": torch.zeros(1)}, 400).wait(300)  # The same step once more is no way back.
    assert not said
    with Saver(tmp_path, say=said.append) as saver:
        for step in (210, 220):
            saver.save({"w": torch.full((1,), float(step))}, step).wait(300)
    assert said == ["step 210 is saved after step 400: it and the steps after it count as newer"]
    assert [each.step for each in list_steps(tmp_path)] == [220, 210, 400, 200]
    assert value(tmp_path) == 220
    with Saver(tmp_path, say=said.append) as saver:
        saver.save({"w": torch.full((1,), 230.0)}, 230).wait(300)
    assert len(said) == 1
    assert value(tmp_path) == 230


def test_a_path_means_the_same_wherever_the_program_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    with Saver("runs/x") as saver:
        monkeypatch.chdir(tmp_path / "other")
        saver.save({"w": torch.ones(1)}, 1).wait(300)
        with pytest.raises(ConfigError, match="writes to"):
            Saver(tmp_path / "runs/x/checkpoints")
    assert [each.step for each in list_steps(tmp_path / "runs/x/checkpoints")] == [1]
    assert not any((tmp_path / "other").iterdir())
    with Saver("~/mine") as saver:
        saver.save({"w": torch.ones(1)}, 2).wait(300)
    assert restore("~/mine").step == 2
    assert (tmp_path / "home/mine/checkpoints").is_dir()


def read_until(path: Path, last: int) -> None:
    """Restore again and again."""
    step = 0
    while step < last:
        found = restore(path)
        assert found.tensors["w"][0].item() == found.step
        step = found.step


def test_a_reader_beside_a_writer_that_keeps_one_step_always_finds_one(tmp_path: Path):
    state, steps = {"w": torch.zeros(100_000)}, 60
    with Saver(tmp_path, keep=[KeepLast(1)]) as saver:
        saver.save(state | {"w": state["w"] + 1}, 1).wait(300)
        reader = forked_calls.start(read_until, tmp_path, steps)
        try:
            for step in range(2, steps + 1):
                saver.save(state | {"w": state["w"] + step}, step).wait(300)
            assert reader.wait(300) == 0
        finally:
            reader.kill()
            reader.wait()


def test_threads_may_save_different_states(tmp_path: Path):
    failures: list[BaseException] = []

    def save(number: int) -> None:
        try:
            for step in range(5):
                saver.save({f"q{number}": torch.full((1000,), float(number))}, 100 * number + step).wait(300)
        except BaseException as error:
            failures.append(error)

    with Saver(tmp_path, keep=[KeepLast(99)], say=lambda _: None) as saver:
        threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
        for each in threads:
            each.start()
        for each in threads:
            each.join(300)
    assert not failures
    assert restore(tmp_path, step=304).tensors["q3"][0] == 3


def test_the_best_needs_a_yes_or_no_and_a_metric_that_is_there(tmp_path: Path):
    with pytest.raises(ConfigError, match="highest= is True or False: 'min'"):
        KeepBest("loss", 1, "min")  # type: ignore[arg-type]
    said: list[str] = []
    with Saver(tmp_path, keep=[KeepBest("los", 1)], say=said.append) as saver:
        for step in (1, 2):
            saver.save({"w": torch.ones(1)}, step, metrics={"loss": 1.0}).wait(300)
    assert said == ["step 1 has no metric 'los', which decides the best checkpoints; it has loss"]


def test_a_refused_save_does_not_tell_the_step(tmp_path: Path):
    with Saver(tmp_path) as saver:
        with pytest.raises(ConfigError, match="a tag is a text"):
            saver.save({"w": torch.ones(1)}, 16, tag="")
        with pytest.raises(ConfigError, match="which step is saved is not known"):
            saver.save({"w": torch.ones(1)})


def test_what_restore_does_not_know_is_said_in_its_own_words(tmp_path: Path):
    with pytest.raises(TypeError, match=r"restore\(\) has no argument 'strict'; it has .*partial"):
        argosy.restore(tmp_path, strict=False)
    with pytest.raises(ConfigError, match="timeout_s is a number above 0: -1"):
        argosy.restore(tmp_path, timeout_s=-1)


def test_what_this_process_is_saving_is_waited_for(tmp_path: Path):
    with Saver(tmp_path) as saver:
        for step in range(1, 4):
            saver.save({"w": torch.full((1_000_000,), float(step))}, step)
            assert restore(tmp_path).step == step


CROSSING = """
import sys, os, torch, torch.distributed as dist
from argosy.checkpoint import Saver
rank = int(os.environ["RANK"])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1] + "/store", 2), rank=rank, world_size=2)
saver = Saver(sys.argv[1])
handle = saver.save({"w": torch.ones(1)}, 30 + 10 * rank)
print(handle.durable.exception(60))
dist.barrier()
"""


def test_ranks_that_save_different_steps_are_told(tmp_path: Path):
    said = forked_calls.run(CROSSING, tmp_path, ranks=2)
    assert any("ranks save different steps: step 30 here, step 40 on another rank" in text for text in said)
