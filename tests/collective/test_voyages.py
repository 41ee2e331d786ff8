"""Ranks are killed in forward, backward, collectives, votes and re-forming: the result is the undisturbed one."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest
from crew import SOURCE
from warm import warm

VOYAGE = Path(__file__).parent / "scripts" / "voyage.py"
CONFIGURATIONS = [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]
LONG = [pytest.param(*each, marks=pytest.mark.system) for each in CONFIGURATIONS[1:]]


def sail(wrapper: str, size: int, seeds: Sequence[int], *, compiled: bool = True, timeout_s: float = 500) -> None:
    """All seeds, after the undisturbed voyage: all die who are to die, the others live on, the digests are the same."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {} if compiled else {"ARGOSY_NATIVE": "0"}
    voyages = [f"{wrapper}:{size}:{seed}" for seed in (0, *seeds)]
    command = [*warm(), str(VOYAGE), *voyages]
    run = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, timeout=timeout_s)
    out = run.stdout
    lines = [line.split() for line in out.splitlines()]
    assert run.returncode == 0, out
    assert [line[0] for line in lines] == voyages
    for _, *digest, planned, replaced, kept, _ in lines:
        assert digest == lines[0][1:-4], out
        assert planned == replaced, out
        assert kept == "kept", out
    assert lines[0][-4] == "0"
    assert all(int(line[-4]) > 0 for line in lines[1:])


@pytest.mark.parametrize(("wrapper", "size"), [CONFIGURATIONS[0], *LONG])
def test_a_voyage_with_losses_ends_like_one_without(wrapper: str, size: int):
    sail(wrapper, size, range(1, 6))


def test_the_reference_engine_survives_too():
    sail("ddp", 2, [1, 2], compiled=False)


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("first", range(6, 256, 50))
@pytest.mark.parametrize(("wrapper", "size"), CONFIGURATIONS)
def test_many_voyages(wrapper: str, size: int, first: int):
    sail(wrapper, size, range(first, first + 50), timeout_s=650)
