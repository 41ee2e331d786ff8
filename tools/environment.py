"""Set up `.venv` in this clone; do nothing if it is up to date.

    python3 tools/environment.py demo|dev [PYTHON]

`demo` installs Argosy and torch, `dev` adds the test tools. PYTHON names an interpreter whose environment has torch:
`.venv` then borrows its packages, and nothing is installed into it. Needs Python 3.11 and only its standard library.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any, NoReturn

from pip_settings import for_uv, read_settings

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
PYTHON = VENV / "bin" / "python"
STAMP = VENV / "argosy-stamp.json"
CACHE = ROOT / ".cache"
LOG = CACHE / "environment.log"
SOURCES = ["pyproject.toml", "setup.py", "tools/environment.py", "native/Cargo.toml", "native/Cargo.lock"]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())
TORCH: str = PROJECT["project"]["optional-dependencies"]["demo"][0]
PIP = [str(PYTHON), "-m", "pip", "--disable-pip-version-check", "--no-input"]
TERMINAL_S, PIPE_S = 0.5, 8.0
"""How often progress is shown."""
GB = {TORCH: (3.0, 5.4), f"{TORCH}+cpu": (0.3, 1.2), "": (0.1, 0.2), "dev": (0.2, 0.8)}
"""What is downloaded and what it takes on disk, on Linux."""
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
        return {"kind": "dev", **json.loads(STAMP.read_text())} if describe(str(PYTHON)) else {}
    except (OSError, ValueError):
        return {}


def check_base(base: str, borrow: bool) -> dict[str, Any]:
    """Describe the interpreter that `.venv` is made from, or stop if it does not serve."""
    facts = describe(base)
    if facts is None:
        stop(f"PYTHON does not run: {base}")
    if tuple(facts["version"]) < (3, 11):
        stop(f"Python 3.11 or later is needed: {base} is {'.'.join(map(str, facts['version']))}")
    if not facts["venv"] or not (facts["ensurepip"] or facts["pip"]):
        stop(f"{base} cannot make environments\nhint: on Debian, apt-get install python3-venv")
    if borrow and not facts["torch"]:
        stop(f"PYTHON has no torch: {base}\nhint: without PYTHON= torch is downloaded")
    return facts


def run(command: list[str], what: str, variables: dict[str, str] | None = None) -> bool:
    """Run a command with its output in the log and one line of progress. False if it fails."""
    live = sys.stdout.isatty()
    free, started, shown = shutil.disk_usage(ROOT).free, time.monotonic(), time.monotonic()
    written = 0.0  # The most that was seen: others write to this disk, and delete, too.
    environment = {**os.environ, "TMPDIR": str(CACHE / "tmp"), **(variables or {})}
    with LOG.open("a") as log:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while True:
            try:
                code = process.wait(TERMINAL_S)
                break
            except subprocess.TimeoutExpired:
                pass
            except KeyboardInterrupt:
                process.wait()  # The terminal sent it the same Ctrl-C.
                raise
            now = time.monotonic()
            written = max(written, (free - shutil.disk_usage(ROOT).free) / 1e9)
            line = f"environment: {what}: {now - started:.0f} s, {written:.1f} GB written"
            if live:
                print(f"\r{line}\x1b[K", end="", flush=True)
            elif now - shown >= PIPE_S:
                shown = now
                print(line, flush=True)
    if live:
        print("\r\x1b[K", end="", flush=True)
    return code == 0


def must_run(command: list[str], what: str) -> None:
    if not run(command, what):
        tail = "\n  ".join(LOG.read_text(errors="replace").splitlines()[-15:])
        hint = "\nhint: if the Rust extension is the cause, ARGOSY_NATIVE=0 skips it" if builds_native() else ""
        stop(f"{what} failed; the end of {LOG.relative_to(ROOT)}:\n  {tail}{hint}")


def make_venv(base: str, facts: dict[str, Any], borrow: bool) -> None:
    """Create an empty `.venv`, which sees the packages of `base` if they are borrowed."""
    shutil.rmtree(VENV, ignore_errors=True)
    # A borrowed pip works in `.venv` too, and ensurepip would put an old setuptools before the borrowed one.
    without_pip = borrow and facts["pip"]
    must_run([base, "-m", "venv", *(["--without-pip"] if without_pip else []), str(VENV)], "making .venv")
    if not borrow:
        return
    made = describe(str(PYTHON))
    assert made
    # Named to be read last: what is installed in .venv comes first.
    lines = [f"import site; site.addsitedir({path!r})" for path in facts["paths"] if os.path.isdir(path)]
    (Path(made["paths"][0]) / "zz-borrowed.pth").write_text("\n".join(lines) + "\n")


def choose_torch(pip: list[str]) -> str:
    """The torch to install: without CUDA if a configured index has one."""
    listing = subprocess.run([*pip, "index", "versions", "torch"], capture_output=True, text=True)
    cpu = f"{TORCH}+cpu"
    return cpu if cpu.partition("==")[2] in listing.stdout else TORCH


def install(kind: str, borrow: bool, torch: str) -> None:
    """Install Argosy in place and what it needs, with uv if that works: it takes a quarter of pip's time."""
    extras = [*([] if borrow else ["demo"]), *(["dev"] if kind == "dev" else [])]
    wanted = ["--no-build-isolation", "-e", f".[{','.join(extras)}]" if extras else ".", *([torch] if torch else [])]
    tools = PROJECT["build-system"]["requires"]
    for old in (ROOT / "src" / "argosy").glob("_native*.so"):
        old.unlink()  # An extension that is not built now must not be found later.
    if not borrow:  # uv does not see borrowed packages and would install them again.
        if not run([*PIP, "install", "uv", *tools], "installing uv"):
            say("uv cannot be installed; using pip, which is slower")
        elif install_with_uv([*wanted, *(["--compile-bytecode"] if kind == "dev" else [])]):
            return
    must_run([*PIP, "install", *tools], "installing the build tools")
    if not borrow:  # An error of the compiler is better found before long downloads.
        must_run([*PIP, "install", "--no-deps", "--no-build-isolation", "-e", "."], "building Argosy")
    must_run([*PIP, "install", *wanted], "installing with pip")


def install_with_uv(wanted: list[str]) -> bool:
    """Install with uv under pip's settings, or say why not."""
    options, variables, unknown = for_uv(read_settings(PIP))
    if unknown:
        say(f"uv has no equivalent of pip's setting {unknown[0]}; using pip, which is slower")
        return False
    uv = str(VENV / "bin" / "uv")
    cache = Path(subprocess.run([uv, "cache", "dir"], capture_output=True, text=True).stdout.strip())
    existing = next(path for path in (cache, *cache.parents) if path.exists())
    if existing.stat().st_dev != ROOT.stat().st_dev and "UV_CACHE_DIR" not in os.environ:
        variables["UV_CACHE_DIR"] = str(CACHE / "uv")  # Across file systems uv copies files instead of linking them.
    # Without --reinstall-package uv would not see that Rust code changed.
    command = [uv, "pip", "install", "--python", str(PYTHON), "--reinstall-package", "argosy", *options, *wanted]
    done = run(command, "installing with uv", variables)
    if not done:
        say(f"uv failed (see {LOG.relative_to(ROOT)}); using pip, which is slower")
    return done


def link_tools(scripts: str) -> None:
    for name in TOOLS:
        theirs, ours = Path(scripts) / name, VENV / "bin" / name
        if theirs.exists() and not ours.exists():
            ours.symlink_to(theirs)


def announce(kind: str, torch: str) -> None:
    """Say what will be downloaded, before it is."""
    sizes = [GB[torch], *([GB["dev"]] if kind == "dev" else [])]
    download, disk = (sum(size) for size in zip(*sizes, strict=True))
    what = "torch without CUDA" if torch.endswith("+cpu") else "mostly torch" if torch else "packages"
    say(f"downloading up to {download:.1f} GB ({what}), which take {disk:.1f} GB on disk")
    if torch:
        say("to borrow torch instead: make demo PYTHON=/path/to/bin/python")
        free = shutil.disk_usage(ROOT).free / 1e9
        if free < download + disk:
            stop(f"not enough disk space: {free:.1f} GB free, {download + disk:.1f} GB needed: {ROOT}")
    if builds_native():
        say("building the Rust extension with cargo (ARGOSY_NATIVE=0 skips it)")
    else:
        say("no cargo, or ARGOSY_NATIVE=0: slower Python code replaces the Rust extension")


def main() -> None:
    kind, asked = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else ""
    stamp, current = read_stamp(), fingerprint()
    # Without PYTHON= an environment once made with it stays in use.
    asked = os.path.abspath(shutil.which(asked) or asked) if asked else stamp["base"] if stamp.get("borrow") else ""
    reuse = bool(stamp) and (not asked or asked == stamp["base"])
    if reuse and stamp["fingerprint"] == current and stamp["kind"] in (kind, "dev"):
        return
    if reuse and stamp["kind"] == "dev":
        kind = "dev"  # An update keeps the test tools up to date too.
    borrow, base = bool(asked), asked or sys.executable
    facts = check_base(base, borrow)
    (CACHE / "tmp").mkdir(parents=True, exist_ok=True)
    LOG.write_text("")
    started = time.monotonic()
    version = ".".join(map(str, facts["version"]))
    borrowed = f" and torch {facts['torch']}, borrowed" if borrow else ""
    say(f"{'updating' if reuse else 'making'} .venv with Python {version}{borrowed}: {base}")
    if not reuse:
        make_venv(base, facts, borrow)
    STAMP.unlink(missing_ok=True)
    made = describe(str(PYTHON))
    assert made
    has_torch = borrow or made["torch"].partition("+")[0] == TORCH.partition("==")[2]
    torch = "" if has_torch else choose_torch(PIP)
    announce(kind, torch)
    install(kind, borrow, torch)
    if borrow:
        link_tools(facts["scripts"])
    STAMP.write_text(json.dumps({"fingerprint": current, "base": base, "borrow": borrow, "kind": kind}))
    say(f"ready after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted")
