"""What the documents show works: their commands run, the files that they name exist, their restart policy is added."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from console import REPOSITORY, Console
from warm import warm_python

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
EXPECTED_TRACEBACKS = ("IndexError: Target 4 is out of bounds",)


def scripts(document: Path) -> list[tuple[str, str]]:
    """The scripts that a document shows: code blocks whose first line is the name of the file."""
    return re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[str]:
    """The lines behind a prompt in a document's console blocks; the other lines are their output."""
    consoles = re.findall(r"^```console\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for console in consoles for line in console.splitlines() if line.startswith("$ ")]


@pytest.mark.system
@pytest.mark.parametrize("document", [path for path in DOCS if commands(path)], ids=lambda path: path.name)
def test_documented_commands_end_as_documented(console: Console, document: Path) -> None:
    for name, text in scripts(document):
        (console.cwd / name).write_text(text)
    shims = console.cwd / "bin"
    shims.mkdir()
    (shims / "python").symlink_to(warm_python())
    (shims / "argosy").write_text(f'#!/bin/sh\nexec {sys.executable} -m argosy "$@"\n')
    (shims / "argosy").chmod(0o755)
    console.env["PATH"] = f"{shims}:{console.env['PATH']}"
    for command in commands(document):
        expected = int(found[1]) if (found := re.search(r"# exits (\d+)", command)) else 0
        ended = console.run(["sh", "-c", command])
        assert ended.code == expected, f"{command}\n{ended.text}"
        is_expected = any(error in ended.text for error in EXPECTED_TRACEBACKS)
        assert "Traceback" not in ended.text or is_expected, f"{command}\n{ended.text}"


def test_files_that_documents_name_exist():
    """Contributors are sent to files by their path (contributing.md) or name (architecture.md)."""
    package = REPOSITORY / "src" / "argosy"
    table = (REPOSITORY / "docs/contributing.md").read_text().partition("## Where to change what")[2]
    rows = [line.split("|") for line in table.partition("\n## ")[0].splitlines() if line.count("|") == 4]
    paths = [package / path for row in rows for path in re.findall(r"`([\w/]+\.pyi?)`", row[2])]
    paths += [REPOSITORY / "tests" / path for row in rows for path in re.findall(r"`([\w/]+\.py)`", row[3])]
    assert len(paths) > 60
    assert [str(path) for path in paths if not path.exists()] == []
    named = re.findall(r"`(?:\w+/)*(\w+\.py)`", (REPOSITORY / "docs/architecture.md").read_text())
    known = {path.name for folder in (package, REPOSITORY / "tests") for path in folder.rglob("*.py")}
    assert [name for name in named if name not in known] == []


def test_the_readme_is_one_page_and_what_it_names_exists():
    text = (REPOSITORY / "README.md").read_text()
    assert text.count("\n") <= 100
    pages = "\n".join(path.read_text() for path in DOCS)
    screen = re.search(r"^```console\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert screen is not None
    missing = [line for line in screen[1].splitlines() if line not in ("", "...") and line not in pages]
    assert missing == [], "the pages, whose commands are tested, show another screen"
    targets = re.findall(r"^([\w-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)
    assert {*re.findall(r"^make ([\w-]+)", text, re.MULTILINE)} <= {*targets}
    benches = re.findall(r"^\|[^|]*\| `(\w+\.py)` \|", text, re.MULTILINE)
    assert len(benches) >= 8
    assert [name for name in benches if not (REPOSITORY / "bench" / name).exists()] == []


def test_contributors_are_sent_into_every_room():
    text = (REPOSITORY / "docs/contributing.md").read_text()
    rooms = {path.parent.name for path in (REPOSITORY / "src/argosy").glob("*/__init__.py")}
    table = text.partition("## Where to change what")[2].partition("\n## ")[0]
    assert rooms - {*re.findall(r"`(\w+)/", table)} == set()
    line = re.search(r"Imports point down: ([^.]*)\.", text)
    assert line is not None
    assert {*re.findall(r"\w+", line[1])} == rooms


def test_a_policy_is_added_by_two_files_as_documented(cold_console: Console) -> None:
    console = cold_console  # Its daemons run the code with the policy.
    policy, test = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "docs/contributing.md").read_text(), re.MULTILINE | re.DOTALL
    )
    package = console.cwd / "src" / "argosy"
    shutil.copytree(REPOSITORY / "src" / "argosy", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "control/policies/pair.py").write_text(policy)
    (console.cwd / "test_pair.py").write_text(test)
    console.env["PYTHONPATH"] = str(package.parent)
    tested = console.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pair.py"])
    assert tested.code == 0, tested.text

    (console.cwd / "fails.py").write_text(
        "import os, time\n"
        "rank, again = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('rank', rank, 'generation', again, flush=True)\n"
        "assert rank != '2' or again == '1'\n"
        "if rank == '3' and again == '1': open('go', 'w').close()\n"
        "while not os.path.exists('go'): time.sleep(0.01)\n"
    )
    ended = console.argosy("run", "-n", "4", "--restart", "pair", "fails.py")
    assert ended.code == 0, ended.text
    assert "rank 2 generation 1" in ended.text
    assert "rank 3 generation 1" in ended.text
    assert "rank 0 generation 1" not in ended.text
