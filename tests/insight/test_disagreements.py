"""The first collective that ranks did not issue alike is named, with the rank at fault."""

from recordings import Recording, launch_of

from argosy.insight.disagreements import judge_collectives
from argosy.insight.store import LaunchData


def training(odd: list[tuple[str, int]], others: list[tuple[str, int]]) -> LaunchData:
    """Ten steps alike; then ranks 0, 1 and 3 issue `others`, and rank 2 `odd`."""
    ranks = [Recording(rank) for rank in range(4)]
    for one in ranks:
        for number in range(10):
            one.issue(100.0 + number, size=4000)
        for op, size in odd if one.rank == 2 else others:
            one.issue(200.0, op, size)
    return launch_of(ranks, 300)


def kinds(launch: LaunchData) -> list[tuple[str, list[int]]]:
    return [(verdict.kind, verdict.ranks) for verdict in judge_collectives(launch)]


def test_alike_is_no_verdict():
    alike = [("all_reduce", 8), ("barrier", 0), ("all_gather", 8)]
    assert kinds(training(alike, alike)) == []


def test_sizes_of_a_gather_may_differ():
    assert kinds(training([("all_gather", 8)], [("all_gather", 12)])) == []


def test_a_rank_that_ends_earlier_is_no_disagreement():
    assert kinds(training([], [("all_reduce", 8)])) == []


def test_another_shape_is_named_with_both_sizes():
    launch = training([("all_reduce", 3600)], [("all_reduce", 4400)])
    assert kinds(launch) == [("mismatched_shape", [2])]
    assert "#11 of group 0 is all_reduce of 3,600 bytes on rank 2" in judge_collectives(launch)[0].why


def test_a_rank_that_skips_goes_on_to_what_it_did_before():
    assert kinds(training([("all_reduce", 4000)], [("all_reduce", 8)])) == [("missing_collective", [2])]


def test_a_rank_that_skips_does_what_the_others_do_next():
    odd, others = [("barrier", 0)], [("all_reduce", 8), ("barrier", 0)]
    assert kinds(training(odd, others)) == [("missing_collective", [2])]


def test_another_operation_is_named():
    assert kinds(training([("barrier", 0)], [("all_reduce", 8)])) == [("mismatched_collective", [2])]


def test_a_replaced_rank_counts_from_one_and_is_not_compared():
    launch = training([("all_reduce", 3600)], [("all_reduce", 4400)])
    launch.processes[2, 1] = launch.processes.pop((2, 0))
    assert kinds(launch) == []
