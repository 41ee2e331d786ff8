"""Scripts in the shape of well-known ones, unchanged: what they print and how they end is as under torchrun.

`test_torchrun_scripts.py` has DDP, Lightning, the Trainer and accelerate's own test.
"""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, Ended, terminal

pytestmark = [pytest.mark.system, pytest.mark.timeout(900)]
SCRIPTS = Path(__file__).with_name("scripts")
TWO = ["--nproc-per-node", "2"]
NOISE = re.compile(r"Warning|warnings\.warn|^\W*$|TPU|GPU|train_runtime")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("desk")) as console:
        shutil.copytree(SCRIPTS, console.cwd, dirs_exist_ok=True)
        console.env |= {"HF_HOME": str(console.cwd / "hf"), "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""}
        yield console


def printed(ended: Ended) -> set[str]:
    """What was printed, whichever rank did: the prefix differs, and equal lines of ranks are shown once."""
    assert ended.code == 0, ended.text
    lines = {re.sub(r"^\[[\d,-]+\]", "", line).strip() for line in ended.out.decode().splitlines()}
    return {line for line in lines if not NOISE.search(line)}


def same(desk: Console, *words: str) -> set[str]:
    theirs = printed(desk.torchrun(*TWO, *words))
    ours = printed(desk.argosy("run", *TWO, *words))
    assert ours == theirs
    assert any("RESULT" in line or "loss" in line for line in theirs), "it has a result"
    return ours


@pytest.mark.parametrize(
    "words", [["fsdp2.py"], ["fsdp2.py", "--mixed-precision"], ["tensor_parallel.py"]], ids=" ".join
)
def test_sharded_models(desk: Console, words: list[str]):
    assert len(same(desk, *words)) >= 6


@pytest.mark.parametrize("context", ["", "fork", "spawn"])
def test_imagenet_with_workers_of_every_kind_and_tensorboard(desk: Console, context: str):
    workers = ["--workers", "1", "--context", context] if context else []
    theirs = printed(desk.torchrun(*TWO, "imagenet.py", f"theirs{context}", *workers))
    ours = printed(desk.argosy("run", *TWO, "imagenet.py", f"ours{context}", *workers))
    assert ours == theirs
    assert sum("RESULT" in line for line in ours) == 1
    assert scalars(desk.cwd / f"ours{context}" / "board") == scalars(desk.cwd / f"theirs{context}" / "board") != []


def scalars(place: Path) -> list[tuple[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = EventAccumulator(str(place))
    found.Reload()
    return [(each.step, each.value) for each in found.Scalars("loss")]


@pytest.mark.parametrize("name", ["trainer", "lightning"])
def test_two_kills_with_the_framework_s_own_resume_change_nothing(desk: Console, name: str):
    words = ["run", "-n", "2", "--max-restarts", "2", f"resuming_{name}.py"]
    calm = printed(desk.argosy(*words, f"calm-{name}"))
    ended = desk.argosy(*words, f"killed-{name}", "1.0:6", "0.1:13")
    assert len(re.findall(r"rank \d failed: killed by SIGKILL", ended.text)) == 2, ended.text
    assert {line for line in printed(ended) if "RESULT" in line} == {line for line in calm if "RESULT" in line} != set()
