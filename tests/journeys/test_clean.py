"""`argosy clean --dry-run` says what would go; `argosy clean` removes just that, and never checkpoints."""

import re
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
    for words in (["--dry-run"], ["--all", "--dry-run"]):
        said = console.argosy("clean", *words)
        assert said.code == 0, said.text
        for name in ("first", "second"):
            assert re.search(rf"^{name} .*\d [kMG]?B", said.out.decode(), re.MULTILINE), said.text
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


def test_checkpoints_go_only_after_a_yes(console: Console) -> None:
    kept = finished_run(console, "kept")
    (kept / "checkpoints").mkdir()
    (kept / "checkpoints" / "gpt.pt").write_bytes(b"weights")
    refused = console.argosy("clean", "kept", "--checkpoints")
    assert refused.code != 0, "there is no terminal to ask at"
    assert (kept / "checkpoints" / "gpt.pt").exists()
    gone = console.argosy("clean", "kept", "--checkpoints", "-y")
    assert gone.code == 0, gone.text
    assert not kept.exists()
