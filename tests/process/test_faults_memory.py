"""A rank that the kernel kills for its memory is named so."""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from console import Console, until
from daemons import ranks

PARENTS = [Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")]
LIMITS = ["memory.limit_in_bytes", "memory.max"]


@pytest.fixture
def small_memory() -> Iterator[Path]:
    """A cgroup with 400 MB, of version 1 or 2."""
    for parent, limit in zip(PARENTS, LIMITS, strict=True):
        group = parent / f"argosy-test-{os.getpid()}"
        try:
            group.mkdir()
        except OSError:
            continue
        if (group / limit).exists():
            (group / limit).write_text(str(400 << 20))
            with suppress(OSError):  # So that nothing is saved by swapping.
                (group / "memory.swap.max").write_text("0")
            yield group
            until(lambda group=group: removed(group), "an empty cgroup", 10.0)
            return
        group.rmdir()
    pytest.skip("no cgroup with a limit of memory can be made here")


def removed(group: Path) -> bool:
    with suppress(OSError):
        group.rmdir()
    return not group.exists()


@pytest.mark.system
def test_a_rank_killed_for_its_memory_is_named_so(small_memory: Path, console: Console):
    (console.cwd / "eats.py").write_text(
        "import os, time\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
        "if os.environ['RANK'] == '1': hoard = bytearray(os.urandom(1 << 20) * 1000)\n"
        "time.sleep(600)\n"
    )
    inside = f'echo $$ > {small_memory}/cgroup.procs; exec "$@"'
    words = ["run", "-d", "-n", "2", "--name", "hungry", "--", "python3", "eats.py"]
    assert console.run(["sh", "-c", inside, "sh", console.python, "-m", "argosy", *words]).code == 0
    ranks(console, "hungry")
    (console.cwd / "go").touch()
    until(lambda: console.ps("hungry").get("state") == "ended", "the end")
    assert console.ps("hungry")["code"] == 137
    why = console.argosy("why", "hungry").text
    assert "rank 1" in why
    assert "out of memory" in why
