"""`argosy logs` of a run that has written nothing."""

from pathlib import Path
from typing import Literal

import msgspec
import pytest
from click.testing import CliRunner

from argosy.cli.logs import command
from argosy.core import ConfigError
from argosy.supervise.records.rundir import RunRecord


def recorded(directory: Path, state: Literal["running", "ended"]) -> str:
    record = RunRecord(name="x", argv=[], cwd="/", size=1, host="h", launch=1, state=state, started_at=0.0)
    (directory / "run.json").write_bytes(msgspec.json.encode(record))
    return str(directory)


def test_a_run_that_has_just_begun_has_written_nothing_yet(tmp_path: Path):
    result = CliRunner().invoke(command, [recorded(tmp_path, "running")], standalone_mode=False)
    assert result.exception is None
    assert "nothing was written yet" in result.output


def test_of_an_ended_run_without_output_that_is_an_error(tmp_path: Path):
    with pytest.raises(ConfigError, match="has written nothing"):
        CliRunner().invoke(command, [recorded(tmp_path, "ended")], standalone_mode=False, catch_exceptions=False)
