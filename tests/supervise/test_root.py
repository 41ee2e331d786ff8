"""One run's decisions, on a simulated machine: whatever happens, the run ends as its invariants say."""

import signal

import msgspec
from machines import Machine
from seeds import each

from argosy.control import facts
from argosy.control.restart import Restart
from argosy.core import RankId, WaitStatus
from argosy.supervise.agent import effects as do
from argosy.supervise.agent import root

POLICIES = [
    Restart.never(),
    Restart.all(3),
    Restart.rank(4),
    Restart.rank(),
    Restart(policy="all", max_restarts=2, startup_max=2),
]


@each("seed", range(300))
def test_every_run_ends_with_its_budget_kept_and_can_be_replayed(seed: int):
    machine = Machine(seed, size=1 + seed % 5, restart=POLICIES[seed % len(POLICIES)])
    end = machine.run()
    if machine.restart.max_restarts is not None:
        assert machine.restarts <= machine.restart.max_restarts
    if machine.restart.policy == "never":
        assert machine.restarts == 0
    failures = [fact for fact in machine.told if isinstance(fact, facts.RankExited) and not fact.status.ok]
    if end.code == 0:
        assert not [fact for fact in failures if not fact.asked and machine.restart.policy == "never"]
    replayed = root.new_run(1, {"rank": machine.size}, machine.restart, machine.grace_s, machine.size)
    for event, at in machine.log:
        again = msgspec.msgpack.decode(msgspec.msgpack.encode(event), type=root.Event)
        replayed, _ = root.react(replayed, again, at)
    assert replayed == machine.state


def begun(size: int = 3, restart: Restart | None = None, grace_s: float = 5.0) -> root.RunState:
    state = root.new_run(1, {"rank": size}, restart or Restart.never(), grace_s, size)
    state, effects = root.react(state, root.Begin(), 0.0)
    assert effects == [do.OpenStore(0), do.Start(tuple(RankId("main", index) for index in range(size)))]
    for index in range(size):
        state, _ = root.react(state, root.Started(RankId("main", index), 100 + index), 0.1)
    return state


def kinds(effects: list[do.Effect]) -> list[str]:
    return [type(effect).__name__ for effect in effects if not isinstance(effect, do.Record | do.WakeAt)]


def test_p1_nobody_is_told_to_stop_before_the_evidence_is_taken():
    state, effects = root.react(begun(), root.Exited(RankId("main", 1), WaitStatus(code=3)), 1.0)
    assert kinds(effects) == ["TakeEvidence"]
    state, effects = root.react(state, root.Tick(), 2.0)
    assert kinds(effects) == []
    state, effects = root.react(state, root.EvidenceTaken(), 3.0)
    assert [effect for effect in effects if isinstance(effect, do.Signal)] == [
        do.Signal((RankId("main", 0), RankId("main", 2)), signal.SIGTERM)
    ]


def test_a_restart_is_recorded_before_the_evidence_of_the_failure():
    exited = root.Exited(RankId("main", 1), WaitStatus(code=3))
    _, effects = root.react(begun(restart=Restart.all(1)), exited, 1.0)
    told = [type(effect.fact if isinstance(effect, do.Record) else effect).__name__ for effect in effects]
    assert told[:3] == ["RankExited", "Restarting", "TakeEvidence"]


def test_p1_evidence_that_never_comes_is_not_waited_for_forever():
    state, _ = root.react(begun(), root.Exited(RankId("main", 1), WaitStatus(code=3)), 1.0)
    _, effects = root.react(state, root.Tick(), 1.0 + root.EVIDENCE_S)
    assert kinds(effects) == ["Signal"]


def test_p2_a_process_that_nobody_waits_for_is_killed():
    _, effects = root.react(begun(), root.Started(RankId("main", 1), 555), 1.0)
    assert kinds(effects) == ["Kill"]


def test_p2_a_generation_starts_after_the_exit_of_the_one_before():
    state, _ = root.react(begun(restart=Restart.all(1)), root.Exited(RankId("main", 0), WaitStatus(code=3)), 1.0)
    state, _ = root.react(state, root.EvidenceTaken(), 1.1)
    state, effects = root.react(state, root.Exited(RankId("main", 1), WaitStatus(signal=15)), 1.2)
    assert kinds(effects) == []
    _, effects = root.react(state, root.Exited(RankId("main", 2), WaitStatus(signal=15)), 1.3)
    assert kinds(effects) == ["OpenStore", "Start"]
    assert do.Start(tuple(RankId("main", index, 1) for index in range(3))) in effects


def test_p3_who_ignores_the_signal_is_killed_after_the_grace_and_again():
    state, effects = root.react(begun(size=1), root.StopWanted("you", signal.SIGTERM), 1.0)
    assert kinds(effects) == ["Signal"]
    state, effects = root.react(state, root.Tick(), 5.9)
    assert kinds(effects) == []
    state, effects = root.react(state, root.Tick(), 6.0)
    assert kinds(effects) == ["Kill"]
    state, effects = root.react(state, root.Tick(), 7.0)
    assert kinds(effects) == ["Kill"]
    _, effects = root.react(state, root.Exited(RankId("main", 0), WaitStatus(signal=9)), 7.1)
    assert do.Finish(143, "stopped by you") in effects


def test_asked_twice_there_is_no_grace():
    state, _ = root.react(begun(size=1), root.StopWanted("ctrl-c", signal.SIGINT), 1.0)
    _, effects = root.react(state, root.StopWanted("ctrl-c", signal.SIGINT), 1.5)
    assert kinds(effects) == ["Kill"]


def test_a_stop_that_names_a_grace_has_it():
    state, _ = root.react(begun(size=1), root.StopWanted("you", signal.SIGTERM, 0.5), 1.0)
    _, effects = root.react(state, root.Tick(), 1.5)
    assert kinds(effects) == ["Kill"]


def test_p4_the_exit_code_is_that_of_the_first_failure():
    state, _ = root.react(begun(), root.Exited(RankId("main", 1), WaitStatus(code=3)), 1.0)
    state, _ = root.react(state, root.Exited(RankId("main", 0), WaitStatus(code=9)), 1.1)
    _, effects = root.react(state, root.Exited(RankId("main", 2), WaitStatus(signal=6)), 1.2)
    assert do.Finish(3, "rank 1: exit code 3") in effects


def test_a_group_of_torchs_own_turns_rank_into_all_and_says_so():
    state, effects = root.react(
        begun(restart=Restart.rank()), root.Exited(RankId("main", 1), WaitStatus(signal=9), grouped=True), 1.0
    )
    told = [effect.fact for effect in effects if isinstance(effect, do.Record)]
    restarting = [fact for fact in told if isinstance(fact, facts.Restarting)]
    assert restarting[0].ranks == [0, 1, 2]
    assert "torch's own process group" in restarting[0].note
    assert state.turns[0].ranks == (0, 1, 2)


def test_without_a_group_only_the_failed_rank_is_replaced():
    _, effects = root.react(begun(restart=Restart.rank()), root.Exited(RankId("main", 1), WaitStatus(signal=9)), 1.0)
    assert do.Start((RankId("main", 1, 1),)) in effects
    assert "Signal" not in kinds(effects)


def test_two_ranks_lost_one_after_the_other_are_two_replacements():
    state, first = root.react(
        begun(restart=Restart.rank()), root.Exited(RankId("main", 1), WaitStatus(signal=9), progressed=True), 1.0
    )
    _, second = root.react(state, root.Exited(RankId("main", 2), WaitStatus(signal=9), progressed=True), 1.1)
    assert do.Start((RankId("main", 1, 1),)) in first
    assert do.Start((RankId("main", 2, 1),)) in second


def test_a_stop_during_a_restart_starts_nothing_any_more():
    state, _ = root.react(begun(restart=Restart.all(1)), root.Exited(RankId("main", 0), WaitStatus(code=3)), 1.0)
    state, _ = root.react(state, root.StopWanted("ctrl-c", signal.SIGINT), 1.1)
    state, _ = root.react(state, root.Exited(RankId("main", 1), WaitStatus(signal=2)), 1.2)
    _, effects = root.react(state, root.Exited(RankId("main", 2), WaitStatus(signal=2)), 1.3)
    assert kinds(effects) == ["Finish"]
    assert do.Finish(130, "stopped by ctrl-c") in effects
