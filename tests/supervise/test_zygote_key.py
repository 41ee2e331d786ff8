"""Launches share a zygote if their environments agree on all variables that its imports read."""

from pathlib import Path

import pytest
from console import Console
from daemons import look

from argosy.supervise.imports.zygote_key import ALL, key_for, recall_reads, remember_reads

SCRIPT = """
import os, numpy
print(*(f"{name}={os.environ.get(name)}" for name in ("WANDB_NAME", "NUMPY_MADVISE_HUGEPAGE")))
"""


@pytest.mark.system
def test_launches_that_differ_in_what_no_import_reads_share_the_zygote(host: Console):
    (host.cwd / "s.py").write_text(SCRIPT)

    def run(**env: str) -> tuple[str, set[int]]:
        ended = host.argosy("run", "s.py", env=env)
        assert ended.code == 0, ended.text
        return ended.out.decode(), {daemon.pid for daemon in look(host).daemons if daemon.what == "zygote"}

    said, first = run(WANDB_NAME="first")
    assert "WANDB_NAME=first NUMPY_MADVISE_HUGEPAGE=None" in said
    said, after = run(WANDB_NAME="second")
    assert "WANDB_NAME=second NUMPY_MADVISE_HUGEPAGE=None" in said
    assert after <= first
    said, after = run()
    assert "WANDB_NAME=None" in said
    assert after <= first
    said, after = run(NUMPY_MADVISE_HUGEPAGE="0", WANDB_NAME="second")
    assert "WANDB_NAME=second NUMPY_MADVISE_HUGEPAGE=0" in said
    assert len(after - first) == 1


def test_a_variable_counts_if_an_import_read_it_or_a_native_library_may():
    env = {"HOME": "/home/u", "WANDB_NAME": "a", "OMP_NUM_THREADS": "1"}
    key = key_for("imports", env, {"HOME", "ABSENT"})
    assert key_for("imports", {**env, "WANDB_NAME": "b"}, {"HOME", "ABSENT"}) == key
    for changed in ({"HOME": "/"}, {"ABSENT": ""}, {"OMP_NUM_THREADS": "2"}, {"LD_PRELOAD": "x"}):
        assert key_for("imports", {**env, **changed}, {"HOME", "ABSENT"}) != key
    assert key_for("others", env, {"HOME", "ABSENT"}) != key
    assert key_for("imports", {**env, "WANDB_NAME": "b"}, {ALL}) != key_for("imports", env, {ALL})


def test_what_imports_read_is_remembered_and_grows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert recall_reads("imports") == {ALL}
    remember_reads("imports", ["HOME"])
    remember_reads("imports", ["USER"])
    assert recall_reads("imports") == {"HOME", "USER"}
    remember_reads("nothing", [])
    assert recall_reads("nothing") == set()
