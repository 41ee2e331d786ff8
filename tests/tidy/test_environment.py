"""`make demo` and `make test` set up `.venv` with what the machine has: its Python, its pip settings, its indexes."""

import importlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PIP = [sys.executable, "-m", "pip"]


@pytest.fixture(autouse=True)
def own_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file of pip's settings that takes the place of the machine's."""
    for name in ("PIP_FIND_LINKS", "PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CERT", "PIP_DEFAULT_TIMEOUT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", str(tmp_path / "pip.conf"))
    monkeypatch.syspath_prepend(ROOT / "tools")
    return tmp_path / "pip.conf"


def test_uv_gets_the_settings_of_pip(own_settings: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own_settings.write_text(
        "[global]\nindex-url = https://me:it's@host/simple\nfind-links =\n    /a\n    https://b/c\ncert = /global.pem\n"
        "[install]\nextra-index-url = https://d/e https://f/g\npre = true\n[list]\nno-index = true\n"
    )
    monkeypatch.setenv("PIP_CERT", "/mine.pem")
    monkeypatch.setenv("PIP_RETRIES", "3")
    pip_settings = importlib.import_module("pip_settings")
    options, variables, unknown = pip_settings.for_uv(pip_settings.read_settings(PIP))
    assert options == ["--prerelease=allow"], "a password is on no command line"
    assert variables["UV_DEFAULT_INDEX"] == "https://me:it's@host/simple"
    assert variables["UV_INDEX"] == "https://d/e https://f/g"
    assert variables["UV_FIND_LINKS"] == "/a,https://b/c"
    assert variables["SSL_CERT_FILE"] == "/mine.pem", "the environment wins"
    assert unknown == []
    monkeypatch.setenv("PIP_REQUIRE_HASHES", "1")
    assert pip_settings.for_uv(pip_settings.read_settings(PIP))[2] == ["require-hashes"]


def test_torch_without_cuda_is_preferred_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = importlib.import_module("environment")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert environment.choose_torch(PIP) == environment.TORCH
    version = environment.TORCH.partition("==")[2]
    with zipfile.ZipFile(tmp_path / f"torch-{version}+cpu-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"torch-{version}+cpu.dist-info/METADATA", "")
    assert environment.choose_torch(PIP) == f"{environment.TORCH}+cpu"


@pytest.mark.parametrize("old", ["echo Python 3.6.8; [ $1 = --version ]", None])
def test_without_a_usable_python_it_says_what_is_needed(old: str | None, tmp_path: Path) -> None:
    (tmp_path / "make").symlink_to(shutil.which("make") or "")
    if old:
        (tmp_path / "python3").write_text(f"#!/bin/bash\n{old}\n")
        (tmp_path / "python3").chmod(0o755)
    run = subprocess.run(["make", "-C", ROOT, "demo"], env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert run.returncode != 0
    assert f"Python 3.11 or later with venv is needed; python3 is {'Python 3.6.8' if old else 'missing'}" in run.stdout
