"""Gloo inside instead of shared memory, as between hosts: killed ranks are replaced, and the bits stay the same."""

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, terminal, until
from voyages import LONG, SCRIPT, Landed, check, haunt, sail

KINDS = [("plain", 2), ("sharded", 2), ("hybrid", 4), ("grid", 4), ("staged", 2)]
"""DDP, FSDP2, HSDP, tensor parallelism, a pipeline."""


@pytest.fixture(scope="module")
def gloo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """A terminal whose runs do not use shared memory; the scripts check that."""
    with terminal(tmp_path_factory.mktemp("gloo")) as console:
        console.env["ARGOSY_COLLECTIVES"] = "gloo"
        yield console


@pytest.mark.system
def test_a_killed_replica(gloo: Console):
    check(gloo, "plain", 2, "1.0:reduce:2", "0.0:after vote:5")


@pytest.mark.system
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_kills_in_every_part_of_a_step(gloo: Console, kind: str, ranks: int):
    check(gloo, kind, ranks, "1.0:forward:1", "0.0:before vote:3", "1.1:heal", "1.2:after vote:6")


@pytest.mark.soak
@pytest.mark.timeout(2000)
@pytest.mark.parametrize("seed", range(int(os.environ.get("ARGOSY_SOAK_FROM", "0")), 10))
def test_random_deaths(gloo: Console, seed: int, tmp_path: Path):
    """At least 20 in each, so more than 200 in all."""
    kind, ranks = KINDS[seed % len(KINDS)]
    calm = sail(gloo, kind, ranks, steps=LONG)
    directory, out = gloo.cwd / f"haunted-{seed}", tmp_path / "out"
    directory.mkdir()
    command = gloo.start("run", "-n", str(ranks), SCRIPT, str(directory), kind, str(LONG), out=out)
    until(lambda: len(list(directory.glob("built.*"))) == ranks, "all ranks")
    kills, zeroth = haunt(directory, lambda: command.poll() is not None, random.Random(seed))
    assert command.wait(PATIENCE_S) == 0, out.read_text()[-8000:]
    hard = Landed(directory, out.read_text())
    print(f"{kind} on {ranks} through Gloo: {kills} killed, {zeroth} of them rank 0")
    assert kills
    assert hard.digests == calm.digests
    assert [step for step, _ in hard.rows] == list(range(1, LONG + 1))
    shutil.rmtree(directory)
