"""The rooms that touch torch's insides, with the newest torch that is published, where it is not the installed one."""

import os
import re
import shutil
import site
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PLACE = ROOT / ".cache" / "newest-torch"
ROOMS = ["observe", "collective", "transfer", "examples", "process/test_preload.py", "process/test_torchrun_env.py"]


def published() -> str:
    """The newest version that pip could install; empty where it cannot ask."""
    asked = [sys.executable, "-m", "pip", "index", "versions", "torch"]
    found = re.match(r"torch \((\S+)\)", subprocess.run(asked, capture_output=True, text=True).stdout)
    return found[1] if found else ""


def interpreter(wanted: str) -> str:
    """One with that torch, and all else as here; made where there is none."""
    python = PLACE / "bin" / "python"
    check = f"import torch; assert torch.__version__.partition('+')[0] == {wanted!r}"
    if not python.exists() or subprocess.run([python, "-c", check]).returncode != 0:
        shutil.rmtree(PLACE, ignore_errors=True)
        subprocess.run([sys.executable, "-m", "venv", str(PLACE)], check=True)
        here = next(path for path in site.getsitepackages() if Path(path).is_dir())
        there = next(PLACE.glob("lib/python*/site-packages"))
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-input", f"torch=={wanted}"], check=True)
        # Only now, else pip would find the torch of here and leave it at that; read last, so that the newest wins.
        (there / "zz-rest.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    return str(python)


@pytest.mark.system
@pytest.mark.timeout(2400)
def test_rooms_that_touch_torchs_insides_pass_on_the_newest(tmp_path: Path) -> None:
    if (there := published()) in ("", version("torch").partition("+")[0]):
        pytest.skip(f"the newest published torch is the installed one: {there}" if there else "pip found no index")
    python = interpreter(there)
    asked = [python, "-c", "import argosy, torch; print(torch.__version__)"]
    found = subprocess.run(asked, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    print("torch", found)
    words = ["-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider", "-m", "not system and not soak"]
    tests = [str(ROOT / "tests" / room) for room in ROOMS]
    env = {**os.environ, "PYTEST_ADDOPTS": f"--basetemp={tmp_path / 'newest'}"}
    done = subprocess.run([python, *words, *tests], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"torch {found}\n{done.stdout[-6000:]}\n{done.stderr[-2000:]}"
