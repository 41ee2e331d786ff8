"""How Argosy is installed: with the extension, without it, and not at all when its Rust does not compile."""

import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

import argosy

ROOT = Path(__file__).resolve().parents[2]
NO_TOOLS = "/nonexistent"

pytestmark = [pytest.mark.system, pytest.mark.timeout(600)]
needs_cargo = pytest.mark.skipif(shutil.which("cargo") is None, reason="cargo is not on PATH (https://rustup.rs)")


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A copy of what a source distribution would hold."""
    tree = tmp_path / "source"
    ignored = shutil.ignore_patterns("target", "*.so", "*.egg-info", "__pycache__")
    for name in ("src", "native"):
        shutil.copytree(ROOT / name, tree / name, ignore=ignored)
    for path in (*ROOT.glob("*.md"), ROOT / "LICENSE", ROOT / "pyproject.toml", ROOT / "setup.py"):
        shutil.copy(path, tree)
    return tree


def build_wheel(source: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Build offline, with the build tools of this environment; the crates compiled before are used again."""
    options = ["--no-build-isolation", "--no-deps", "--no-index", "--wheel-dir", str(source / "wheels")]
    environment = {**os.environ, "CARGO_TARGET_DIR": str(ROOT / "native" / "target"), **variables}
    if "ARGOSY_NATIVE" not in variables:
        environment.pop("ARGOSY_NATIVE", None)
    command = [sys.executable, "-m", "pip", "wheel", *options, str(source)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def wheel_of(source: Path) -> Path:
    (wheel,) = (source / "wheels").glob("*.whl")
    return wheel


def files_in(wheel: Path) -> set[str]:
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


@needs_cargo
def test_one_wheel_serves_every_python(source: Path):
    built = build_wheel(source)
    assert built.returncode == 0, built.stdout + built.stderr
    wheel = wheel_of(source)
    assert "-cp311-abi3-linux_" in wheel.name
    assert {"argosy/_native.abi3.so", "argosy/_native.pyi", "argosy/py.typed"} <= files_in(wheel)


@needs_cargo
def test_a_compile_error_fails_the_install(source: Path):
    with (source / "native" / "src" / "lib.rs").open("a") as file:
        file.write("fn broken( {\n")
    built = build_wheel(source)
    assert built.returncode != 0
    assert "error: " in built.stdout + built.stderr
    assert not (source / "wheels").exists() or not list((source / "wheels").iterdir())


def test_without_cargo_the_wheel_is_pure_python(source: Path):
    built = build_wheel(source, PATH=NO_TOOLS)
    assert built.returncode == 0, built.stdout + built.stderr
    assert wheel_of(source).name.endswith("-py3-none-any.whl")
    assert "argosy/_reference.py" in files_in(wheel_of(source))


def test_argosy_native_1_demands_cargo(source: Path):
    assert build_wheel(source, PATH=NO_TOOLS, ARGOSY_NATIVE="1").returncode != 0


def test_argosy_native_0_leaves_the_extension_out(source: Path):
    built = build_wheel(source, ARGOSY_NATIVE="0")
    assert built.returncode == 0, built.stdout + built.stderr
    assert not [name for name in files_in(wheel_of(source)) if name.endswith(".so")]


@needs_cargo
def test_the_wheel_of_a_release_runs_where_there_is_no_cargo(tmp_path: Path):
    built = subprocess.run(["tools/wheel.sh"], cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    wheel = Path(built.stdout.split()[-1])
    assert "-cp311-abi3-manylinux_" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = [archive.read(name).decode() for name in names if name.endswith("/METADATA")]
    assert {"argosy/_native.abi3.so", "argosy/py.typed"} <= set(names)
    assert f"Version: {argosy.__version__}" in metadata
    assert "Provides-Extra: torch" in metadata
    place = tmp_path / "clean"
    subprocess.run([sys.executable, "-m", "venv", str(place)], check=True)
    environment = {"PATH": f"{place}/bin:/usr/bin:/bin", "HOME": str(tmp_path), "ARGOSY_LINGER_S": "0"}
    environment |= {name: os.environ[name] for name in ("ARGOSY_SANDBOX", "ARGOSY_SHM_DIR") if name in os.environ}
    environment["ARGOSY_RUNTIME_DIR"] = tempfile.mkdtemp()  # The path of a socket is short.
    kept = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("PIP_", "SSL_")) or "proxy" in name.lower()
    }
    install = [f"{place}/bin/python", "-m", "pip", "install", "--quiet", "--no-input", str(wheel)]
    subprocess.run(install, env=environment | kept, check=True)
    (tmp_path / "hello.py").write_text("import os\nprint('hello from', os.environ['RANK'])\n")
    ended = subprocess.run(
        [f"{place}/bin/argosy", "run", "-n", "2", "hello.py"],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "hello from 0" in ended.stdout
    native = [f"{place}/bin/python", "-c", "from argosy import _native; print(_native.__file__)"]
    assert str(place) in subprocess.run(native, env=environment, capture_output=True, text=True, check=True).stdout
