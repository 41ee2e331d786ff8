"""The plain script: the same under torchrun, under `argosy run`, and when it goes on from its own checkpoint.

The diff of docs/plain-loop.md makes it survive kills; the diff is short, and the losses stay the same.
"""

import os
import re
import signal
from pathlib import Path

import pytest
from console import PATIENCE_S, REPOSITORY, Console, said

SCRIPT = str(REPOSITORY / "examples" / "plain.py")
STEPS = 50
DYING = """
import os as _os, signal as _signal
from argosy.train import Step as _Step
def _dies(name, inner):
    def call(self, *words):
        me = f"{_os.environ['RANK']}.{_os.environ['TORCHELASTIC_RESTART_COUNT']}:{name}:{self.number}"
        if not self.rehearsal and me in _os.environ.get("DEATHS", "").split():
            _os.kill(_os.getpid(), _signal.SIGKILL)
        return inner(self, *words)
    return call
_Step.__enter__, _Step.__exit__ = _dies("enter", _Step.__enter__), _dies("exit", _Step.__exit__)
_Step.before_update = _dies("vote", _Step.before_update)
"""


def values_of(text: str) -> dict[int, str]:
    """The loss of each evaluation."""
    return {int(step): value for step, value in re.findall(r"step (\d+) +val (\S+)", text)}


@pytest.mark.system
def test_it_ends_alike_however_it_is_started(console: Console, tmp_path: Path) -> None:
    one = console.argosy("run", "-n", "1", SCRIPT, "one", str(STEPS), env={"OMP_NUM_THREADS": "1"})
    two = console.torchrun("--nproc-per-node", "2", SCRIPT, "two", str(STEPS))
    assert (one.code, two.code) == (0, 0), one.text + two.text
    alone, both = values_of(one.text), values_of(two.text)
    assert list(alone) == list(both) == [25, STEPS]
    assert float(both[STEPS]) < float(both[25]) < 4.0, "it learns"
    assert [float(value) for value in both.values()] == pytest.approx([float(v) for v in alone.values()], rel=1e-2)

    out = tmp_path / "out.txt"
    words = ["-n", "2", "--max-restarts", "1", "--name", "killed", SCRIPT, "killed", str(STEPS)]
    run = console.start("run", *words, out=out)
    victim = console.pid("killed", 1)
    said(out, r"step 30 +loss")
    os.kill(victim, signal.SIGKILL)
    assert run.wait(PATIENCE_S) == 0, out.read_text()
    assert values_of(out.read_text()) == both
    assert len(re.findall(r"step 30 +loss", out.read_text())) == 2, "it went on from the checkpoint of step 25"

    again = console.argosy("run", "-n", "2", SCRIPT, "two", str(STEPS))
    assert again.code == 0, again.text
    assert values_of(again.text) == {}, "there was nothing left to do"


def changed() -> tuple[str, int, int]:
    """The script with the documented diff applied, and how many lines that adds and removes."""
    text = (REPOSITORY / "examples" / "plain.py").read_text()
    shown = re.search(r"^```diff\n(.*?)^```", (REPOSITORY / "docs/plain-loop.md").read_text(), re.MULTILINE | re.DOTALL)
    assert shown is not None
    hunks = [hunk.partition("\n")[2].splitlines() for hunk in re.split(r"^@@", shown[1], flags=re.MULTILINE)[1:]]
    for hunk in hunks:
        before, after = ("".join(line[1:] + "\n" for line in hunk if line[0] in marks) for marks in (" -", " +"))
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    marks = [line[0] for hunk in hunks for line in hunk]
    return text, marks.count("+"), marks.count("-")


def test_few_lines_change():
    text, added, removed = changed()
    compile(text, "survive.py", "exec")
    assert (added, removed) == (4, 3)


@pytest.mark.system
@pytest.mark.timeout(600)
def test_kills_change_no_loss(console: Console) -> None:
    calm = console.torchrun("--nproc-per-node", "2", str(REPOSITORY / "examples" / "plain.py"), "calm", str(STEPS))
    assert calm.code == 0, calm.text
    (console.cwd / "docs").symlink_to(REPOSITORY / "docs")  # What it trains on.
    script = console.cwd / "examples" / "survive.py"
    script.parent.mkdir()
    script.write_text(
        changed()[0].replace("\nimport hashlib", "").replace("\nimport math\n", "\nimport math\n" + DYING)
    )
    env = {"DEATHS": "1.0:enter:12 0.0:vote:20 1.1:exit:33", "PYTHONPATH": str(REPOSITORY / "examples")}
    hard = console.argosy("run", "-n", "2", str(script), "hard", str(STEPS), env=env, patience_s=300)
    assert hard.code == 0, hard.text
    assert len(re.findall(r"lost \(SIGKILL\); resumed step", hard.text)) == 3, hard.text
    assert values_of(hard.text) == values_of(calm.text)
    again = console.argosy("run", "-n", "2", str(script), "hard", str(STEPS), env=env, patience_s=300)
    assert "finished at step 50: nothing to do" in again.text
