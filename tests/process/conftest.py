"""Daemons that the tests of a file share, and a desk of its own for each test."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console
from daemons import desk, idle, office


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with office(tmp_path_factory.mktemp("office")) as console:
        yield console


@pytest.fixture
def host(shared: Console, tmp_path: Path) -> Iterator[Console]:
    """An empty directory; when it is left, nothing runs and nothing of a run is left."""
    console = desk(shared, tmp_path)
    yield console
    idle(console)
