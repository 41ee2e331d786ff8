"""What callers learn of a rank's fate from the facts of its run."""

import pytest
from seeds import each

from argosy.actors.rank_status import History
from argosy.control import facts
from argosy.control.restart import Restart
from argosy.core import RankId, WaitStatus
from argosy.fabric import Alive, Gone
from argosy.sim import HARSH, RunPlan, SimRun


def rank(index: int, generation: int = 0) -> RankId:
    return RankId("main", index, generation)


def started(index: int, generation: int = 0) -> facts.RankStarted:
    return facts.RankStarted(at=0, rank=rank(index, generation), pid=1)


def exited(index: int, generation: int = 0, code: int = 3, asked: bool = False) -> facts.RankExited:
    return facts.RankExited(at=0, rank=rank(index, generation), pid=1, status=WaitStatus(code=code), asked=asked)


def test_a_rank_lives_until_its_exit_is_told():
    history = History()
    assert history.fate(0, -1) == Alive(0)
    history.learn([started(0)])
    assert history.fate(0, 0) == Alive(0)
    history.learn([exited(0)])
    assert history.fate(0, 0) == Gone("exit code 3", replaced=True)  # Whether it is, is not known yet.


def test_a_replaced_rank_is_gone_and_its_successor_lives():
    history = History()
    restarting = facts.Restarting(at=0, ranks=[0, 1], generation=1, cause="rank 0: exit code 3")
    history.learn([started(0), started(1), exited(0), restarting, exited(1, asked=True), started(0, 1)])
    assert history.fate(0, 0) == Gone("exit code 3", replaced=True)
    assert history.fate(1, 0) == Gone("stopped, because of rank 0: exit code 3", replaced=True)
    assert history.fate(0, -1) == Alive(1)


def test_who_ends_well_is_not_replaced():
    history = History()
    history.learn([started(0), exited(0, code=0)])
    assert history.fate(0, -1) == Gone("exit code 0", replaced=False)


def test_after_the_end_nobody_lives_and_the_cause_is_told():
    history = History()
    stop = facts.StopAsked(at=0, by="argosy stop", signal=15)
    history.learn([started(0), started(1), stop, exited(0, asked=True)])
    history.learn([facts.LaunchEnded(at=0, launch=1, code=143, reason="stopped by argosy stop")])
    assert history.fate(0, 0) == Gone("stopped by argosy stop", replaced=False)
    assert history.fate(1, -1) == Gone("the run is over: stopped by argosy stop", replaced=False)


def test_a_new_launch_forgets_the_last():
    history = History()
    history.learn([started(0), exited(0)])
    history.learn([facts.LaunchStarted(at=0, launch=2, argv=[], size=1, host="h")])
    assert history.fate(0, -1) == Alive(0)


@pytest.mark.parametrize("policy", ["rank", "all"])
@each("seed", range(60))
def test_on_a_simulated_machine_at_most_one_generation_lives(seed: int, policy: str):
    """Through losses, restarts and stops: what has exited never lives again, and the newest only grows."""
    machine = SimRun(
        seed, HARSH, RunPlan(hosts=1, ranks=4, restart=Restart(policy=policy, startup_max=100, max_restarts=20))
    )
    finish = machine.run([])
    history = History()
    over: set[tuple[int, int]] = set()
    newest = dict.fromkeys(range(4), 0)
    for fact in machine.told:
        history.learn([fact])
        if isinstance(fact, facts.RankExited):
            over.add((fact.rank.index, fact.rank.generation))
        for index in range(4):
            fate = history.fate(index, -1)
            if isinstance(fate, Alive):
                assert fate.generation >= newest[index]
                newest[index] = fate.generation
        assert all(isinstance(history.fate(index, generation), Gone) for index, generation in over)
    history.learn([facts.LaunchEnded(at=0, launch=1, code=finish.code, reason=finish.reason)])
    assert all(isinstance(history.fate(index, -1), Gone) for index in range(4))
