"""Who has not arrived, from pages alone."""

from argosy.observe import GroupProgress, Progress, absentees


def group(
    issued: int, op: str = "all_reduce", *, name: str = "0", waiting: bool = False, size: int = 4
) -> GroupProgress:
    return GroupProgress(name, size, issued, op=op, site="train.py:9", waiting_since=int(waiting), stride=1)


def page(*groups: GroupProgress) -> Progress:
    return Progress(1, groups=groups)


def test_the_lowest_count_has_not_arrived():
    pages = {rank: page(group(12, waiting=True)) for rank in range(3)} | {3: page(group(11, "broadcast"))}
    (absence,) = absentees(pages)
    assert (absence.waiting, absence.absent, absence.site) == ((0, 1, 2), (3,), "train.py:9")
    assert absence.line() == "ranks 0-2 wait in all_reduce #12; rank 3 has not arrived"
    assert absence.line({3: "data.py:41"}) == "ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41"


def test_absent_ranks_are_grouped_by_place():
    pages = {0: page(group(3)), 1: page(group(2)), 2: page(group(2)), 3: page(group(2))}
    (absence,) = absentees(pages)
    line = absence.line({1: "a.py:1", 2: "b.py:2", 3: "a.py:1"})
    assert line == "rank 0 waits in all_reduce #3; ranks 1,3 at a.py:1; rank 2 at b.py:2"


def test_ranks_that_ran_ahead_do_not_give_the_number():
    """Rank 0 issued asynchronously what comes after; the collective that is missed is rank 1's."""
    pages = {0: page(group(9, "broadcast")), 1: page(group(7, size=3)), 2: page(group(6, size=3))}
    (absence,) = absentees(pages)
    assert absence.line() == "ranks 0-1 wait in all_reduce #7; rank 2 has not arrived"


def test_a_member_that_never_heard_of_the_group_is_absent():
    pages = {
        0: page(group(1, "barrier")),
        1: page(group(1, "barrier")),
        2: page(),
        3: page(group(1, "barrier")),
    }
    (absence,) = absentees(pages)
    assert absence.line() == "ranks 0-1,3 wait in barrier #1; rank 2 has not arrived"


def test_equal_counts_blame_nobody():
    assert absentees({rank: page(group(5, waiting=True)) for rank in range(4)}) == []
    assert absentees({}) == []
    assert absentees({0: page()}) == []


def test_different_operations_of_one_number_are_a_mismatch():
    pages = {rank: page(group(5, waiting=True)) for rank in range(3)} | {3: page(group(5, "broadcast", waiting=True))}
    (absence,) = absentees(pages)
    assert absence.line() == "ranks 0-2 wait in all_reduce #5; rank 3 in broadcast #5 at train.py:9"


def test_send_and_recv_are_no_mismatch():
    pages = {0: page(group(5, "send", waiting=True, size=2)), 1: page(group(5, "recv", waiting=True, size=2))}
    assert absentees(pages) == []


def test_who_waits_elsewhere_is_a_victim_and_comes_last():
    """Rank 1 is missed in `a` because it waits in `b` for rank 2, which is free."""
    pages = {
        0: page(group(2, name="a", waiting=True, size=2)),
        1: page(group(1, name="a", size=2), group(4, name="b", waiting=True, size=2)),
        2: page(group(3, name="b", size=2)),
    }
    first, second = absentees(pages)
    assert (first.group, first.absent, first.elsewhere) == ("b", (2,), ())
    assert (second.group, second.absent, second.elsewhere) == ("a", (1,), (1,))
