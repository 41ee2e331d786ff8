"""Whatever happened to the files of a run, or to the clock meanwhile: it opens, every second has a class."""

import random
from pathlib import Path

import pytest
from recordings import EPOCH, MS, Recording, launch_of, life, write_run

from argosy.insight import OpenedRun
from argosy.insight.ledger import ledger_of
from argosy.insight.report import report_page
from argosy.observe import metrics_directory


def recording(rank: int) -> Recording:
    one = Recording(rank)
    for step in range(30):
        at = 100 + step * 50
        one.span("data", at, at + 5).span("forward", at + 5, at + 30).reduce(at + 30, at + 40).step(at + 45)
    return one


@pytest.mark.parametrize("seed", range(40))
def test_any_file_cut_off_or_overwritten_at_any_place_opens(tmp_path: Path, seed: int):
    chance = random.Random(seed)
    directory = write_run(tmp_path / "run", [recording(0), recording(1)], 1700)
    metrics = metrics_directory(directory, 1)
    (metrics / "peak.json").write_text('{"cpu_flops_per_core": 1e9}')
    (metrics / "start.json").write_text('{"git": {}, "packages": {}}')
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != "run.json")
    for path in chance.sample(files, chance.randint(1, 3)):
        raw = bytearray(path.read_bytes())
        if chance.random() < 0.4:
            del raw[chance.randrange(len(raw)) :]
        else:
            for _ in range(chance.randint(1, 20)):
                raw[chance.randrange(len(raw))] = chance.randrange(256)
        path.write_bytes(raw)
    run = OpenedRun(directory)
    assert report_page(run)
    for launch, ledger in zip(run.data.launches, run.ledgers, strict=True):
        assert all(sum(row.totals().values()) == launch.end - launch.begin for row in ledger.rows)


@pytest.mark.parametrize("jump_ms", [3_600_000, -800])
def test_a_clock_that_jumps_moves_no_time_of_a_step(jump_ms: int):
    """The agent's clock, which times the lives of processes, jumps while ranks train: theirs does not."""
    recordings, end = [recording(0), recording(1)], 1700 + jump_ms
    launch = launch_of(recordings, end, [life(rank, 0, end) for rank in (0, 1)])
    ledger = ledger_of(launch)
    assert all(sum(row.totals().values()) == end * MS for row in ledger.rows)
    usual = ledger_of(launch_of(recordings, 1700))
    whole = ledger.steps.end < EPOCH + min(end, 1700) * MS
    assert whole.sum() >= 20
    assert set(ledger.steps.lasted[whole].tolist()) <= set(usual.steps.lasted.tolist())
