"""A run's directory alone is enough: tables, SQL, report and comparison; damaged files open, with the damage named."""

import re
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from recordings import Recording, write_run

from argosy.core import ConfigError
from argosy.insight import OpenedRun, compare_runs
from argosy.insight.compare import step_time
from argosy.insight.report import report_page
from argosy.observe import Journal, metrics_directory


def steps(rank: int, slow: float = 0.0, count: int = 40) -> Recording:
    one = Recording(rank)
    for step in range(count):
        at = 100 + step * (50.0 + slow)
        one.span("data", at, at + 1 + slow).span("forward", at + 1 + slow, at + 30 + slow)
        one.reduce(at + 30 + slow, at + 40 + slow)
        one.span("optimizer", at + 40 + slow, at + 49 + slow).step(at + 49 + slow)
    return one


@pytest.fixture
def run(tmp_path: Path) -> OpenedRun:
    return OpenedRun(write_run(tmp_path / "run", [steps(0), steps(1)], 2500))


def test_tables_ledger_and_sql_agree(run: OpenedRun):
    rows = run.sql("SELECT rank, class, seconds FROM ledger ORDER BY ALL").rows
    assert {(rank, kind): pytest.approx(seconds) for rank, kind, seconds in rows} == {
        (rank, kind): seconds for rank, kinds in run.ledger().items() for kind, seconds in kinds.items()
    }
    assert run.sql("SELECT sum(seconds) FROM ledger").rows == [(pytest.approx(5.0),)]
    assert run.sql("SELECT count(*), min(step), max(step) FROM steps").rows == [(80, 1, 40)]
    assert run.sql("SELECT op, bytes, count(*) FROM collectives GROUP BY ALL").rows == [("all_reduce", 1000, 80)]
    assert run.verdicts() == []
    assert run.damage == []


@pytest.mark.parametrize(
    "text",
    [
        "CREATE TABLE x AS SELECT 1",
        "SELECT 1; SELECT 2",
        "COPY steps TO 'out.csv'",
        "SELECT * FROM read_csv('/etc/passwd')",
        "SELECT * FROM '/etc/passwd'",
        "SET enable_external_access = true",
        "ATTACH 'file.db'",
        "SELECT * FROM nothing",
        "not SQL",
    ],
)
def test_sql_that_writes_reads_files_or_is_wrong_is_refused(run: OpenedRun, text: str):
    with pytest.raises(ConfigError):
        run.sql(text)


def test_the_page_is_one_file_with_the_numbers_of_sql(run: OpenedRun, tmp_path: Path):
    page = run.plot(tmp_path / "page.html").read_text()
    assert "<script" not in page
    assert re.findall(r'(?:src|href)="(?!data:)|url[(]', page) == []
    for _, _, seconds in run.sql("SELECT rank, class, seconds FROM ledger").rows:
        assert f"<td>{seconds:.3f}</td>" in page


def test_a_page_of_a_thousand_ranks_stays_small(tmp_path: Path):
    many = OpenedRun(write_run(tmp_path / "run", [steps(rank, count=12) for rank in range(1000)], 800))
    page = report_page(many)
    assert len(page) < 1_000_000
    assert "64 of 1000 ranks" in page


def test_texts_of_a_run_are_no_markup(tmp_path: Path):
    odd = OpenedRun(write_run(tmp_path / "run", [steps(0)], 2500, name="<b>&"))
    assert "<b>&" not in report_page(odd).replace("<b>", "", 0)
    assert "&lt;b&gt;&amp;" in report_page(odd)


def test_damaged_and_missing_files_open(run: OpenedRun):
    directory = run.directory
    spans = metrics_directory(directory, 1) / "spans"
    raw = bytearray(spans.read_bytes())
    raw[40] ^= 0xFF
    spans.write_bytes(raw)
    hurt = OpenedRun(directory)
    assert len(hurt.damage) == 1
    assert "damaged bytes" in hurt.damage[0]
    assert set(hurt.ledger()) == {0, 1}
    assert "not complete" in report_page(hurt)
    spans.write_bytes(raw[: len(raw) // 2])
    assert sum(map(len, OpenedRun(directory).ledger().values()))
    shutil.rmtree(directory / "metrics")
    empty = OpenedRun(directory)
    assert not empty.has_steps
    assert "No training step" in report_page(empty)


def test_scalars_after_a_rollback_are_the_newer_ones(run: OpenedRun):
    with Journal(run.directory / "metrics" / "log") as log:
        for entry in (
            {"type": "row", "step": 1, "at": 1.0, "values": {"loss": 3.0}},
            {"type": "row", "step": 2, "at": 2.0, "values": {"loss": 9.0}},
            {"type": "back", "step": 1, "at": 3.0, "reason": ""},
            {"type": "row", "step": 2, "at": 4.0, "values": {"loss": 2.0}},
        ):
            log.append(msgspec.msgpack.encode(entry))
    numbers, values = OpenedRun(run.directory).scalars("loss")
    assert (numbers.tolist(), values.tolist()) == ([1, 2], [3.0, 2.0])


def test_compare_shows_what_a_verdict_promised_and_what_came(run: OpenedRun, tmp_path: Path):
    slow = OpenedRun(write_run(tmp_path / "slow", [steps(0, 30), steps(1, 30)], 4000, name="slow"))
    assert [verdict.kind for verdict in slow.verdicts()] == ["input_bound"]
    found = compare_runs(slow, run)
    assert found.time is not None
    assert found.time.slower == pytest.approx(50 / 80 - 1)
    (gone,) = found.gone
    assert gone.real == pytest.approx(gone.predicted, abs=0.02)
    assert found.ledger["data"] == (pytest.approx(0.031), pytest.approx(0.001))
    assert compare_runs(run, slow).new == ["input_bound"]


def test_c1_noise_is_called_noise():
    chance = np.random.default_rng(3)
    calls = [step_time(chance.normal(1, 0.1, 300), chance.normal(1, 0.1, 300)).is_noise for _ in range(40)]
    assert sum(calls) >= 34
    assert not step_time(chance.normal(1, 0.1, 300), chance.normal(1.06, 0.1, 300)).is_noise
