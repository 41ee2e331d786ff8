"""Training programs made at random, whose ranks are killed at random, end with the bits of an undisturbed run."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from console import PATIENCE_S, Console, Ended, terminal

SCRIPT = str(Path(__file__).parent / "scripts" / "program.py")
STEPS = 8
WRAPPERS = ["ddp", "ddp", "replicate", "fsdp", "fsdp", "plain", "averaged"]
EXTRAS = ["micro", "sgd", "two", "schedule", "scaler", "once", "equal", "queue"]
SELDOM = ["expert", "stamp", "apart"]
EXCHANGES = ["late", "messages", "critic", "nan"]
PLACES = ["forward", "reduced", "before vote", "after vote", "after vote", "end", "critic"]


class Program(NamedTuple):
    """How many ranks run which parts, and who dies where."""

    ranks: int
    parts: str
    deaths: list[str]
    pause: int
    """The step after which the run ends for a while, to be resumed from disk; the last one: it does not."""


def generate(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    ranks, wrapper = draw.choice([2, 2, 3]), draw.choice(WRAPPERS)
    extras = EXTRAS + (["norm", "ema"] if wrapper == "ddp" else [])  # What else can be copied, and is synchronised.
    parts = [wrapper, *(part for part in extras if draw.random() < 0.25)]
    parts += [part for part in SELDOM if draw.random() < 0.15]
    ranks = 3 if "apart" in parts else ranks  # A vote is in doubt where another survivor has heard its outcome.
    if wrapper != "ddp" and "scaler" in parts:  # torch's scaler takes no mix of DTensors and others.
        parts = [part for part in parts if part not in ("expert", "stamp")]
    parts += [f"{part}{draw.randrange(2 - (part == 'critic'), 6)}" for part in EXCHANGES if draw.random() < 0.35]
    if draw.random() < 0.5:
        parts = [part.replace("late", "background") for part in parts]
    deaths, pause = kills(draw, ranks, parts), draw.choice([STEPS, STEPS, 4])
    deaths += over(random.Random(f"over {seed}"), ranks, deaths)
    parts += ["zero"] if wrapper == "ddp" and draw.random() < 0.2 else []
    return Program(ranks, ",".join(parts), deaths, pause)


def over(draw: random.Random, ranks: int, deaths: list[str]) -> list[str]:
    """Perhaps somebody dies when the loop is over, before ranks compare what they have."""
    rank = draw.randrange(ranks)
    generation = sum(death.startswith(f"{rank}.") and ":doubt:" not in death for death in deaths)
    return [f"{rank}.{generation}:over:{STEPS - 1}"] if draw.random() < 0.3 else []


def kills(draw: random.Random, ranks: int, parts: list[str]) -> list[str]:
    """Who dies where, in order of steps; perhaps the second while the step of the first is redone."""
    generations, deaths = [0] * ranks, list[str]()

    def kill(rank: int, place: str, step: int) -> None:
        deaths.append(f"{rank}.{generations[rank]}:{place}:{step}")
        generations[rank] += 1

    steps = sorted(draw.randrange(STEPS) for _ in range(draw.choice([1, 1, 2, 3])))
    late = [int(part[-1]) - 1 for part in parts if part[:-1] in ("late", "background", "messages", "critic")]
    if (
        late and "apart" not in parts and draw.random() < 0.6
    ):  # In the first step that communicates after its update, of which nobody knows yet.
        # The first step that communicates after its update: nobody knows yet that state has to be copied.
        kill(draw.randrange(ranks), "after vote", min(late))
        steps = [step for step in steps if step > min(late)]
    elif "apart" in parts and draw.random() < 0.7:  # A vote in doubt: others have applied it, and one of them dies.
        deaths.append(f"0.0:doubt:{steps[0]}")
        kill(ranks - 1, "after vote", steps.pop(0))
    elif draw.random() < 0.3:
        first, *others = draw.sample(range(ranks), ranks)
        kill(first, "after vote", steps[0])
        kill(others[0], draw.choice(["redone after vote", "redone reduced"]), steps.pop(0))
    for step in steps:
        kill(draw.randrange(ranks), draw.choice(PLACES), step)
    return deaths


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def launch(console: Console, name: str, ranks: int, parts: str, deaths: list[str], until: int = STEPS) -> Ended:
    words = ["run", "-n", str(ranks), "--name", f"{name}-{until}", SCRIPT, name, str(until), parts, *deaths]
    return console.argosy(*words, patience_s=PATIENCE_S)


def check(console: Console, seed: int) -> None:
    """With deaths, and with a pause, a program ends as without."""
    ranks, parts, deaths, pause = program = generate(seed)
    calm = launch(console, f"calm-{seed}", ranks, parts, [])
    assert calm.code == 0, f"{program}\n{calm.text}"
    before = [death for death in deaths if int(death.rpartition(":")[2]) < pause]
    hard = launch(console, f"hard-{seed}", ranks, parts, before, pause)
    text = hard.text
    if pause < STEPS and hard.code == 0:  # The ranks of another launch are of generation 0 again, and die no more.
        hard = launch(console, f"hard-{seed}", ranks, parts, [])
        text += hard.text
    assert hard.code == 0, f"{program}\n{text}"
    wanted, found = (next(line for line in each.text.splitlines() if "digests" in line) for each in (calm, hard))
    assert found == wanted, f"{program}\n{text}"
    assert "numbers that are not finite" not in calm.text + text, f"{program}\n{text}"
    stamps = next((line.split("stamps")[1].split() for line in hard.text.splitlines() if "stamps" in line), ["none"])
    assert len(stamps) == 1, f"{program}: shards of several attempts: {stamps}\n{text}"
    for name in (f"calm-{seed}", f"hard-{seed}"):
        shutil.rmtree(console.cwd / name)


@pytest.mark.parametrize("seed", [1, *(pytest.param(seed, marks=pytest.mark.system) for seed in (0, *range(2, 8)))])
def test_a_program_survives(dock: Console, seed: int):
    check(dock, seed)


@pytest.mark.system
@pytest.mark.parametrize("wrapper", ["averaged", "fsdp"])
def test_a_vote_in_doubt_where_nobody_dies(dock: Console, wrapper: str):
    """A connection breaks and all ranks live: they meet again although none is replaced."""
    calm, hard = (
        launch(dock, f"{wrapper}-{len(doubt)}", 2, f"{wrapper},apart", doubt) for doubt in ([], ["0.0:doubt:4"])
    )
    assert (calm.code, hard.code) == (0, 0), calm.text + hard.text
    assert "a peer lost" in hard.text, hard.text
    wanted, found = (next(line for line in each.text.splitlines() if "digests" in line) for each in (calm, hard))
    assert found == wanted, hard.text


@pytest.mark.system
def test_moments_that_one_rank_has_for_all_come_from_its_arena(dock: Console):
    """Of a ZeroRedundancyOptimizer no replica has the moments of a lost rank."""
    deaths = ["0.0:forward:2", "1.0:after vote:5"]
    calm, hard = (launch(dock, f"zero-{len(each)}", 2, "ddp,norm,zero", each) for each in ([], deaths))
    assert (calm.code, hard.code) == (0, 0), calm.text + hard.text
    wanted, found = (next(line for line in each.text.splitlines() if "digests" in line) for each in (calm, hard))
    assert found == wanted, hard.text


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8, int(os.environ.get("ARGOSY_SOAK_PROGRAMS", "208"))))
def test_a_program_survives_for_long(dock: Console, seed: int):
    check(dock, seed)
