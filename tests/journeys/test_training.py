"""The plain script with a run around its loop: killed again and again, found dead, moved to more ranks."""

import json
import os
import random
import re
import shlex
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest
from console import REPOSITORY, Console, said, until
from warm import warm

from argosy.train import read_log

SCRIPT = str(REPOSITORY / "examples" / "train.py")


def weights(text: str) -> str:
    """What the script says of its end."""
    found = re.search(r"done +loss \S+ +weights (\S+)", text)
    assert found, text
    return found[1]


@pytest.mark.system
def test_a_kill_every_five_seconds_for_a_minute(console: Console, tmp_path: Path) -> None:
    chance, steps = random.Random(7), 600
    calm = console.argosy("run", "-n", "4", SCRIPT, "calm", str(steps), patience_s=300)
    assert calm.code == 0, calm.text
    out = tmp_path / "out.txt"
    run = console.start("run", "-n", "4", "--name", "killed", SCRIPT, "killed", str(steps), out=out)
    said(out, r"step 10/")
    begun, kills = time.monotonic(), 0
    while run.poll() is None and time.monotonic() < begun + 60:
        ranks = [rank["pid"] for rank in console.ps("killed").get("ranks", []) if rank["pid"]]
        with suppress(ProcessLookupError):  # It may have ended since it was listed.
            if ranks and run.poll() is None:
                os.kill(chance.choice(ranks), signal.SIGKILL)
                kills += 1
        time.sleep(5)
    assert run.wait(300) == 0, out.read_text()
    assert kills >= 3
    assert weights(out.read_text()) == weights(calm.text)
    rows, expected = read_log(console.cwd / "killed"), read_log(console.cwd / "calm")
    assert [row.step for row in rows] == [row.step for row in expected]
    # Where rank 0 died between the vote and its words, another rank said them, of its own samples.
    others = [row for row, wanted in zip(rows, expected, strict=True) if row.values != wanted.values]
    assert len(others) <= kills


@pytest.mark.system
def test_a_power_cut_at_three_in_the_morning(console: Console) -> None:
    began = console.argosy("run", "-n", "2", "-d", "--name", "night", SCRIPT, "night", "60")
    assert began.code == 0, began.text
    out = Path(console.ps("night")["dir"])
    until(lambda: any("step 30/" in log.read_text() for log in out.glob("logs/*/0.*.out")), "step 30")
    console.cut_power()

    why = console.argosy("why", "night")
    assert why.code == 0, why.text
    screen = why.out.decode()
    assert "Traceback" not in screen
    found = re.search(r"argosy run .*train\.py night 60", screen)
    assert found, screen
    facts = json.loads(console.argosy("why", "night", "--json").out)
    words = shlex.split(facts["commands"]["resume"])
    again = console.argosy(*words[1:], patience_s=120)
    assert again.code == 0, again.text
    if "-d" in words:
        until(lambda: console.ps(facts["name"]).get("state") == "ended", "the end")
    calm = console.argosy("run", "-n", "2", SCRIPT, "calm", "60", patience_s=120)
    assert [(r.step, r.values["loss"]) for r in read_log(console.cwd / "night")] == [
        (r.step, r.values["loss"]) for r in read_log(console.cwd / "calm")
    ], calm.text


@pytest.mark.system
def test_from_a_laptop_to_four_ranks_by_one_flag(console: Console) -> None:
    alone = console.run([*warm(), SCRIPT, "moved", "20"])
    assert alone.code == 0, alone.text
    four = console.argosy("run", "-n", "4", SCRIPT, "moved", "40")
    assert four.code == 0, four.text
    assert "resumed from step 20" in four.text
    assert "ranks was 1, is 4" in four.text
    rows = read_log(console.cwd / "moved")
    assert [row.step for row in rows if "loss" in row.values] == list(range(1, 41))
    assert rows[-1].values["loss"] < rows[0].values["loss"] - 1, "it learns on"
