"""What a run decides when one of its hosts is lost: who is replaced, where, and when it ends."""

import pytest
from control.processes import a_launch

from argosy.control import facts, run
from argosy.control.messages import (
    AcceptRun,
    ClearRun,
    Exited,
    KillRanks,
    Noted,
    OpenStore,
    Started,
    StartRanks,
    StoreOpened,
)
from argosy.control.restart import Restart
from argosy.control.run_events import Begin, EvidenceTaken, FromHost, HostGone, HostSilent, Record, RunEffect, ToHost
from argosy.control.run_state import RunState
from argosy.core import RankId, WaitStatus
from argosy.observe import Flag


def rank(index: int, generation: int = 0) -> RankId:
    return RankId("main", index, generation)


def a_run(restart: Restart, spares: tuple[str, ...] = ("c",), *, started: bool = True) -> RunState:
    """Two ranks on each of the hosts a and b."""
    state = run.new_run(1, a_launch(dims={"rank": 4}, restart=restart), ["a", "a", "b", "b"], 0.0)
    state.spares = list(spares)
    run.react(state, Begin(), 0.0)
    if started:
        run.react(state, FromHost("a", StoreOpened(0, 29500, "10.0.0.1")), 0.1)
        for index in range(4):
            run.react(state, FromHost("aabb"[index], Started(rank(index), 100 + index)), 0.2)
    return state


def react(state: RunState, event: run.RunEvent, now: float) -> list[RunEffect]:
    return run.react(state, event, now)[1]


def orders(effects: list[RunEffect], host: str) -> list[object]:
    return [effect.order for effect in effects if isinstance(effect, ToHost) and effect.host == host]


def test_the_ranks_of_a_lost_host_are_replaced_on_the_spare_one_and_no_others():
    state = a_run(Restart.rank())
    effects = react(state, HostGone("b", "no power"), 5.0)
    assert orders(effects, "b") == [KillRanks((rank(2), rank(3))), ClearRun()]
    assert Record(facts.HostLost(at=5.0, host="b", reason="no power", ranks=[2, 3], spare="c")) in effects
    assert orders(effects, "c") == [StartRanks(2, (rank(2, 1), rank(3, 1)), 29500, "10.0.0.1")]
    assert orders(effects, "a") == [StartRanks(2, (), 29500, "10.0.0.1")]
    assert state.budget.causes == 1


def test_the_ranks_of_a_host_that_never_joined_start_on_the_spare_one_and_nobody_is_restarted():
    state = a_run(Restart.never(), started=False)
    react(state, FromHost("a", StoreOpened(0, 29500, "10.0.0.1")), 0.1)
    for index in range(2):
        react(state, FromHost("a", Started(rank(index), 100 + index)), 0.2)
    effects = react(state, HostGone("b", "too little memory", joined=False), 5.0)
    assert orders(effects, "c") == [StartRanks(2, (rank(2), rank(3)), 29500, "10.0.0.1")]
    assert orders(effects, "a") == [StartRanks(2, (), 29500, "10.0.0.1")]
    assert orders(effects, "b") == [ClearRun()]
    assert state.budget.causes == 0
    react(state, FromHost("c", Started(rank(2), 7)), 6.0)
    assert (state.slots[2].pid, state.slots[2].host, state.alive) == (7, "c", 4)


def test_without_a_spare_host_one_that_never_joined_ends_the_run():
    state = a_run(Restart.never(), spares=(), started=False)
    react(state, FromHost("a", StoreOpened(0, 29500, "10.0.0.1")), 0.1)
    react(state, HostGone("b", "too little memory", joined=False), 5.0)
    assert state.final


def test_a_spare_host_knows_the_run_before_it_is_needed():
    state = run.new_run(1, a_launch(restart=Restart.rank()), ["a"], 0.0)
    state.spares = ["c"]
    assert orders(react(state, Begin(), 0.0), "c") == [AcceptRun(1, state.launch, warm=True)]


def test_a_spare_host_that_is_lost_is_told_to_forget_the_run_if_it_comes_back():
    assert orders(react(a_run(Restart.rank()), HostSilent("c"), 5.0), "c") == [ClearRun()]


def test_what_a_lost_host_says_changes_nothing():
    state = a_run(Restart.rank())
    react(state, HostGone("b", "no power"), 5.0)
    for report in (Exited(rank(2), WaitStatus(code=0)), Started(rank(2, 1), 7), Exited(rank(2, 1), WaitStatus(code=0))):
        assert react(state, FromHost("b", report), 6.0) == []
    assert state.slots[2].starting


def test_a_silent_host_is_replaced_where_there_is_a_spare_one_and_waited_for_where_there_is_none():
    state = a_run(Restart.rank(), spares=())
    assert react(state, HostSilent("b"), 5.0) == []
    assert state.alive == 4
    state = a_run(Restart.rank())
    assert orders(react(state, HostSilent("b"), 5.0), "c")


@pytest.mark.parametrize("restart", [Restart.never(), Restart(policy="auto")])
def test_silence_alone_ends_no_run(restart: Restart):
    state = a_run(restart)
    assert react(state, HostSilent("b"), 5.0) == []
    assert not state.final


def test_all_start_again_where_the_policy_says_so_with_a_new_store():
    state = a_run(Restart.all())
    effects = react(state, HostGone("a", "no power"), 5.0)
    assert orders(effects, "c") == []
    react(state, EvidenceTaken(rank(0)), 5.1)
    for index in (2, 3):
        effects = react(state, FromHost("b", Exited(rank(index), WaitStatus(signal=15))), 5.2)
    assert orders(effects, "c") == [OpenStore(1)]


def test_a_host_that_is_lost_while_its_store_opens_hands_that_on():
    state = a_run(Restart.never(), started=False)
    assert OpenStore(0) in orders(react(state, HostGone("a", "no power"), 0.05), "c")
    assert react(state, FromHost("a", StoreOpened(0, 1)), 0.06) == []
    effects = react(state, FromHost("c", StoreOpened(0, 29501, "10.0.0.3")), 0.1)
    assert orders(effects, "c") == [StartRanks(1, (rank(0), rank(1)), 29501, "10.0.0.3")]
    assert not [each for each in effects if isinstance(each, Record)]


@pytest.mark.parametrize(("restart", "spares"), [(Restart.rank(), ()), (Restart.never(), ("c",))])
def test_without_a_spare_host_or_a_restart_the_run_ends(restart: Restart, spares: tuple[str, ...]):
    state = a_run(restart, spares)
    react(state, HostGone("b", "no power"), 5.0)
    react(state, EvidenceTaken(rank(2)), 5.1)
    for index in (0, 1):
        react(state, FromHost("a", Exited(rank(index), WaitStatus(signal=15))), 5.2)
    assert state.outcome is not None
    assert state.outcome[0] == 1
    assert state.outcome[1].startswith("host b: no power")


def test_a_lost_host_holds_up_no_end():
    state = a_run(Restart.never())
    for index in range(4):
        react(state, FromHost("aabb"[index], Exited(rank(index), WaitStatus(code=0))), 5.0)
    assert state.clearing == {"a", "b"}
    react(state, HostGone("b", "no power"), 5.1)
    assert state.clearing == {"a"}


def test_a_failure_that_takes_all_ranks_along_ends_the_run_if_one_of_their_hosts_is_lost():
    state = a_run(Restart.rank(), spares=())
    for index in range(4):
        react(state, FromHost("aabb"[index], Noted(rank(index), int(Flag.PROCESS_GROUP), 2, True)), 1.0)
    for index in (2, 3):
        react(state, FromHost("b", Exited(rank(index), WaitStatus(code=0))), 5.0)
    react(state, HostGone("b", "no power"), 6.0)
    react(state, FromHost("a", Exited(rank(0), WaitStatus(code=3))), 7.0)
    react(state, EvidenceTaken(rank(0)), 7.1)
    react(state, FromHost("a", Exited(rank(1), WaitStatus(signal=15))), 7.2)
    assert state.outcome is not None
    assert state.outcome[:2] == (3, "rank 0: exit code 3")
