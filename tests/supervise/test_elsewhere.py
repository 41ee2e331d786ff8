"""A run under another runtime directory is asked for there, and only directories that Argosy made are removed."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from console import Console, cold_terminal, said
from daemons import WAITS, ranks

from argosy.core import ConfigError
from argosy.supervise.records.rundir import find_run, index_run


@pytest.fixture
def desks(cold_console: Console, tmp_path: Path) -> Iterator[tuple[Console, Console]]:
    """Two terminals of one user, each with a runtime directory of its own."""
    (tmp_path / "waits.py").write_text(WAITS)
    with cold_terminal(tmp_path) as other:
        other.env["XDG_STATE_HOME"] = cold_console.env["XDG_STATE_HOME"]
        yield cold_console, other


@pytest.mark.system
def test_a_run_under_another_runtime_directory_is_alive(desks: tuple[Console, Console], tmp_path: Path):
    here, there = desks
    assert here.argosy("run", "--name", "mine", "--", "true").code == 0
    assert there.argosy("run", "-d", "--name", "theirs", "waits.py", "5").code == 0
    pid = ranks(there, "theirs", count=1)[0].pid
    seen = here.ps("theirs")
    assert seen["state"] == f"running under {there.runtime}"
    assert [rank["pid"] for rank in seen["ranks"]] == [pid]
    assert "theirs" in here.argosy("ps").text
    assert "theirs: running: 1 rank" in here.argosy("why", "theirs").text
    assert here.argosy("why").text.startswith("mine: ")
    refused = here.argosy("stop", "theirs")
    assert refused.code != 0
    assert f"ARGOSY_RUNTIME_DIR={there.runtime}" in refused.text
    assert "another launch works on this directory" in here.argosy("run", "--name", "theirs", "waits.py").text
    assert here.argosy("clean", "--all", "--yes").code == 0
    assert (tmp_path / "runs/theirs/run.json").exists()
    assert ranks(there, "theirs", count=1)[0].pid == pid


@pytest.mark.system
def test_a_run_whose_other_runtime_directory_is_dead_is_lost(desks: tuple[Console, Console], tmp_path: Path):
    here, there = desks
    there.runtime.mkdir()
    assert there.argosy("run", "-d", "--name", "theirs", "waits.py").code == 0
    said(tmp_path / "runs/theirs/logs/1/0.0.out", "ready")
    there.cut_power()
    assert here.ps("theirs")["state"] == "lost"
    assert here.argosy("why").text.startswith("theirs: lost")
    (tmp_path / "go").touch()
    assert here.argosy("run", "--name", "theirs", "waits.py").code == 0


@pytest.mark.system
def test_only_directories_that_argosy_made_are_removed(cold_console: Console):
    console = cold_console
    users, deep = console.runtime, console.runtime.parent / "a/b"
    users.mkdir(mode=0o755)
    for runtime in (users, deep):
        env = {"ARGOSY_RUNTIME_DIR": str(runtime)}
        assert console.argosy("run", "--", "true", env=env).code == 0
        assert console.argosy("stop", "--all", env=env).code == 0
    assert list(users.iterdir()) == []
    assert not deep.parent.exists()


def test_a_name_that_several_runs_begin_with_gets_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    for name in ("gpt-20261115-213045", "gpt-20261115-214501"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "run.json").write_text("{}")
        index_run(tmp_path / name, name)
    with pytest.raises(ConfigError, match="2 runs begin with 'gpt'") as refused:
        find_run("gpt")
    assert "`last` is the newest run" in refused.value.hint
