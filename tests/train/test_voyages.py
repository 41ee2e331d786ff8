"""Trainings whose ranks are killed end with the bits, samples and rows of one that nobody disturbed."""

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, terminal, until

from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "scripts" / "voyage.py")
STEPS = 9


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """One terminal for all voyages: the zygote stays warm."""
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        _landed.clear()
        yield console


class Landed:
    """What a voyage left."""

    def __init__(self, directory: Path, text: str) -> None:
        self.text = text
        line = next(line for line in text.splitlines() if "digests" in line)
        self.digests = line.split("digests")[1].partition("[")[0].split()
        self.rows = [(row.step, row.values) for row in read_log(directory)]
        self.built = [path.read_text().split() for path in sorted(directory.glob("built.*"))]
        self.samples: dict[int, list[str]] = {}
        """The samples of each step, by any generation of a rank; one line each."""
        for path in sorted(directory.glob("samples.*")):
            for line in path.read_text().splitlines():
                number, *ids = line.split()
                self.samples.setdefault(int(number), []).append(f"{path.name.split('.')[1]}: {' '.join(ids)}")


_landed: dict[str, Landed] = {}


def sail(console: Console, kind: str, ranks: int, *deaths: str) -> Landed:
    name = "-".join([kind, str(ranks), *deaths]).replace(" ", "").replace(":", ".")
    if name not in _landed:
        _landed[name] = _sail(console, kind, ranks, *deaths, directory=console.cwd / name)
    return _landed[name]


def _sail(console: Console, kind: str, ranks: int, *deaths: str, directory: Path, steps: int = STEPS) -> Landed:
    directory.mkdir()
    words = ["run", "-n", str(ranks), SCRIPT, str(directory), kind, str(steps), *deaths]
    ended = console.argosy(*words, patience_s=PATIENCE_S + steps)
    assert ended.code == 0, ended.text
    return Landed(directory, ended.text)


def check(console: Console, kind: str, ranks: int, *deaths: str) -> Landed:
    calm, hard = sail(console, kind, ranks), sail(console, kind, ranks, *deaths)
    assert hard.digests == calm.digests
    assert [step for step, _ in hard.rows] == list(range(1, STEPS + 1))
    # What rank 0 had no time to say is said by another rank, of its own samples.
    unsaid = {int(death.split(":")[2]) + 1 for death in deaths if death.startswith("0.") and ":after vote:" in death}
    for (step, values), (_, expected) in zip(hard.rows, calm.rows, strict=True):
        assert step in unsaid or values["loss"] == expected["loss"]
    for number, lines in calm.samples.items():
        # A rank that died after the vote did not write its line; nobody trained on anything else.
        assert set(hard.samples.get(number, lines)) <= set(lines)
    # Each death was died, and whoever was not told to die was built once.
    for rank, pids in enumerate(hard.built):
        expected = 1 + sum((death.partition(">")[2] or death.partition(".")[0]) == str(rank) for death in deaths)
        assert len(pids) == expected, f"rank {rank} was built {len(pids)} times:\n{hard.text}"
    return hard


@pytest.mark.parametrize(
    "deaths",
    [
        ["1.0:constructor", "1.1:meet", "1.2:reduce:1", "1.3:after vote:4", "1.4:evaluation:5"],
        ["0.0:forward:0", "0.1:snapshot", "0.2:before vote:5", "0.3:after vote:8"],
        ["1.0:forward:3", "1.1:rehearsal", "1.2:heal"],
        ["0.0:reduce:6", "1.0:reduce:6"],
    ],
    ids=lambda deaths: " ".join(deaths),
)
def test_replicas_under_every_kind_of_death(dock: Console, deaths: list[str]):
    check(dock, "plain", 2, *deaths)


def test_a_row_is_not_lost_with_two_who_should_have_written_it(dock: Console):
    check(dock, "messy", 3, "0.0:after vote:4", "2.0:healed:5")


def test_scaler_schedule_average_and_batchnorm(dock: Console):
    check(dock, "messy", 3, "1.0:forward:1", "2.0:after vote:3", "0.0:before vote:5", "2.1:forward:7")


def test_two_optimizers(dock: Console):
    check(dock, "gan", 2, "0.0:before vote:1", "1.0:after vote:4")


@pytest.mark.parametrize(
    "deaths",
    [["1.0:heal", "1.1:before vote:0", "0.0:after vote:3"], ["0.0:forward:5", "1.0:forward:5"]],
    ids=" ".join,
)
def test_shards(dock: Console, deaths: list[str]):
    check(dock, "sharded", 2, *deaths)


def test_shards_within_pairs_and_replicas_between_them(dock: Console):
    check(dock, "hybrid", 4, "3.0:forward:2", "0.0:after vote:5")


def test_a_frozen_model_with_adapters_and_a_scaler_that_is_off(dock: Console):
    check(dock, "adapted", 2, "1.0:before vote:2", "0.0:after vote:5")


def test_a_compiled_model(dock: Console):
    check(dock, "compiled", 2, "1.0:forward:2", "0.0:after vote:5")


def test_shards_with_tensor_parallelism(dock: Console):
    check(dock, "grid", 4, "2.0:before vote:4", "1.0:after vote:6")


def test_stages_of_a_pipeline(dock: Console):
    check(dock, "staged", 2, "0.0:before vote:0", "1.0:forward:2", "0.1:after vote:5")


def test_experts_spread_over_ranks(dock: Console):
    check(dock, "experts", 2, "1.0:forward:2", "0.0:after vote:5")


def test_who_has_taken_the_state_over_has_it(dock: Console):
    """While rank 0's replacement takes the state over, rank 1, which had it, dies too."""
    hard = check(dock, "plain", 2, "0.0:forward:6", "0.1:adopted>1")
    assert "resumed from step" not in hard.text, "from a checkpoint"


SOAKED = [("plain", 2), ("plain", 4), ("messy", 3), ("gan", 2), ("sharded", 2), ("experts", 2), ("staged", 2)]
LONG = 1000
"""Steps of a training in which somebody dies about every second, from the first step to shortly before the last."""


def progress(directory: Path) -> int:
    """The newest step that some rank has done."""
    last = [path.read_bytes().rsplit(b"\n", 2)[-2:-1] for path in directory.glob("samples.*")]
    return max((int(line[0].split()[0]) for line in last if line and line[0].strip()), default=-1)


def haunt(directory: Path, ended: Callable[[], bool], chance: random.Random) -> tuple[int, int]:
    """Kill ranks at random, mostly one and after some step was done; returns how many, and how often rank 0."""
    kills = zeroth = 0
    while (at := progress(directory)) < LONG * 0.9 and not ended():
        pids = {path.suffix[1:]: path.read_text().split() for path in directory.glob("built.*")}
        for rank in chance.sample(sorted(pids), min(len(pids), chance.choice([1, 1, 1, 1, 2]))):
            with suppress(OSError, IndexError):
                pid = int(pids[rank][-1])
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"argosy: rank"):  # Not somebody else's by now.
                    os.kill(pid, signal.SIGKILL)
                    kills, zeroth = kills + 1, zeroth + (rank == "0")
        patience = time.monotonic() + PATIENCE_S
        patient = chance.random() < 0.8
        while patient and progress(directory) <= at and not ended() and time.monotonic() < patience:
            time.sleep(0.02)
        time.sleep(chance.random() * chance.choice([0.1, 1.0]))
    return kills, zeroth


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(int(os.environ.get("ARGOSY_SOAK_FROM", "0")), 40))
def test_random_deaths(dock: Console, seed: int, tmp_path: Path):
    """At least 25 in each, so more than 1,000 in all."""
    kind, ranks = SOAKED[seed % len(SOAKED)]
    calm = _landed.get(f"{kind}-{ranks}") or _sail(
        dock, kind, ranks, directory=dock.cwd / f"{kind}-{ranks}", steps=LONG
    )
    _landed[f"{kind}-{ranks}"] = calm
    directory, out = dock.cwd / f"haunted-{seed}", tmp_path / "out"
    directory.mkdir()
    words = ["run", "-n", str(ranks), SCRIPT, str(directory), kind, str(LONG)]
    command = dock.start(*words, out=out)
    until(lambda: len(list(directory.glob("built.*"))) == ranks, "all ranks")
    kills, zeroth = haunt(directory, lambda: command.poll() is not None, random.Random(seed))
    assert command.wait(PATIENCE_S) == 0, out.read_text()[-8000:]
    hard = Landed(directory, out.read_text())
    print(f"{kind} on {ranks}: {kills} killed, {zeroth} of them rank 0")
    assert kills
    assert hard.digests == calm.digests
    assert [step for step, _ in hard.rows] == list(range(1, LONG + 1))
    differ = [step for (step, values), (_, wanted) in zip(hard.rows, calm.rows, strict=True) if values != wanted]
    # What rank 0 had no time to say is said by another rank, of its own samples.
    assert len(differ) <= 2 * zeroth, differ
    for number, lines in calm.samples.items():
        assert set(hard.samples.get(number, lines)) <= set(lines)
    shutil.rmtree(directory)
