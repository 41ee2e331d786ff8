"""How many spare processes a zygote keeps."""

from argosy.control.spares import ORPHANED_S, QUIET_S, SpareWish, decide_spares


def test_as_many_as_are_wanted_are_forked():
    assert decide_spares({"a": SpareWish(2), "b": SpareWish(1)}, {"a": 1, "b": 1}, asked_at=0.0, now=9.0) == {"a": 1}


def test_while_ranks_are_started_none_is_forked():
    wishes, have = {"a": SpareWish(2)}, {"a": 0}
    assert decide_spares(wishes, have, asked_at=9.0, now=9.0 + QUIET_S / 2) == {}
    assert decide_spares(wishes, have, asked_at=9.0, now=9.0 + QUIET_S) == {"a": 2}


def test_what_nobody_wants_any_more_is_let_go_at_once():
    assert decide_spares({}, {"a": 2}, asked_at=9.0, now=9.0) == {"a": -2}


def test_a_run_without_ranks_keeps_its_spares_only_for_a_while():
    wishes = {"a": SpareWish(2, bare_since=5.0)}
    assert decide_spares(wishes, {"a": 2}, asked_at=5.0, now=5.0 + ORPHANED_S / 2) == {}
    assert decide_spares(wishes, {"a": 2}, asked_at=5.0, now=5.0 + ORPHANED_S) == {"a": -2}
