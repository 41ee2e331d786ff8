"""What the documents show works as shown: commands are typed, the policy of docs/contributing.md is added and used."""

import re
import shutil
import sys
from pathlib import Path

import pytest
from console import REPOSITORY, Console

DOCS = sorted((REPOSITORY / "docs").glob("*.md"))
SCRIPTS = {
    "hello.py": "import os, sys\nprint('hello from', os.environ['RANK'], sys.argv[1:])\n",
    "nap.py": "import time\nprint('zzz', flush=True)\ntime.sleep(600)\n",
    "raises.py": "import os, time\ntime.sleep(0.2)\nif os.environ['RANK'] == '1':\n    raise ValueError('broken')\n"
    "time.sleep(600)\n",
    "skips.py": "import time, torch, torch.distributed as dist\ndist.init_process_group('gloo')\n"
    "for _ in range(5):\n    dist.all_reduce(torch.ones(1))\n"
    "if dist.get_rank() == 0:\n    dist.all_reduce(torch.ones(1))\ntime.sleep(600)\n",
}


def files(document: Path) -> list[tuple[str, str]]:
    """The scripts that the document shows: code whose first line is the file's name."""
    return re.findall(r"^```python\n# (\w+\.py)\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)


def commands(document: Path) -> list[str]:
    """The lines behind a prompt in the document's consoles."""
    consoles = re.findall(r"^```console\n(.*?)^```", document.read_text(), re.MULTILINE | re.DOTALL)
    return [line[2:] for console in consoles for line in console.splitlines() if line.startswith("$ ")]


@pytest.mark.parametrize("document", [path for path in DOCS if commands(path)], ids=lambda path: path.name)
def test_documented_commands_end_as_documented(console: Console, document: Path) -> None:
    for name, text in [*SCRIPTS.items(), *files(document)]:
        (console.cwd / name).write_text(text)
    shims = console.cwd / "bin"
    shims.mkdir()
    for name, words in (("argosy", "-m argosy"), ("python", "")):
        (shims / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (shims / name).chmod(0o755)
    console.env["PATH"] = f"{shims}:{console.env['PATH']}"
    for command in commands(document):
        expected = int(found[1]) if (found := re.search(r"# exits (\d+)", command)) else 0
        ended = console.run(["sh", "-c", command])
        assert ended.code == expected, f"{command}\n{ended.text}"
        assert "Traceback" not in ended.text or "ValueError: broken" in ended.text, f"{command}\n{ended.text}"


def test_a_policy_is_added_by_two_files_as_documented(console: Console) -> None:
    policy, test = re.findall(
        r"^```python\n(.*?)^```", (REPOSITORY / "docs/contributing.md").read_text(), re.MULTILINE | re.DOTALL
    )
    package = console.cwd / "src" / "argosy"
    shutil.copytree(REPOSITORY / "src" / "argosy", package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "process/run/policies/pair.py").write_text(policy)
    (console.cwd / "test_pair.py").write_text(test)
    console.env["PYTHONPATH"] = str(package.parent)
    tested = console.run([sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_pair.py"])
    assert tested.code == 0, tested.text

    (console.cwd / "fails.py").write_text(
        "import os, time\n"
        "rank, again = os.environ['RANK'], os.environ['TORCHELASTIC_RESTART_COUNT']\n"
        "print('rank', rank, 'generation', again, flush=True)\n"
        "time.sleep(0.5 if rank == '2' or again == '1' else 3)\n"
        "assert rank != '2' or again == '1'\n"
    )
    ended = console.argosy("run", "-n", "4", "--restart", "pair", "fails.py")
    assert ended.code == 0, ended.text
    assert "rank 2 generation 1" in ended.text
    assert "rank 3 generation 1" in ended.text
    assert "rank 0 generation 1" not in ended.text
