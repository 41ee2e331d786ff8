"""A rank skips an all_reduce: who waits for whom is said, with stacks saved; honest work raises no alarm."""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest
from console import PATIENCE_S, Console, said, until
from daemons import daemon, kill

SCRIPTS = Path(__file__).with_name("scripts")
LINE = "ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41"


def write_scripts(place: Path) -> None:
    shutil.copy(SCRIPTS / "skips.py", place)
    lines = ["import time", *[""] * 38, "def fetch() -> None:", "    time.sleep(3600)", ""]
    (place / "data.py").write_text("\n".join(lines))


def test_the_rank_that_skipped_is_named(console: Console) -> None:
    write_scripts(console.cwd)
    out = console.cwd / "out.txt"
    run = console.start("run", "-n", "4", "--name", "skips", "--hang-after", "3", "skips.py", out=out)
    said(out, re.escape(LINE))
    assert run.poll() is None, "a hang is reported, and the run goes on"

    # On a busy machine a rank that waited for a core may have been told of before.
    incidents = Path(console.ps("skips")["dir"]).glob("incidents/*/incident.json")
    (incident,) = (path for path in incidents if LINE in json.loads(path.read_text())["headline"])
    saved = (incident.parent / "stacks.txt").read_text()
    assert re.search(r"data\.py\D+41", saved), saved
    assert len(re.findall(r"skips\.py", saved)) >= 1

    why = console.argosy("why", "skips").out.decode()
    assert LINE in why, why
    stacks = json.loads(console.argosy("stacks", "skips", "--json").out)
    assert "data.py" in json.dumps(stacks)


def test_a_hang_can_be_made_to_end_the_run_with_evidence_taken_first(console: Console) -> None:
    write_scripts(console.cwd)
    words = ["-n", "4", "--name", "ends", "--hang-after", "2", "--hang-timeout", "4", "--grace", "2"]
    ended = console.argosy("run", *words, "skips.py")
    assert ended.code != 0
    assert LINE in ended.text
    incidents = [
        json.loads(path.read_text()) for path in Path(console.ps("ends")["dir"]).glob("incidents/*/incident.json")
    ]
    assert any(LINE in facts["headline"] for facts in incidents)


@pytest.mark.system
def test_honest_work_raises_no_alarm(console: Console) -> None:
    shutil.copy(SCRIPTS / "busy.py", console.cwd)
    ended = console.argosy("run", "-n", "4", "--name", "busy", "--hang-after", "2", "busy.py", "5")
    assert ended.code == 0, ended.text
    assert "all done" in ended.text
    assert " wait in " not in ended.text
    assert not list(Path(console.ps("busy")["dir"]).glob("incidents/*"))


EARLY = """
import os, sys
import torch.distributed as dist
from datetime import timedelta
if os.environ["RANK"] == "2":
    sys.exit(0)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
"""


def test_a_rank_that_leaves_before_the_group_forms_is_to_blame(console: Console) -> None:
    (console.cwd / "early.py").write_text(EARLY)
    out = console.cwd / "out.txt"
    console.start("run", "-n", "3", "--name", "waits", "--hang-after", "2", "early.py", "600", out=out)
    said(out, "hang: rank 2 exited with code 0; ranks 0-1 wait for it in init_process_group")
    assert console.argosy("stop", "waits", "--grace", "1").code == 0
    assert "hung, then stopped by argosy stop" in console.argosy("why", "waits").text

    assert console.argosy("run", "-n", "3", "--name", "dies", "early.py", "3").code == 1
    why = " ".join(console.argosy("why", "dies").text.split())
    assert re.search(r"rank 2 ended with exit code 0 before init_process_group; then rank [01] failed: ", why), why


STOPPED = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
count = 0
while True:
    done = torch.tensor(float(os.path.exists("go")))
    dist.all_reduce(done)
    if done:
        break
    count += 1
    if count == 20:
        print("pid", os.getpid(), flush=True)
    time.sleep(0.02)
sys.exit(int(sys.argv[1]))
"""


@pytest.mark.parametrize("code", [0, 3])
def test_a_hang_that_ends_is_taken_back(console: Console, code: int) -> None:
    """A rank is stopped until the hang is reported, then continued; the run goes on and ends."""
    (console.cwd / "loop.py").write_text(STOPPED)
    out = console.cwd / "out.txt"
    run = console.start("run", "-n", "2", "--name", "pause", "--hang-after", "2", "loop.py", str(code), out=out)
    pid = int(said(out, r"^\[1\] +pid (\d+)")[1])
    os.kill(pid, signal.SIGSTOP)
    said(out, "hang: rank 1 is stopped")
    assert console.argosy("why", "pause", "--json").out.count(b'"verdict": "hang"') == 1
    os.kill(pid, signal.SIGCONT)
    said(out, r"hung for \d+ s, then resumed")

    def is_well() -> bool:
        alive = json.loads(console.argosy("why", "pause", "--json").out)
        return (alive["verdict"], alive["headline"]) == ("running", "")

    until(is_well, "a run that hangs no more")  # On a busy machine another rank may have been silent for 2 s.
    incidents = [json.loads(path.read_text()) for path in (console.cwd / "runs/pause/incidents").glob("*/*.json")]
    (incident,) = [each for each in incidents if "rank 1 is stopped" in each["headline"]]
    assert incident["recovered_after_s"] > 0
    (console.cwd / "go").touch()
    assert run.wait(PATIENCE_S) == code
    why = json.loads(console.argosy("why", "pause", "--json").out)
    assert why["verdict"] == ("done" if code == 0 else "crash")
    assert any("then resumed" in event["what"] for event in why["history"])
    assert "hang" not in console.argosy("why", "pause").text.splitlines()[0]


def test_a_hang_that_ends_while_the_agent_is_replaced_is_taken_back(console: Console) -> None:
    (console.cwd / "loop.py").write_text(STOPPED)
    out = console.cwd / "out.txt"
    run = console.start("run", "-n", "2", "--name", "gap", "--hang-after", "2", "loop.py", "0", out=out)
    pid = int(said(out, r"^\[1\] +pid (\d+)")[1])
    os.kill(pid, signal.SIGSTOP)
    said(out, "hang: rank 1 is stopped")
    agent = daemon(console, "agent")
    os.kill(agent, signal.SIGSTOP)
    os.kill(pid, signal.SIGCONT)
    kill(agent)

    def is_well() -> bool:
        alive = json.loads(console.argosy("why", "gap", "--json").out)
        return alive["verdict"] == "running" and "stopped by a signal" not in alive["summary"]

    until(is_well, "a run that hangs no more")
    history = [event["what"] for event in json.loads(console.argosy("why", "gap", "--json").out)["history"]]
    assert "rank 1 continued" in history
    (console.cwd / "go").touch()
    assert run.wait(PATIENCE_S) == 0
