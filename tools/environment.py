"""Make `.venv` in this clone, ready to run the demo and the tests; do nothing if it already is.

    python3 tools/environment.py [PYTHON]

PYTHON names an interpreter whose environment has torch: `.venv` then borrows its packages and adds what is
missing, and nothing is installed into it. Without it torch is downloaded. Standard library only.
"""

from __future__ import annotations  # An older Python must get as far as saying so.

import hashlib
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "argosy-stamp.json"
TEMPORARY = ROOT / ".cache" / "tmp"
SOURCES = ["pyproject.toml", "setup.py", "tools/environment.py", "native/Cargo.toml", "native/Cargo.lock"]
OLDEST = (3, 11)
HEARTBEAT_S = 8.0
FREE_GB_MIN = 9.0
TOOLS = ["ruff", "py-spy"]
"""Programs, not Python scripts: in a borrowed environment they are linked into `.venv/bin`."""

# Run by an interpreter to describe itself.
DESCRIBE = """
import importlib.metadata as metadata, importlib.util as util, json, site, sys, sysconfig
try:
    torch = metadata.version("torch")
except metadata.PackageNotFoundError:
    torch = ""
paths = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
has = {name: util.find_spec(name) is not None for name in ("pip", "ensurepip", "venv")}
print(json.dumps({"version": sys.version_info[:3], "torch": torch, "paths": paths,
                  "scripts": sysconfig.get_path("scripts"), **has}))
"""


def say(text: str) -> None:
    print(f"environment: {text}", flush=True)


def stop(text: str) -> NoReturn:
    raise SystemExit(f"environment: {text}")


def describe(python: str) -> dict[str, Any] | None:
    """What `python` is and has, or None if it cannot be run."""
    try:
        run = subprocess.run([python, "-c", DESCRIBE], capture_output=True, text=True)
    except OSError:
        return None
    return json.loads(run.stdout) if run.returncode == 0 else None


def builds_native() -> bool:
    wanted = os.environ.get("ARGOSY_NATIVE", "")
    return wanted == "1" or (wanted == "" and sys.platform == "linux" and shutil.which("cargo") is not None)


def fingerprint() -> str:
    """Changes when anything does that the environment was made from."""
    digest = hashlib.sha256(f"{ROOT} {builds_native()}".encode())
    for path in [ROOT / name for name in SOURCES] + sorted((ROOT / "native" / "src").rglob("*.rs")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def read_stamp() -> dict[str, Any]:
    try:
        return json.loads(STAMP.read_text()) if PYTHON.exists() else {}
    except (OSError, ValueError):
        return {}


def choose_base(asked: str) -> tuple[str, dict[str, Any]]:
    """The interpreter that `.venv` is made from."""
    names = [asked] if asked else ["python3", "python3.13", "python3.12", "python3.11", "/usr/bin/python3"]
    seen: list[str] = []
    for name in names:
        path = shutil.which(name)
        facts = describe(path) if path else None
        if not path or facts is None:
            seen.append(f"{name}: not found or does not run")
        elif tuple(facts["version"]) < OLDEST:
            seen.append(f"{name}: is Python {'.'.join(map(str, facts['version']))}, 3.11 or later is needed")
        elif not facts["venv"] or not (facts["ensurepip"] or facts["pip"]):
            seen.append(f"{name}: cannot make environments (on Debian: apt-get install python3-venv)")
        elif asked and not facts["torch"]:
            seen.append(f"{name}: has no torch; leave PYTHON out and it is downloaded")
        else:
            return os.path.abspath(path), facts
    stop("no usable Python\n  " + "\n  ".join(seen))


def run_loudly(command: list[str], what: str) -> None:
    """Run a command with its output shown, and a line whenever it was silent for a while."""
    free = shutil.disk_usage(ROOT).free
    started = time.monotonic()
    TEMPORARY.mkdir(parents=True, exist_ok=True)
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "TMPDIR": str(TEMPORARY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        assert process.stdout
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    while True:
        try:
            line = lines.get(timeout=HEARTBEAT_S)
        except queue.Empty:
            written = max(0, free - shutil.disk_usage(ROOT).free) / 1e9
            say(f"{what}: {time.monotonic() - started:.0f} s, {written:.1f} GB written so far")
            continue
        if line is None:
            break
        if not line.startswith("Requirement already satisfied"):
            print(line, end="", flush=True)
    if process.wait() != 0:
        stop(f"{what} failed; the lines above say why. Again: make demo, or make test")


def make_venv(base: str, facts: dict[str, Any], borrow: bool) -> None:
    """Create an empty `.venv`, which sees the packages of `base` if they are borrowed."""
    shutil.rmtree(VENV, ignore_errors=True)
    # A borrowed pip works in `.venv` too, and ensurepip would put an old setuptools before the borrowed one.
    without_pip = borrow and facts["pip"]
    command = [base, "-m", "venv", *(["--without-pip"] if without_pip else []), str(VENV)]
    run_loudly(command, "making .venv")
    if not borrow:
        return
    made = describe(str(PYTHON))
    assert made
    # Named to be read last: what is installed in .venv comes first.
    lines = [f"import site; site.addsitedir({path!r})" for path in facts["paths"] if os.path.isdir(path)]
    (Path(made["paths"][0]) / "zz-borrowed.pth").write_text("\n".join(lines) + "\n")


def install(borrow: bool) -> None:
    """Install Argosy in place, and what its development needs."""
    import tomllib

    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = project["optional-dependencies"]["dev"]
    if borrow:
        needed = [name for name in needed if not name.startswith("torch")]
    build = [name for name in needed if name.startswith("setuptools")]
    pip = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
    run_loudly([*pip, *build], "installing the build tools")
    for old in (ROOT / "src" / "argosy").glob("_native*.so"):
        old.unlink()  # An extension that is not built now must not be found later.
    # Build isolation would download the build tools again, each time.
    native = ", compiling its Rust extension (a minute or two)" if builds_native() else ""
    run_loudly([*pip, "--no-build-isolation", "-e", str(ROOT), *needed], f"installing Argosy and its tools{native}")


def link_tools(scripts: str) -> None:
    for name in TOOLS:
        theirs, ours = Path(scripts) / name, VENV / "bin" / name
        if theirs.exists() and not ours.exists():
            ours.symlink_to(theirs)


def announce(base: str, facts: dict[str, Any], borrow: bool) -> None:
    """Say what will be downloaded, before it is."""
    if borrow:
        say(f"torch {facts['torch']} is borrowed from {base}, which stays as it is")
        say("downloading at most 0.2 GB: what is missing there goes into .venv")
    else:
        on_linux = sys.platform == "linux" and os.uname().machine == "x86_64"
        size = "about 3.0 GB (2.7 of it torch), 5.5 GB unpacked" if on_linux else "up to 3 GB, most of it torch"
        say(f"downloading {size}, into .venv and pip's cache")
        say("with an environment that has torch: make demo PYTHON=/path/to/its/bin/python")
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < FREE_GB_MIN:
            stop(f"not enough space: {free:.1f} GB are free in {ROOT}, {FREE_GB_MIN:.0f} GB are needed")
    if builds_native():
        say("cargo is found: building the Rust extension, 0.01 GB of crates (ARGOSY_NATIVE=0 leaves it out)")
    else:
        say("the Rust extension is left out (no cargo, or ARGOSY_NATIVE=0): its Python reference serves")


def main() -> None:
    asked = sys.argv[1] if len(sys.argv) > 1 else ""
    stamp = read_stamp()
    # Without PYTHON= an environment once made with it stays in use.
    asked = asked or (stamp.get("base", "") if stamp.get("borrow") else "")
    print_now = fingerprint()
    same_base = stamp and (not asked or os.path.abspath(shutil.which(asked) or asked) == stamp["base"])
    if same_base and stamp["fingerprint"] == print_now and describe(str(PYTHON)):
        return
    base, facts = choose_base(asked)
    if sys.version_info < OLDEST:
        os.execv(base, [base, __file__, *sys.argv[1:]])
    borrow = bool(asked)
    say(f"making .venv from {base} (Python {'.'.join(map(str, facts['version']))})")
    announce(base, facts, borrow)
    started = time.monotonic()
    if not (same_base and describe(str(PYTHON))):
        make_venv(base, facts, borrow)
    STAMP.unlink(missing_ok=True)
    install(borrow)
    if borrow:
        link_tools(facts["scripts"])
    STAMP.write_text(json.dumps({"fingerprint": print_now, "base": base, "borrow": borrow}))
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
