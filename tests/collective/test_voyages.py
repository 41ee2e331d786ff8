"""Ranks are killed in forward, backward, collectives, votes and re-forming: the result is the undisturbed one."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest
from crew import SOURCE

VOYAGE = Path(__file__).parent / "scripts" / "voyage.py"
CONFIGURATIONS = [("ddp", 2), ("ddp", 4), ("fsdp2", 2), ("fsdp2", 4)]


def sail(wrapper: str, size: int, seeds: list[int], compiled: bool = True) -> None:
    """All seeds, after the undisturbed voyage: the same digests, and no hang."""
    environment = os.environ | {"PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
    environment |= {} if compiled else {"ARGOSY_NATIVE": "0"}
    command = [sys.executable, str(VOYAGE), wrapper, str(size), "0", *map(str, seeds)]
    run = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        out, _ = run.communicate(timeout=70 * (1 + len(seeds)))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(run.pid, signal.SIGKILL)
    lines = [line.split() for line in out.splitlines()]
    assert run.returncode == 0, out
    assert len(lines) == 1 + len(seeds)
    digests = {tuple(line[1:-2]) for line in lines}
    assert len(digests) == 1, out
    assert int(lines[0][-2]) == 0
    assert sum(int(line[-2]) for line in lines[1:]) > 0


@pytest.mark.soak
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("wrapper", "size"), CONFIGURATIONS)
def test_a_voyage_with_losses_ends_like_one_without(wrapper: str, size: int):
    sail(wrapper, size, [1, 2, 3, 4, 5])


@pytest.mark.soak
@pytest.mark.timeout(200)
def test_the_reference_engine_survives_too():
    sail("ddp", 2, [1, 2], compiled=False)


@pytest.mark.soak
@pytest.mark.timeout(0)
@pytest.mark.parametrize(("wrapper", "size"), CONFIGURATIONS)
def test_many_voyages(wrapper: str, size: int):
    for first in range(6, 256, 10):
        sail(wrapper, size, list(range(first, first + 10)))
