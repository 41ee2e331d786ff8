"""What is restarted, how often, and how long it is waited before that."""

import pytest

from argosy.control.restart import (
    AGENT_DEATHS_MAX,
    AGENT_DELAY_S,
    Budget,
    Failure,
    GiveUp,
    Restart,
    RestartAfter,
    agent_delay_s,
    charge,
    decide_restart,
    parse_restart,
)
from argosy.core import ConfigError

GRID = {"dp": 2, "tp": 3}


def decide(restart: Restart, past: list[Failure], dims: dict[str, int]) -> RestartAfter | GiveUp:
    budget = Budget()
    for failure in past:
        budget = charge(budget, failure)
    return decide_restart(restart, budget, dims)


def failures(count: int, *, progressed: bool = True, every_s: float = 10.0, index: int = 1) -> list[Failure]:
    return [Failure(index, every_s * number, progressed, "rank 1: exit code 3") for number in range(count)]


def delay_s(decision: RestartAfter | GiveUp) -> float:
    assert isinstance(decision, RestartAfter), decision
    return decision.delay_s


@pytest.mark.parametrize(
    ("restart", "ranks"),
    [
        (Restart.rank(), (4,)),
        (Restart.all(), (0, 1, 2, 3, 4, 5)),
        (Restart.group("dp"), (3, 4, 5)),
        (Restart.group("tp"), (1, 4)),
    ],
)
def test_each_policy_replaces_its_ranks(restart: Restart, ranks: tuple[int, ...]):
    decision = decide(restart, failures(1, index=4), GRID)
    assert isinstance(decision, RestartAfter)
    assert decision.ranks == ranks


def test_never_gives_up_at_once():
    assert decide(Restart.never(), failures(1), GRID) == GiveUp("restarts were not asked for")


def test_r1_max_restarts_is_the_number_of_restarts():
    assert isinstance(decide(Restart.all(2), failures(2), GRID), RestartAfter)
    assert decide(Restart.all(2), failures(3), GRID) == GiveUp("2 of 2 restarts are used")


def test_r1_no_restart_when_the_budget_is_zero():
    assert isinstance(decide(Restart.all(0), failures(1), GRID), GiveUp)


def test_r2_failures_before_any_progress_have_a_budget_of_their_own():
    assert isinstance(decide(Restart.all(), failures(3, progressed=False), GRID), RestartAfter)
    decision = decide(Restart.all(), failures(4, progressed=False), GRID)
    assert decision == GiveUp("4 failures in a row before any progress, 3 restarts allowed")


def test_r2_progress_makes_it_whole_again():
    past = [*failures(3, progressed=False), *failures(1), *failures(3, progressed=False)]
    assert isinstance(decide(Restart.all(), past, GRID), RestartAfter)


def test_r3_restarts_within_an_hour_are_bounded():
    decision = decide(Restart.all(), failures(21, every_s=60.0), GRID)
    assert decision == GiveUp("20 restarts within an hour, 20 allowed")
    assert isinstance(decide(Restart.all(), failures(21, every_s=300.0), GRID), RestartAfter)


def test_r3_a_managed_rank_that_is_killed_after_progress_is_replaced_for_ever():
    killed = [Failure(1, float(number), True, "killed", managed=True) for number in range(2000)]
    assert isinstance(decide(Restart.rank(), killed, GRID), RestartAfter)
    crashed = [Failure(1, float(number), True, "exit code 3", managed=True, own=True) for number in range(21)]
    assert decide(Restart.rank(), crashed, GRID) == GiveUp("20 restarts within an hour, 20 allowed")


def own(index: int, *, progressed: bool = False, killed: bool = False) -> Failure:
    return Failure(index, 0.0, progressed, "rank 1: exit code 3", managed=True, own=not killed)


def test_r6_a_rank_that_fails_by_itself_has_three_attempts():
    given_up = GiveUp("rank 1 failed by itself 3 times in a row, without progress")
    patient = Restart(policy="rank", startup_max=10)
    assert isinstance(decide(patient, [own(1)] * 2, GRID), RestartAfter)
    assert decide(patient, [own(1)] * 3, GRID) == given_up
    assert decide(patient, [own(1, progressed=True), own(1), own(1)], GRID) == given_up
    assert isinstance(decide(patient, [own(1), own(1), own(1, progressed=True)], GRID), RestartAfter)
    assert isinstance(decide(patient, [own(1), own(1), own(1, killed=True)], GRID), RestartAfter)
    assert isinstance(decide(patient, [own(1), own(2), own(1)], GRID), RestartAfter)


def test_r4_the_delay_doubles_with_failures_in_a_row_up_to_its_bound():
    patient = Restart(policy="all", startup_max=100, per_hour=100)
    delays = [delay_s(decide(patient, failures(count, progressed=False), GRID)) for count in range(1, 12)]
    assert delays == [0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, 30.0]


def test_r4_after_progress_there_is_no_delay():
    assert delay_s(decide(Restart.all(), failures(5), GRID)) == 0.0


def test_policies_are_read_from_text():
    assert parse_restart("rank", None) == Restart.rank()
    assert parse_restart("all", 4) == Restart.all(4)
    assert parse_restart("group:dp", 2) == Restart.group("dp", 2)


@pytest.mark.parametrize("text", ["sometimes", "", "Rank", "../never", "rank.x", "__init__"])
def test_an_unknown_policy_is_refused(text: str):
    with pytest.raises(ConfigError, match="no such restart policy"):
        parse_restart(text, None)


def test_a_group_along_a_dimension_that_does_not_exist_is_refused():
    with pytest.raises(ConfigError, match="no such mesh dimension"):
        decide(Restart.group("pp"), failures(1), GRID)


def test_a_negative_budget_is_refused():
    with pytest.raises(ConfigError, match="must not be negative"):
        Restart.all(-1)


def test_r5_ranks_lost_at_once_are_one_failure():
    lost = [Failure(index, 5.0 + index / 100, False, "killed by SIGKILL") for index in range(6)]
    decision = decide(Restart.rank(1), lost, GRID)
    assert isinstance(decision, RestartAfter)
    assert (decision.ranks, decision.delay_s) == ((5,), 0.0)
    again = Failure(0, 5.2, False, "killed by SIGKILL", generation=1)
    assert decide(Restart.rank(1), [*lost, again], GRID) == GiveUp("1 of 1 restarts are used")


def test_r5_ranks_lost_one_after_the_other_are_several():
    lost = [Failure(index, 60.0 * index, True, "killed by SIGKILL") for index in range(2)]
    assert isinstance(decide(Restart.rank(1), lost, GRID), GiveUp)


def test_r7_an_agent_that_dies_again_and_again_is_replaced_after_a_delay():
    deaths = [10.0 * number for number in range(AGENT_DEATHS_MAX)]
    assert agent_delay_s(deaths[:-1], 45.0) == 0.0
    assert agent_delay_s(deaths, 45.0) == AGENT_DELAY_S
    assert agent_delay_s(deaths, 61.0) == 0.0
