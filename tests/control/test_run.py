"""One run's decisions: what follows from each event."""

import signal

from control.processes import a_launch

from argosy.control import facts, run
from argosy.control.messages import (
    Cleared,
    ClearRun,
    Exited,
    HostFailed,
    KillRanks,
    Noted,
    OpenStore,
    Order,
    SignalRanks,
    Started,
    StartRanks,
    StoreFailed,
    StoreOpened,
)
from argosy.control.restart import Restart
from argosy.control.run_events import (
    Begin,
    ClientCame,
    ClientLeft,
    EvidenceTaken,
    Finish,
    FromHost,
    Record,
    Recovered,
    RunEffect,
    StopWanted,
    TakeEvidence,
    Tick,
    ToHost,
)
from argosy.control.run_state import RunState
from argosy.core import RankId, WaitStatus
from argosy.observe import Flag

HOST = "a"


def rank(index: int, generation: int = 0) -> RankId:
    return RankId("main", index, generation)


def react(state: RunState, event: run.RunEvent, now: float) -> list[RunEffect]:
    return run.react(state, event, now)[1]


def begun(size: int = 3, restart: Restart | None = None, hosts: list[str] | None = None) -> RunState:
    """A run whose ranks have started."""
    state = run.new_run(
        1, a_launch(dims={"rank": size}, restart=restart or Restart.never()), hosts or [HOST] * size, 0.0
    )
    assert OpenStore(0) in orders(react(state, Begin(), 0.0))
    started = orders(react(state, FromHost(HOST, StoreOpened(0, 29500)), 0.0))
    assert {rank(index) for index in range(size)} == {
        each for order in started if isinstance(order, StartRanks) for each in order.ranks
    }
    for index in range(size):
        react(state, FromHost(state.slots[index].host, Started(rank(index), 100 + index)), 0.1)
    return state


def exited(index: int, status: WaitStatus, generation: int = 0) -> FromHost:
    return FromHost(HOST, Exited(rank(index, generation), status))


def orders(effects: list[RunEffect]) -> list[Order]:
    return [effect.order for effect in effects if isinstance(effect, ToHost)]


def told(effects: list[RunEffect]) -> list[facts.AnyFact]:
    return [effect.fact for effect in effects if isinstance(effect, Record)]


FAILED, KILLED, TERMINATED = WaitStatus(code=3), WaitStatus(signal=9), WaitStatus(signal=15)


def test_p1_nobody_is_told_to_stop_before_the_evidence_is_taken():
    state = begun()
    effects = react(state, exited(1, FAILED), 1.0)
    assert orders(effects) == []
    assert TakeEvidence(rank(1), "rank 1: exit code 3") in effects
    assert orders(react(state, Tick(), 2.0)) == []
    assert orders(react(state, EvidenceTaken(rank(1)), 3.0)) == [SignalRanks((rank(0), rank(2)), signal.SIGTERM)]


def test_p1_evidence_that_never_comes_is_not_waited_for_forever():
    state = begun()
    react(state, exited(1, FAILED), 1.0)
    assert orders(react(state, Tick(), 1.0 + run.EVIDENCE_S)) == [SignalRanks((rank(0), rank(2)), signal.SIGTERM)]


def test_p1_evidence_of_an_earlier_failure_does_not_stand_for_that_of_a_later_one():
    state = begun(restart=Restart.all(3))
    for each in range(2):  # The others have ended before: nobody waits for the evidence of the first failure.
        react(state, exited(each, WaitStatus(code=0)), 1.0)
    react(state, exited(2, FAILED), 2.0)
    react(state, FromHost(HOST, StoreOpened(1, 29501)), 2.1)
    react(state, FromHost(HOST, Exited(rank(1, 1), FAILED)), 2.2)
    assert orders(react(state, EvidenceTaken(rank(2)), 2.3)) == []
    stopped = SignalRanks((rank(0, 1), rank(2, 1)), signal.SIGTERM)
    assert orders(react(state, EvidenceTaken(rank(1, 1)), 2.4)) == [stopped]


def test_p1_evidence_that_was_lost_with_its_taker_is_taken_again():
    state = begun()
    react(state, exited(1, FAILED), 1.0)
    assert TakeEvidence(rank(1), "rank 1: exit code 3") in react(state, Recovered(), 1.5)


def test_p2_a_process_that_nobody_waits_for_is_killed():
    assert orders(react(begun(), FromHost(HOST, Started(rank(1), 555)), 1.0)) == [KillRanks((rank(1),))]
    assert orders(react(begun(), FromHost(HOST, Started(rank(1), 101)), 1.0)) == []


def test_p2_a_generation_starts_after_the_exit_of_the_one_before():
    state = begun(restart=Restart.all(1))
    react(state, exited(0, FAILED), 1.0)
    react(state, EvidenceTaken(rank(0)), 1.1)
    assert orders(react(state, exited(1, TERMINATED), 1.2)) == []
    assert orders(react(state, exited(2, TERMINATED), 1.3)) == [OpenStore(1)]
    ranks = tuple(rank(index, 1) for index in range(3))
    assert orders(react(state, FromHost(HOST, StoreOpened(1, 29501)), 1.4)) == [StartRanks(2, ranks, 29501)]


def test_p3_a_rank_that_ignores_the_signal_is_killed_after_the_grace_and_again():
    state = begun(size=1)
    assert orders(react(state, StopWanted("you", signal.SIGTERM), 1.0)) == [SignalRanks((rank(0),), signal.SIGTERM)]
    assert orders(react(state, Tick(), 5.9)) == []
    assert orders(react(state, Tick(), 6.0)) == [KillRanks((rank(0),))]
    assert orders(react(state, Tick(), 7.0)) == [KillRanks((rank(0),))]
    assert orders(react(state, exited(0, KILLED), 7.1)) == [ClearRun()]
    assert react(state, FromHost(HOST, Cleared()), 7.2) == [Finish(143, "stopped by you")]


def test_asked_twice_there_is_no_grace():
    state = begun(size=1)
    react(state, StopWanted("ctrl-c", signal.SIGINT), 1.0)
    assert orders(react(state, StopWanted("ctrl-c", signal.SIGINT), 1.5)) == [KillRanks((rank(0),))]


def test_a_stop_that_names_a_grace_has_it():
    state = begun(size=1)
    react(state, StopWanted("you", signal.SIGTERM, 0.5), 1.0)
    assert orders(react(state, Tick(), 1.5)) == [KillRanks((rank(0),))]


def test_p4_the_exit_code_is_that_of_the_first_failure():
    state = begun()
    react(state, exited(1, FAILED), 1.0)
    react(state, exited(0, WaitStatus(code=9)), 1.1)
    react(state, exited(2, WaitStatus(signal=6)), 1.2)
    assert react(state, FromHost(HOST, Cleared()), 1.3) == [Finish(3, "rank 1: exit code 3")]


def test_p5_what_is_said_of_an_older_generation_changes_nothing():
    state = begun(restart=Restart.rank())
    react(state, exited(1, KILLED), 1.0)
    assert react(state, exited(1, KILLED), 1.1) == []
    assert react(state, FromHost(HOST, Noted(rank(1), int(Flag.RUN_MANAGED), 2, True)), 1.2) == []
    assert state.managed == 0


def test_a_group_of_torchs_own_turns_rank_into_all_and_says_so():
    state = begun(restart=Restart.rank())
    react(state, FromHost(HOST, Noted(rank(0), int(Flag.PROCESS_GROUP), 0, False)), 0.5)
    restarting = [fact for fact in told(react(state, exited(1, KILLED), 1.0)) if isinstance(fact, facts.Restarting)]
    assert restarting[0].ranks == [0, 1, 2]
    assert "torch's own process group" in restarting[0].note


def test_without_a_group_only_the_failed_rank_is_replaced_and_every_host_hears_of_the_view():
    state = begun(restart=Restart.rank(), hosts=[HOST, HOST, "b"])
    effects = react(state, exited(1, KILLED), 1.0)
    assert ToHost(HOST, StartRanks(2, (rank(1, 1),), 29500)) in effects
    assert ToHost("b", StartRanks(2, (), 29500)) in effects
    assert len(orders(effects)) == 2


def test_two_ranks_lost_one_after_the_other_are_two_replacements():
    state = begun(restart=Restart.rank())
    assert StartRanks(2, (rank(1, 1),), 29500) in orders(react(state, exited(1, KILLED), 1.0))
    assert StartRanks(3, (rank(2, 1),), 29500) in orders(react(state, exited(2, KILLED), 1.1))


def test_progress_of_a_rank_that_was_started_together_with_it_counts():
    state = begun(restart=Restart.all(9))
    react(state, FromHost(HOST, Noted(rank(0), 0, 1, False)), 0.5)
    react(state, exited(1, FAILED), 1.0)
    assert state.budget.in_a_row == 0


def test_in_a_managed_run_only_the_ranks_own_progress_counts():
    state = begun(restart=Restart.rank())
    react(state, FromHost(HOST, Noted(rank(0), int(Flag.RUN_MANAGED), 2, True)), 0.5)
    react(state, FromHost(HOST, Noted(rank(1), int(Flag.RUN_MANAGED), 1, True)), 0.6)
    react(state, exited(1, FAILED), 1.0)
    assert state.budget.in_a_row == 1
    react(state, exited(0, KILLED), 5.0)
    assert state.budget.in_a_row == 0


def test_a_stop_during_a_restart_starts_nothing_any_more():
    state = begun(restart=Restart.all(1))
    react(state, exited(0, FAILED), 1.0)
    react(state, StopWanted("ctrl-c", signal.SIGINT), 1.1)
    react(state, exited(1, WaitStatus(signal=2)), 1.2)
    assert orders(react(state, exited(2, WaitStatus(signal=2)), 1.3)) == [ClearRun()]
    assert react(state, FromHost(HOST, Cleared()), 1.4) == [Finish(130, "stopped by ctrl-c")]


def test_a_stop_while_the_store_is_opened_ends_the_run():
    state = run.new_run(1, a_launch(dims={"rank": 2}), [HOST] * 2, 0.0)
    react(state, Begin(), 0.0)
    assert orders(react(state, StopWanted("ctrl-c", signal.SIGINT), 0.1)) == [ClearRun()]
    assert react(state, FromHost(HOST, StoreOpened(0, 29500)), 0.2) == []


def test_a_store_that_cannot_listen_ends_the_run():
    state = run.new_run(1, a_launch(dims={"rank": 2}), [HOST] * 2, 0.0)
    react(state, Begin(), 0.0)
    react(state, FromHost(HOST, StoreFailed(0, "port 29500 is in use")), 0.1)
    assert react(state, FromHost(HOST, Cleared()), 0.2) == [Finish(1, "port 29500 is in use")]


def test_a_run_ends_although_a_host_never_says_that_it_cleared_up():
    state = begun(size=1)
    react(state, exited(0, WaitStatus(code=0)), 1.0)
    assert react(state, Tick(), 1.0 + run.CLEAR_S) == [Finish(0, "every rank ended with exit code 0")]
    assert react(state, Recovered(), 99.0) == [Finish(0, "every rank ended with exit code 0")]


def test_a_run_ends_with_its_client():
    state = begun(size=1)
    assert orders(react(state, ClientLeft(), 1.0)) == [SignalRanks((rank(0),), signal.SIGTERM)]


def test_a_client_that_does_not_come_back_to_a_new_agent_ends_its_run():
    state = begun(size=1)
    react(state, Recovered(), 1.0)
    assert orders(react(state, Tick(), 1.0)) == []
    assert orders(react(state, Tick(), 1.0 + run.LEASE_S)) == [SignalRanks((rank(0),), signal.SIGTERM)]


def test_a_client_that_comes_back_keeps_its_run():
    state = begun(size=1)
    react(state, Recovered(), 1.0)
    react(state, ClientCame(), 5.0)
    assert react(state, Tick(), 1.0 + run.LEASE_S) == []


def test_a_host_that_can_start_no_rank_ends_the_run_with_its_reason():
    state = begun(size=1)
    react(state, FromHost(HOST, HostFailed("the environment was lost")), 1.0)
    react(state, exited(0, TERMINATED), 1.1)
    assert react(state, FromHost(HOST, Cleared()), 1.2) == [Finish(1, "the environment was lost")]
