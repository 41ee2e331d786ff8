"""A terminal whose daemons are up, with a script that waits."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, ask_agent, terminal
from daemons import desk


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Console]:
    """An empty directory, with daemons up; when it is left, nothing runs and nothing of a run is left."""
    with terminal(tmp_path) as console:
        assert ask_agent(console) or console.argosy("run", "--", "true").code == 0
        yield desk(console, tmp_path)
