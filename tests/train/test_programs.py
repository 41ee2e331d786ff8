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
EXTRAS = ["micro", "sgd", "two", "schedule", "scaler", "once", "expert", "equal"]
EXCHANGES = ["late", "messages", "critic", "nan"]
PLACES = ["forward", "reduced", "before vote", "after vote", "after vote", "end", "critic"]


class Program(NamedTuple):
    """How many ranks run which parts, and who dies where."""

    ranks: int
    parts: str
    deaths: list[str]


def generate(seed: int) -> Program:
    """The program of a seed."""
    draw = random.Random(seed)
    ranks, wrapper = draw.choice([2, 2, 3]), draw.choice(["ddp", "ddp", "replicate", "fsdp", "fsdp"])
    extras = EXTRAS + (["norm", "ema"] if wrapper == "ddp" else [])  # What else can be copied, and is synchronised.
    parts = [wrapper, *(part for part in extras if draw.random() < 0.25)]
    if wrapper != "ddp" and {"scaler", "expert"} <= set(parts):  # torch's scaler takes no mix of DTensors and others.
        parts.remove("expert")
    parts += [f"{part}{draw.randrange(1, 6)}" for part in EXCHANGES if draw.random() < 0.35]
    generations, deaths = [0] * ranks, list[str]()
    for step in sorted(draw.randrange(STEPS) for _ in range(draw.choice([1, 1, 2, 3]))):
        rank = draw.randrange(ranks)
        deaths.append(f"{rank}.{generations[rank]}:{draw.choice(PLACES)}:{step}")
        generations[rank] += 1
    if draw.random() < 0.5:
        parts = [part.replace("late", "background") for part in parts]
    return Program(ranks, ",".join(parts), deaths)


@pytest.fixture(scope="module")
def dock(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with terminal(tmp_path_factory.mktemp("dock")) as console:
        yield console


def launch(console: Console, name: str, ranks: int, parts: str, deaths: list[str]) -> Ended:
    words = ["run", "-n", str(ranks), "--name", name, SCRIPT, name, str(STEPS), parts, *deaths]
    return console.argosy(*words, patience_s=PATIENCE_S)


def check(console: Console, seed: int) -> None:
    program = generate(seed)
    calm = launch(console, f"calm-{seed}", program.ranks, program.parts, [])
    assert calm.code == 0, f"{program}\n{calm.text}"
    hard = launch(console, f"hard-{seed}", *program)
    assert hard.code == 0, f"{program}\n{hard.text}"
    wanted, found = (next(line for line in each.text.splitlines() if "digests" in line) for each in (calm, hard))
    assert found == wanted, f"{program}\n{hard.text}"
    for name in (f"calm-{seed}", f"hard-{seed}"):
        shutil.rmtree(console.cwd / name)


@pytest.mark.parametrize("seed", range(8))
def test_a_program_survives(dock: Console, seed: int):
    check(dock, seed)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(8, int(os.environ.get("ARGOSY_SOAK_PROGRAMS", "208"))))
def test_a_program_survives_for_long(dock: Console, seed: int):
    check(dock, seed)
