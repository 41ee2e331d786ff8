"""Fixtures for all rooms."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, terminal


@pytest.fixture
def console(tmp_path: Path) -> Iterator[Console]:
    """A terminal in an empty directory, with daemons of its own."""
    with terminal(tmp_path) as opened:
        yield opened
