"""Gloo inside instead of shared memory, as between hosts: killed ranks are replaced, and the bits stay the same."""

from collections.abc import Iterator

import pytest
from console import Console, terminal
from voyages import campaign, check

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
@pytest.mark.timeout(20_000)
@pytest.mark.parametrize(("kind", "ranks"), KINDS)
def test_two_hundred_kills(gloo: Console, kind: str, ranks: int):
    """Prints how many ranks were killed, where, and how many trainings ended with the digest of the undisturbed one."""
    campaign(gloo, kind, ranks, "through Gloo")
