"""From where a crew takes its state, and which logged rows count: decided from what was said alone."""

import random

from seeds import each

from argosy.train.healing import FromDisk, FromPeer, FromPockets, Told, decide_healing
from argosy.train.rows import Best, Line, Row, WentBack, settle_rows


def alive(step: int, **said: object) -> Told:
    return Told(False, step, **said)  # pyright: ignore[reportArgumentType]


def test_h2_copies_come_from_the_first_living_rank():
    assert decide_healing([Told(True), alive(7), alive(7)]) == FromPeer(1, 7, (0,))


def test_nobody_is_fresh_and_nobody_takes_anything():
    assert decide_healing([alive(7), alive(7)]) == FromPeer(0, 7, ())


def test_a_first_meeting_looks_on_disk():
    assert decide_healing([Told(True), Told(True)]) == FromDisk()


def test_h3_shards_go_back_to_the_step_that_all_have():
    said = [alive(5, copies=False, full=[4, 5]), Told(True, full=[3, 4])]
    assert decide_healing(said) == FromPockets(4)


def test_a_rank_that_lives_has_its_step_even_if_its_pocket_does_not():
    said = [alive(5, copies=False, full=[3, 4]), Told(True, full=[4, 5])]
    assert decide_healing(said) == FromPockets(5)


def test_shards_without_a_common_step_come_from_disk():
    assert decide_healing([alive(9, copies=False, full=[8, 9]), Told(True)]) == FromDisk()


def test_copies_all_lost_at_once_come_from_the_newest_pocket():
    said = [Told(True, full=[3]), Told(True, full=[4]), Told(True)]
    assert decide_healing(said) == FromPeer(1, 4, (0, 2), pocketed=True)


def crew(draw: random.Random) -> list[Told]:
    """What the ranks of a crew say that was lost in part, of a run that may come so far."""
    copies, step = draw.random() < 0.5, draw.randrange(2, 9)
    told: list[Told] = []
    for _ in range(draw.randrange(1, 6)):
        newest = step - draw.randrange(2)
        full = [] if copies or draw.random() < 0.1 else [newest - 1, newest]
        fresh = draw.random() < 0.5
        told.append(Told(True, full=full) if fresh else Told(False, newest if full else step, copies, full))
    return told


@each("seed", range(300))
def test_every_decision_can_be_carried_out(seed: int):
    told = crew(random.Random(seed))
    decision = decide_healing(told)
    living = [each for each in told if not each.fresh]
    match decision:
        case FromPeer(source, step, fresh, pocketed):
            has = told[source].full if pocketed else [told[source].step]
            assert step in has
            assert all(told[rank].fresh for rank in fresh)
            assert source not in fresh
            assert {*fresh, source} >= {rank for rank, each in enumerate(told) if each.fresh}
            assert pocketed == (not living)
        case FromPockets(step):
            assert all(step in [*each.full, *([] if each.fresh else [each.step])] for each in told)
        case FromDisk():
            assert not living or not living[0].copies  # H2


@each("seed", range(100))
def test_h1_where_copies_live_nothing_is_lost(seed: int):
    draw = random.Random(seed)
    step = draw.randrange(9)
    told = [Told(True) if draw.random() < 0.6 else alive(step) for _ in range(6)] + [alive(step)]
    decision = decide_healing(told)
    assert isinstance(decision, FromPeer)
    assert decision.step == step


@each("seed", range(200))
def test_rows_are_those_of_a_run_that_never_went_back(seed: int):
    draw = random.Random(seed)
    records: list[Row | WentBack] = []
    step = newest = 0
    for attempt in range(60):
        if draw.random() < 0.1 and step:
            step = draw.randrange(step)
            records.append(WentBack(step, 0.0))
            newest = step
        step += 1
        newest = max(newest, step)
        records.append(Row(step, 0.0, {"attempt": attempt}))
    settled = settle_rows(records)
    assert [row.step for row in settled] == list(range(1, newest + 1))
    last = {row.step: row for row in records if isinstance(row, Row)}
    assert settled == [last[row.step] for row in settled]


def test_rows_of_one_step_are_one():
    rows = settle_rows([Row(3, 1.0, {"loss": 2.0}), Row(3, 2.0, {"val": 1.0})])
    assert rows == [Row(3, 2.0, {"loss": 2.0, "val": 1.0})]


def test_the_best_value_ages_until_a_better_one_comes():
    lowest, highest = Best(), Best()
    for step, value in enumerate([3.0, 2.0, float("nan"), 4.0]):
        lowest.see(value, step, highest=False)
        highest.see(value, step, highest=True)
    assert (lowest.value, lowest.step, lowest.age) == (2.0, 1, 2)
    assert (highest.value, highest.step, highest.age) == (4.0, 3, 0)


def test_a_first_value_that_is_no_number_is_never_the_best():
    best = Best()
    best.see(float("nan"), 1, highest=False)
    best.see(5.0, 2, highest=False)
    assert (best.value, best.step, best.age) == (5.0, 2, 0)


def test_the_line_has_rate_and_time_left():
    line = Line(every_s=10.0)
    assert line.due(0, 100, {}, 0.0) == ""
    assert line.due(9, 100, {}, 9.9) == ""
    assert line.due(20, 100, {"loss": 0.5}, 10.0) == "step 20 of 100 · loss 0.5 · 2 steps/s · 40 s left"
