"""The ledger: every second in one class, waiting charged to whom it waited for."""

import random

import numpy as np
from recordings import MS, Recording, launch_of, life

from argosy.insight.lanes import Class
from argosy.insight.ledger import LaunchLedger, ledger_of


def milliseconds(ledger: LaunchLedger, rank: int) -> dict[Class, float]:
    return {kind: ns / MS for kind, ns in ledger.rows[rank].totals().items()}


def assert_closed(ledger: LaunchLedger) -> None:
    for row in ledger.rows:
        assert sum(row.totals().values()) == row.end - row.begin
        assert (row.segments.begin[1:] == row.segments.end[:-1]).all()
        assert (row.segments.end > row.segments.begin).all()


def test_the_innermost_classified_span_owns_the_time():
    one = Recording(0)
    one.span("data", 100, 110).span("forward", 110, 130).span("epoch", 100, 190)
    one.span("gc", 115, 120).span("my own", 121, 125).span("backward", 135, 150).span("optimizer", 150, 160).step(160)
    ledger = ledger_of(launch_of([one], 200))
    assert_closed(ledger)
    assert milliseconds(ledger, 0) == {
        Class.STARTUP: 100,
        Class.DATA: 10,
        Class.COMPUTE: 15 + 15 + 10,
        Class.GC: 5,
        Class.HOST: 5,
        Class.IDLE: 40,
    }


def test_other_threads_own_no_time():
    one = Recording(0).span("forward", 10, 20).step(30)
    one.span("checkpoint", 12, 28, lane=1)
    ledger = ledger_of(launch_of([one], 30))
    assert milliseconds(ledger, 0) == {Class.STARTUP: 10, Class.COMPUTE: 10, Class.HOST: 10}


def slow_rank(cause: str, *, shift: float = 0.0, culprit: int = 2, ranks: int = 4) -> LaunchLedger:
    """Ten steps in which one rank does something for 30 ms before an all_reduce that takes 5 ms."""
    recordings = []
    for rank in range(ranks):
        one = Recording(rank, shift=shift if rank == 1 else 0.0)
        for step in range(10):
            at, late = 100 + step * 60.0, 30.0 if rank == culprit else 0.0
            if rank == culprit and cause != "host":
                one.span(cause, at, at + 30)
            one.span("forward", at + late, at + late + 10)
            one.reduce(at + late + 10, at + 45)
            one.span("optimizer", at + 45, at + 50).step(at + 50)
        recordings.append(one)
    return ledger_of(launch_of(recordings, 800))


def test_waiting_is_charged_to_the_rank_that_came_last_and_to_what_it_did():
    for cause, kind in (("data", Class.DATA), ("checkpoint", Class.CHECKPOINT), ("gc", Class.GC), ("host", Class.HOST)):
        ledger = slow_rank(cause)
        assert_closed(ledger)
        for rank in (0, 1, 3):
            assert milliseconds(ledger, rank)[Class.PEER_WAIT] == 300
            assert milliseconds(ledger, rank)[Class.COMM] == 50
        assert Class.PEER_WAIT not in milliseconds(ledger, 2)
        # A step begins with its data: what the slow rank does before its first one is start-up.
        assert milliseconds(ledger, 2)[kind] == {"data": 300, "host": 360}.get(cause, 270)
        blamed = {(culprit, cause) for _, culprit, cause in ledger.blame()}
        assert (2, kind) in blamed
        assert {culprit for culprit, _ in blamed} == {2}


def test_relabelling_the_ranks_permutes_the_rows():
    a, b = slow_rank("data", culprit=2), slow_rank("data", culprit=0)
    order = [2, 1, 0, 3]
    assert [milliseconds(a, rank) for rank in range(4)] == [milliseconds(b, order[rank]) for rank in range(4)]


def test_a_wrong_clock_moves_the_border_of_waiting_and_no_sum():
    right, wrong = slow_rank("data"), slow_rank("data", shift=1.0)
    assert_closed(wrong)
    for rank in range(4):
        a, b = (
            sum(milliseconds(each, rank).get(kind, 0) for kind in (Class.COMM, Class.PEER_WAIT))
            for each in (right, wrong)
        )
        assert a == b
        if rank != 1:
            assert abs(milliseconds(right, rank).get(Class.DATA, 0) - milliseconds(wrong, rank).get(Class.DATA, 0)) <= 0


def test_blame_follows_a_chain_of_waits():
    """Rank 0 waits for 1, which waited for 2, whose data was slow."""
    zero, one, two = Recording(0), Recording(1), Recording(2)
    for each in (zero, one, two):
        each.span("data", 0, 1)
        each.reduce(1, 2)
    two.span("data", 2, 42)
    # The second operation is between 1 and 2 only, the third between all: here all have group 0, so 0 joins late.
    zero.issue(2), one.wait(2, 42, one.issue(2)), two.reduce(42, 42.5)
    zero.wait(3, 60, zero.issue(3)), one.wait(43, 60, one.issue(60)), two.wait(43, 60, two.issue(43))
    for each in (zero, one, two):
        each.step(61)
    ledger = ledger_of(launch_of([zero, one, two], 62))
    assert_closed(ledger)
    assert ledger.blame()[1, 2, Class.DATA] == 40 * MS
    assert {(culprit, cause) for rank, culprit, cause in ledger.blame() if rank == 0} <= {
        (1, Class.HOST),
        (2, Class.DATA),
    }


def test_the_end_of_a_backward_pass_after_ddps_last_collective_is_a_wait():
    recordings = []
    for rank in range(2):
        one = Recording(rank)
        for step in range(3):
            at = step * 100.0
            one.span("forward", at, at + 10)
            one.span("backward", at + 10, at + 80)
            one.issue(at + 20)
            one.issue(at + (40 if rank else 70))
            one.step(at + 90)
        recordings.append(one)
    ledger = ledger_of(launch_of(recordings, 300))
    assert_closed(ledger)
    assert milliseconds(ledger, 1)[Class.PEER_WAIT] == 90
    assert milliseconds(ledger, 1)[Class.COMM] == 30
    assert milliseconds(ledger, 0)[Class.COMM] == 30
    assert ledger.blame() == {(1, 0, Class.COMPUTE): 90 * MS}


def test_g3_those_who_wait_for_a_replaced_rank_are_in_restart_and_unfinished_work_is_lost():
    survivor, killed, successor = Recording(0), Recording(1), Recording(1, generation=1)
    for step in range(3):
        for each in (survivor, killed):
            each.span("forward", 100 + step * 10, 108 + step * 10).step(110 + step * 10)
    killed.span("forward", 130, 139)  # It dies at 140, in the fourth step.
    survivor.span("forward", 130, 138)
    survivor.wait(138, 200, survivor.issue(138))
    survivor.step(200, done=3).span("forward", 200, 208).step(210, done=4)
    successor.span("forward", 180, 190)  # It rehearses before it joins.
    successor.step(199, done=3).span("forward", 200, 208).step(210, done=4)
    lives = [life(0, 0, 300), life(1, 0, 140, ok=False), life(1, 150, 300, generation=1)]
    ledger = ledger_of(launch_of([survivor, killed, successor], 300, lives))
    assert_closed(ledger)
    assert milliseconds(ledger, 1)[Class.RESTART] == 60
    assert milliseconds(ledger, 1)[Class.LOST] == 10
    assert milliseconds(ledger, 0)[Class.LOST] == 10  # The attempt that was dropped: 8 of work, 2 of waiting.
    assert milliseconds(ledger, 0)[Class.RESTART] == 60


def test_g2_work_is_not_lost_to_a_replacement_that_was_stopped_before_its_first_step():
    killed, successor = Recording(0), Recording(0, generation=1)
    for step in range(3):
        killed.span("forward", 100 + step * 10, 108 + step * 10).step(110 + step * 10)
    successor.span("gc", 150, 155)
    lives = [life(0, 0, 140, ok=False), life(0, 145, 160, generation=1)]
    ledger = ledger_of(launch_of([killed, successor], 160, lives))
    assert_closed(ledger)
    assert Class.LOST not in milliseconds(ledger, 0)


def test_a_rank_without_a_process_still_has_a_row():
    one = Recording(0).span("forward", 10, 20).step(20)
    launch = launch_of([one], 30)
    launch.size = 2
    ledger = ledger_of(launch)
    assert_closed(ledger)
    assert milliseconds(ledger, 1) == {Class.STARTUP: 30}


def test_any_records_close():
    """Unbalanced, overlapping, lost and unordered records still give rows that add up."""
    names = ["forward", "backward", "data", "wait", "gc", "strange"]
    for seed in range(200):
        chance = random.Random(seed)
        recordings = []
        for rank in range(3):
            one = Recording(rank)
            for _ in range(chance.randrange(60)):
                at = chance.uniform(0, 200)
                match chance.randrange(4):
                    case 0:
                        one.span(chance.choice(names), at, at + chance.uniform(0, 50), lane=chance.randrange(2))
                    case 1:
                        one.reduce(at, at + chance.uniform(0, 30))
                    case 2:
                        one.step(at, done=chance.randrange(6))
                    case _:
                        one.records.append((at, chance.choice([1, 2]), chance.choice(names), 0, 0))
            recordings.append(one)
        lives = [life(0, 0, 100), life(0, 120, 200, generation=1), life(1, 3, 190), life(2, 0, 210)]
        launch = launch_of(recordings, 205, lives)
        ledger = ledger_of(launch)
        assert_closed(ledger)
        assert (ledger.steps.lasted >= 0).all(), seed
        assert np.isin(ledger.steps.rank, [0, 1, 2]).all()
