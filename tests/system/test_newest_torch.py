"""What touches torch's insides holds on the newest release that PyPI has, not only on the pinned one."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from console import REPOSITORY

PLACE = REPOSITORY / ".cache" / "newest"
ROOMS = [
    "tests/observe",
    "tests/process/test_preload.py",
    "tests/process/test_torchrun_env.py",
    "tests/journeys/test_hang.py",
]


def python_of_newest() -> Path:
    """An environment with the newest torch; the first call downloads it, 2.9 GB."""
    python, stamp = PLACE / "bin" / "python", PLACE / "ready"
    if not stamp.exists():
        print(f"making {PLACE}: the newest torch, about 2.9 GB", file=sys.stderr, flush=True)
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(PLACE)], check=True)
        pip = [str(python), "-m", "pip", "install", "--no-input", "--progress-bar", "off"]
        tests = ["pytest", "pytest-xdist", "pytest-timeout", "torch>=2.13"]
        environment = {**os.environ, "ARGOSY_NATIVE": "0"}
        subprocess.run([*pip, *tests, "-e", str(REPOSITORY)], check=True, env=environment, stdout=sys.stderr)
        stamp.write_text("")
    return python


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_the_rooms_hold_on_the_newest_torch():
    python = python_of_newest()
    ended = subprocess.run([python, "-m", "pytest", "-q", "-m", "not system and not soak", *ROOMS], cwd=REPOSITORY)
    assert ended.returncode == 0
