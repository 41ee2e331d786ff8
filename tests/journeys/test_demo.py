"""From a clone to `make demo`: what a newcomer sees in the first minutes."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from console import REPOSITORY, Console, Ended, cold_terminal

SHOWN = [
    "steps +150 of 150",
    "killed +rank 2",
    r"recovered in +[\d.]+ s, [\d.]+ s$",
    "steps lost +0$",
    "final loss",
    r"final weights +\w{16}",
    r"undisturbed run +\w{16}: the same weights",
]
NOWHERE = "http://127.0.0.1:9"
"""The port of `discard`: downloads from it fail at once."""
BUILDERS = ("cargo", "rustc", "rustup", "node", "nodejs", "npm", "npx")


@pytest.fixture
def clone(tmp_path: Path) -> Iterator[Console]:
    """A terminal in a copy of what the repository holds, without anything that was built in it."""
    listing = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listing, cwd=REPOSITORY, check=True, stdout=subprocess.PIPE).stdout.decode()
    place = tmp_path / "clone"
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, place / name)
    with cold_terminal(place) as console:
        console.env.pop("PYTHONPATH", None)  # the clone's own package is what must be found
        yield console


def without_builders(path: str, farm: Path) -> str:
    """A PATH without cargo and node: directories that have them are replaced by links to all else in them."""
    kept: list[str] = []
    for number, directory in enumerate(path.split(":")):
        if not any(os.path.exists(os.path.join(directory, name)) for name in BUILDERS):
            kept.append(directory)
            continue
        links = farm / str(number)
        links.mkdir(parents=True)
        for name in set(os.listdir(directory)) - set(BUILDERS):
            (links / name).symlink_to(os.path.join(directory, name))
        kept.append(str(links))
    return ":".join(kept)


def demo(console: Console, *words: str) -> Ended:
    shown = console.run(["make", "demo", *words], patience_s=900)
    if (console.cwd / ".venv" / "bin" / "argosy").exists():
        console.python = str(console.cwd / ".venv" / "bin" / "python")
    return shown


def check_the_story(shown: Ended) -> None:
    text = shown.out.decode()
    assert shown.code == 0, shown.text
    assert re.search(r"step 100/150 +loss", text), "progress is live"
    assert re.search(r"kill -9 \d+ \d+", text), "two at once"
    story = text[text.index("Result") :]
    for row in SHOWN:
        assert re.search(rf"^ +{row}", story, re.MULTILINE), story
    assert len(re.findall(r"^ +\S*argosy \w+", story, re.MULTILINE)) == 3, story


def new_files(place: Path, before: set[Path]) -> set[str]:
    """The top-level names under which files appeared."""
    return {str(path.relative_to(place).parts[0]) for path in set(place.rglob("*")) - before}


@pytest.mark.system
def test_with_a_borrowed_environment_and_without_cargo_and_node(clone: Console, tmp_path: Path) -> None:
    clone.env["PATH"] = without_builders(clone.env["PATH"], tmp_path / "bin")
    for name in BUILDERS:
        assert shutil.which(name, path=clone.env["PATH"]) is None
    before = set(clone.cwd.rglob("*"))
    check_the_story(demo(clone, f"PYTHON={sys.executable}"))
    assert new_files(clone.cwd, before) <= {"runs", ".venv", ".cache", "src", "examples", "tools"}
    (picture,) = (clone.cwd / "runs").glob("*/loss.svg")
    assert "kill -9 ranks 0 and 3" in picture.read_text()
    why = clone.argosy("why")
    assert why.code == 0, why.text
    assert picture.parent.name in why.text


@pytest.mark.system
def test_a_failed_download_names_the_log(clone: Console) -> None:
    clone.env |= {"PIP_INDEX_URL": f"{NOWHERE}/simple", "PIP_RETRIES": "0"}
    shown = demo(clone)
    assert shown.code != 0
    size, uv, failure = (
        shown.text.index(text) for text in ("downloading up to", "uv cannot", ".cache/environment.log")
    )
    assert size < uv < failure, "the size is said first"
    assert re.search(r"ERROR: No matching distribution found for setuptools", shown.text[failure:]), shown.text
    assert "ERROR" not in shown.text[:failure], "what the installer writes goes to the log"
    assert "ERROR" in (clone.cwd / ".cache" / "environment.log").read_text()


@pytest.mark.system
@pytest.mark.timeout(1800)
def test_with_an_environment_of_its_own_twice(clone: Console) -> None:
    first = demo(clone)
    check_the_story(first)
    assert re.search(r"downloading .* GB.*GB written", first.text, re.DOTALL), "the size first, then progress"
    packages = [path.name for path in (clone.cwd / ".venv").glob("lib/python3*/site-packages/*")]
    assert "torch" in packages
    assert "pytest" not in packages, "the demo needs no test tools"
    clone.env |= {"http_proxy": NOWHERE, "https_proxy": NOWHERE, "PIP_NO_INDEX": "1"}
    again = demo(clone)
    check_the_story(again)
    assert "environment:" not in again.text, "the second time nothing is fetched"
