"""Facts about which imports a zygote keeps, passes over or is spoiled by."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

import argosy
from argosy.control.launch import DYNAMO, TORCH
from argosy.supervise.rank.preload import PRELOAD_ENV

PROGRAM = """
import dataclasses, json, os, sys
from argosy.supervise.rank.preload import preload
sys.path.insert(0, sys.argv.pop(1))
heard, PLAIN = [], type(os.environ)
done = preload(sys.argv.pop(1).split(","), heard.append)
found = {**dataclasses.asdict(done), "heard": heard, "plain": type(os.environ) is PLAIN}
print(json.dumps(found), file=sys.__stdout__)
"""

SPOILERS = {
    "thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()",
        "thread",
    ),
    "rank": ("import os\nos.environ.get('LOCAL_RANK')", "rank reads LOCAL_RANK"),
    "rank_in": ("import os\n'SLURM_PROCID' in os.environ", "reads SLURM_PROCID"),
    "getenv": ("import os\nos.getenv('MASTER_ADDR', 'x')", "reads MASTER_ADDR"),
    "prints": ("print('welcome to prints')", "welcome to prints"),
    "c_prints": ("import ctypes\nctypes.CDLL(None).printf(b'from C')", "from C"),
    "writes": ("import os\nos.write(2, b'raw')", "raw"),
    "warns": ("import warnings\nwarnings.warn('old')", "old"),
    "deprecated": ("import warnings\nwarnings.warn('use new', DeprecationWarning, stacklevel=2)", "use new"),
    "logs": ("import logging\nlogging.warning('careful')", "careful"),
    "argv": ("import sys\nsys.argv[1:]", "reads sys.argv"),
    "handler": ("import signal\nsignal.signal(signal.SIGTERM, lambda *a: None)", "signals"),
    "fault": ("import faulthandler, os\nfaulthandler.register(10, open(os.devnull, 'w'))", "signals"),
    "child": ("import os, time\nif os.fork() == 0: os._exit(0)", "process"),
    "opens": ("import os\nf = open(os.devnull)", "/dev/null"),
    "chdir": ("import os\nos.chdir('/')", "working directory"),
    "stdout": ("import io, sys\nsys.stdout = io.StringIO()", "sys.stdout"),
    "seeds": ("import random\nrandom.seed(0)", "random numbers"),
    "raises_late": ("import os\nos.environ.get('RANK')\nraise ValueError", "reads RANK"),
}
HARMLESS = {
    "quiet": "import json",
    "setter": "import os\nos.environ['SETTER'] = '1'\nos.environ.pop('GONE', None)",
    "ended": "import threading\nt = threading.Thread(target=int); t.start(); t.join()",
    "copies": "import os\nos.environ.copy(); dict(os.environ)",
    "hushed": "import warnings\nwarnings.warn('deep', DeprecationWarning)",
    "at_exit": "import atexit\natexit.register(int)",
    "ran": "import subprocess\nsubprocess.run(['true'])",
}


def run(site: Path, *entries: str, **environ: str) -> dict[str, Any]:
    source = str(Path(argosy.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(site), ",".join(entries)],
        env={**os.environ, "PYTHONPATH": source, **PRELOAD_ENV, **environ},
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr.decode()
    return msgspec.json.decode(done.stdout)


@pytest.fixture(scope="module")
def all_spoilers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The reason given for each spoiler, from one process of its own each."""
    site = tmp_path_factory.mktemp("site")
    reasons: dict[str, str] = {}
    for name, (text, _) in SPOILERS.items():
        (site / f"{name}.py").write_text("import random\n" + text)
        done = run(site, "random", name, "json")
        assert done["heard"] == ["random", name, "json"]
        assert done["loaded"] == ["random", "json"]
        reasons |= dict(done["spoiled"])
    return reasons


@pytest.mark.parametrize("name", SPOILERS)
def test_a_module_that_breaks_a_rule_spoils_and_is_named(all_spoilers: dict[str, str], name: str) -> None:
    assert SPOILERS[name][1] in all_spoilers[name]


def test_harmless_imports_do_not_spoil(tmp_path: Path) -> None:
    for name, text in HARMLESS.items():
        (tmp_path / f"{name}.py").write_text(text)
    done = run(tmp_path, *HARMLESS, GONE="1", SLURM_JOB_ID="7")
    assert done["spoiled"] == []
    assert done["loaded"] == list(HARMLESS)
    assert done["environ"] == {"SETTER": "1", "GONE": None}
    assert done["plain"]


def test_an_import_that_raises_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "raises.py").write_text("raise SystemExit('no licence')")
    (tmp_path / "good.py").write_text("x = 1")
    done = run(tmp_path, "raises", "not_there", "good", "good:x", "good:y")
    assert done["loaded"] == ["good", "good:x"]
    assert done["spoiled"] == []
    assert done["failed"]["raises"] == "SystemExit: no licence"
    assert done["failed"]["not_there"].startswith("ModuleNotFoundError")
    assert done["failed"]["good:y"].startswith("ImportError")


def test_all_spoilers_are_found_in_one_pass(tmp_path: Path) -> None:
    for name in ("thread", "rank", "prints"):
        (tmp_path / f"{name}.py").write_text(SPOILERS[name][0])
    done = run(tmp_path, "thread", "json", "rank", "prints", "csv")
    assert [entry for entry, _ in done["spoiled"]] == ["thread", "rank", "prints"]


def test_a_package_that_pulls_in_torch_brings_its_companions(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    for part in ("__init__", "distributed", "_dynamo", "profiler"):
        (tmp_path / "torch" / f"{part}.py").write_text("")
    (tmp_path / "trainer.py").write_text("import torch, os\nos.environ.get('RANK')")
    done = run(tmp_path, "json", "trainer")
    assert done["loaded"] == ["json", *TORCH, DYNAMO]


@pytest.mark.system
def test_real_torch_and_numpy_can_be_preloaded(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = run(tmp_path, *TORCH, "numpy", "torch.utils.data:DataLoader")
    assert done["spoiled"] == []
    assert done["failed"] == {}
    assert done["loaded"] == [*TORCH, "numpy", "torch.utils.data:DataLoader"]


def test_variables_that_the_script_sets_count_at_import_and_not_after(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import os\nassert os.environ['HOME_OF'] == 'x'\nos.environ.get('LATE')")
    done = run(tmp_path, "$HOME_OF=x", "$DEFAULT?=y", "json", "reads", DEFAULT="z")
    assert done["loaded"] == ["json", "reads"]
    assert done["environ"] == {}
    done = run(tmp_path, "$HOME_OF=x", "$LATE", "json", "reads")
    assert done["spoiled"] == [["reads", "reads reads LATE"]]


def test_the_variables_that_imports_read_are_named(tmp_path: Path) -> None:
    (tmp_path / "reads.py").write_text("import os\nos.environ.get('ONE')\n'TWO' in os.environ\nos.environ.copy()")
    (tmp_path / "walks.py").write_text("import os\n[name for name in os.environ if name.startswith('MY_')]")
    assert {"ONE", "TWO"} <= {*run(tmp_path, "reads")["read"]}
    assert "*" not in run(tmp_path, "reads")["read"]
    assert "*" in run(tmp_path, "walks")["read"]
