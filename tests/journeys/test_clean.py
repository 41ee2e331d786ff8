"""`argosy clean --dry-run` says what would go; `argosy clean` removes just that, and never checkpoints."""

import json
from pathlib import Path

from console import Console


def finished_run(console: Console, name: str) -> Path:
    (console.cwd / "small.py").write_text("print('x' * 100_000)\n")
    ended = console.argosy("run", "--name", name, "small.py")
    assert ended.code == 0, ended.text
    return Path(console.ps(name)["dir"])


def files_of(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*") if path.is_file())


def test_a_dry_run_names_what_would_go_and_touches_nothing(console: Console) -> None:
    first, second = finished_run(console, "first"), finished_run(console, "second")
    before = files_of(first), files_of(second)
    said = console.argosy("clean", "--dry-run")
    assert said.code == 0, said.text
    assert "first" in said.text
    assert "second" in said.text
    assert (files_of(first), files_of(second)) == before


def test_cleaning_spares_checkpoints_and_running_runs(console: Console) -> None:
    plain, kept = finished_run(console, "plain"), finished_run(console, "kept")
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints" / "gpt.pt").write_bytes(b"weights")
    (console.cwd / "long.py").write_text("import time\nprint('begun', flush=True)\ntime.sleep(600)\n")
    began = console.argosy("run", "-d", "--name", "alive", "long.py")
    assert began.code == 0, began.text
    console.pid("alive", 0)

    cleaned = console.argosy("clean", "--all")
    assert cleaned.code == 0, cleaned.text
    assert not list(plain.glob("logs/*/*"))
    assert (kept / "checkpoints" / "gpt.pt").read_bytes() == b"weights"
    alive = console.ps("alive")
    assert alive["state"] == "running"
    assert list(Path(alive["dir"]).glob("logs/*/*"))
    assert json.loads(console.argosy("ps", "--json").out)
