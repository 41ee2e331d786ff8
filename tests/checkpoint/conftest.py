"""Fixtures of this room."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoint.keepers import Run, a_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run's directory, whose keepers end with the test."""
    with a_run(tmp_path / "run") as found:
        monkeypatch.setenv("ARGOSY_RUNTIME_DIR", str(found.home))
        yield found
