"""From where a crew takes its state, and which logged rows count: decided from what was said alone."""

import random

from seeds import each

from argosy.train.heal_decision import FromArenas, FromDisk, FromPeer, Told, Version, decide_healing
from argosy.train.rows import Best, Line, Row, WentBack, settle_rows


def alive(step: int, view: int = 1, **said: object) -> Told:
    return Told(False, Version(step, view), **said)  # pyright: ignore[reportArgumentType]


def versions(*steps: int, view: int = 1) -> list[Version]:
    return [Version(step, view) for step in steps]


def test_h2_replicas_come_from_the_first_living_rank():
    assert decide_healing([Told(True), alive(7), alive(7)]) == FromPeer(1, Version(7, 1), (0,))


def test_nobody_is_fresh_and_nobody_takes_anything():
    assert decide_healing([alive(7), alive(7)]) == FromPeer(0, Version(7, 1), ())


def test_a_first_meeting_looks_on_disk():
    assert decide_healing([Told(True), Told(True)]) == FromDisk()


def test_h3_shards_go_back_to_the_step_that_all_have():
    said = [alive(5, replicated=False, held=versions(4, 5)), Told(True, replicated=False, held=versions(3, 4))]
    assert decide_healing(said) == FromArenas(Version(4, 1))


def test_h3_shards_of_two_attempts_are_not_combined():
    said = [
        Told(True, replicated=False, held=[Version(4, 1), Version(5, 1)]),
        alive(5, 2, replicated=False, held=[Version(4, 1), Version(5, 2)]),
    ]
    assert decide_healing(said) == FromArenas(Version(4, 1))


def test_a_rank_that_lives_has_its_step_even_if_its_arena_does_not():
    said = [alive(5, replicated=False, held=versions(3, 4)), Told(True, replicated=False, held=versions(4, 5))]
    assert decide_healing(said) == FromArenas(Version(5, 1))


def test_shards_without_a_common_step_come_from_disk():
    said = [alive(9, replicated=False, held=versions(8, 9)), Told(True, replicated=False)]
    assert decide_healing(said) == FromDisk()


def test_h4_a_torn_replica_sends_all_to_the_checkpoint():
    assert decide_healing([alive(5), alive(4, torn=True), Told(True)]) == FromDisk()


def test_h4_torn_shards_go_back_to_their_arenas():
    held = versions(3, 4)
    said = [alive(4, replicated=False, torn=True, held=held), Told(True, replicated=False, held=held)]
    assert decide_healing(said) == FromArenas(Version(4, 1))


def test_h5_replicas_in_doubt_take_the_step_from_a_rank_that_applied_it():
    assert decide_healing([alive(4), Told(True), alive(5)]) == FromPeer(2, Version(5, 1), (0, 1))
    assert decide_healing([alive(4), Told(True), alive(4)]) == FromPeer(0, Version(4, 1), (1,))


def test_h5_shards_in_doubt_go_back_if_a_part_is_missing():
    said = [alive(5, replicated=False, held=versions(4, 5)), alive(4, replicated=False, held=versions(3, 4))]
    assert decide_healing(said) == FromArenas(Version(4, 1))


def crew(draw: random.Random) -> list[Told]:
    """What ranks say after a loss: some are fresh, some torn, and votes in doubt leave living ranks at two steps."""
    replicated, step = draw.random() < 0.5, draw.randrange(2, 9)
    told: list[Told] = []
    for _ in range(draw.randrange(1, 6)):
        newest = Version(step - draw.randrange(2), draw.randrange(1, 3))
        held = [] if replicated or draw.random() < 0.1 else [Version(newest.step - 1, 1), newest]
        if draw.random() < 0.5:
            told.append(Told(True, replicated=replicated, held=held))
        else:
            told.append(Told(False, newest, replicated, draw.random() < 0.2, held))
    return told


@each("seed", range(300))
def test_every_decision_can_be_carried_out(seed: int):
    told = crew(random.Random(seed))
    living = [each for each in told if not each.fresh]
    match decide_healing(told):
        case FromPeer(source, version, to):
            assert not told[source].fresh
            assert not any(each.torn for each in told)
            assert told[source].version == version
            assert all((rank in to) == (each.fresh or each.version != version) for rank, each in enumerate(told))
        case FromArenas(version):
            assert all(version in [*each.held, *([] if each.fresh or each.torn else [each.version])] for each in told)
        case FromDisk():
            assert not living or not told[0].replicated or any(each.torn for each in told)  # H2


@each("seed", range(100))
def test_h1_where_replicas_live_nothing_is_lost(seed: int):
    draw = random.Random(seed)
    step = draw.randrange(9)
    told = [Told(True) if draw.random() < 0.6 else alive(step) for _ in range(6)] + [alive(step)]
    decision = decide_healing(told)
    assert isinstance(decision, FromPeer)
    assert decision.version.step == step


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
