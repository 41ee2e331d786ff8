"""Spares: a lost rank's place is taken by one that was there before."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import until
from hands import Worker
from meshes import owner, until_gone

import argosy
from argosy import Cluster, ConfigError, Restart
from argosy.supervise.client.agent_client import list_runs

FOR_EVER = Restart(policy="rank", per_hour=100_000, startup_max=100_000)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with owner(tmp_path_factory.mktemp("owner")) as runtime:
        yield runtime


@pytest.fixture
def cluster(runtime: Path) -> Iterator[Cluster]:
    with argosy.local(show=False) as opened:
        yield opened


def spares_of(name: str, count: int) -> list[int]:
    """The spares that `argosy ps` lists, as soon as there are so many."""

    def listed() -> list[int]:
        return next((run.spares for run in list_runs().runs if run.name == name), list[int]())

    until(lambda: len(listed()) == count, f"{count} spares")
    return listed()


def test_a_lost_rank_is_replaced_by_a_spare_and_the_spare_by_another(cluster: Cluster):
    mesh = cluster.mesh(ranks=2, preload=[], restart=FOR_EVER, spares=1)
    workers = mesh.spawn(Worker)
    before = spares_of(mesh.name, 1)
    other = workers[0].pid().get()
    os.kill(workers[1].pid().get(), signal.SIGKILL)
    assert workers[1].options(retry=9).pid().get() == before[0]
    assert workers[0].pid().get() == other
    assert workers.generation().gather() == [0, 1]
    after = spares_of(mesh.name, 1)
    assert after != before
    mesh.stop()
    until_gone(*before, *after)


def test_a_spare_that_is_killed_or_stopped_costs_no_replacement(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER, spares=1)
    worker = mesh.spawn(Worker)[0]
    (killed,) = spares_of(mesh.name, 1)
    os.kill(killed, signal.SIGKILL)
    until(lambda: killed not in spares_of(mesh.name, 1), "another spare")
    (stopped,) = spares_of(mesh.name, 1)
    os.kill(stopped, signal.SIGSTOP)
    os.kill(worker.pid().get(), signal.SIGKILL)
    assert worker.options(retry=9).pid().get() == stopped
    mesh.stop()


def test_spares_outlive_the_agent_and_end_with_their_zygote(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER, spares=2)
    worker = mesh.spawn(Worker)[0]
    before = spares_of(mesh.name, 2)
    daemons = {daemon.what: daemon.pid for daemon in list_runs().daemons}
    os.kill(daemons["agent"], signal.SIGKILL)
    until_gone(daemons["agent"])
    assert spares_of(mesh.name, 2) == before
    os.kill(worker.pid().get(), signal.SIGKILL)
    assert worker.options(retry=9).pid().get() in before
    rest = spares_of(mesh.name, 2)
    os.kill(daemons["zygote"], signal.SIGKILL)
    until_gone(*rest)
    assert worker.pid().get() in before  # A rank of a zygote that is gone goes on.
    mesh.stop()


def test_spares_without_anything_to_replace_are_refused(cluster: Cluster):
    with pytest.raises(ConfigError, match="spares=2"):
        cluster.mesh(ranks=1, preload=[], spares=2)
