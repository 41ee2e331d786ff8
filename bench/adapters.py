"""What a kill costs under trainers of other people, and what surviving it costs per step.

    python bench/adapters.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Two ranks with DDP run the scripts of examples/ (Argosy's adapters) and of tests/journeys/ (the framework's own resume
under torchrun, and under `argosy run --max-restarts`). Rank 1 is killed once. torchft has no part in these trainers.
The frameworks: `tools/requirements.sh tests/system/requirements.txt`.
"""

import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from contenders import Stage, torchrun_command
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import ROOT

FRAMEWORKS = ("trainer", "lightning")
KILLED_AT = 9
UP_S = 600.0
NOTE = """
import os as _os, time as _time
def note(step):
    with open(_os.environ["BENCH_NOTES"], "a") as file:
        file.write(f"{_time.time()} {step}\\n")
"""
MEASURE = """
import atexit, os, signal, time
from argosy.train import Step
from argosy.train.adapters import Transaction
spent, steps = [0.0], []
def timed(name):
    whole = getattr(Transaction, name)
    def call(*words, **how):
        began = time.perf_counter()
        try:
            return whole(*words, **how)
        finally:
            spent[0] += time.perf_counter() - began
    setattr(Transaction, name, call)
for name in ("open", "vote", "commit"):
    timed(name)
inner = Transaction.commit
def committed(self):
    inner(self)
    steps.append(spent[0])
    spent[0] = 0.0
Transaction.commit = committed
enter = Step.__enter__
def entering(self):
    if not self.rehearsal:
        note(self.number)
        process = os.environ["RANK"] + "." + os.environ["TORCHELASTIC_RESTART_COUNT"]
        if os.environ["BENCH_DEATH"] == f"{process}:{self.number}":
            os.kill(os.getpid(), signal.SIGKILL)
    return enter(self)
Step.__enter__ = entering
if os.environ["RANK"] == "0":
    atexit.register(lambda: print("COST", sorted(steps[3:])[len(steps[3:]) // 2], flush=True))
"""


def surviving(framework: str) -> str:
    return NOTE + MEASURE + (ROOT / "examples" / f"survive_{framework}.py").read_text()


def resuming(framework: str) -> str:
    """It notes every step, in the place where a rank dies."""
    text = (ROOT / "tests" / "journeys" / "scripts" / f"resuming_{framework}.py").read_text()
    whole = "def die(step: int) -> None:\n"
    assert whole in text, "bench/adapters.py no longer fits the script"
    return NOTE + text.replace(whole, f"{whole}    note(step)\n")


def run(stage: Stage, text: str, start: Callable[[str], list[str]] | None, death: str) -> tuple[str, Path]:
    """What was printed, and the notes; `start` makes a command of a script, or it is `argosy run`."""
    home = stage.new_dir()
    script, notes = home / "script.py", home / "notes"
    script.write_text(text)
    extra = {"BENCH_NOTES": str(notes), "BENCH_DEATH": death, "HF_HUB_OFFLINE": "1", "HF_HOME": str(home / "hf")}
    words = [str(script), str(home / "out"), *([death] if death else [])]
    if start is None:
        command = stage.argosy("run", "-n", "2", *words, extra=extra)
    else:
        command = stage.live([*start(words[0]), *words[1:]], extra)
    with command as live:
        live.time(UP_S)
        return live.text(), notes


def gap(stage: Stage, text: str, start: Callable[[str], list[str]] | None) -> float:
    """Seconds from the kill to the first step that is made after the one in which it happened."""
    _, notes = run(stage, text, start, f"1.0:{KILLED_AT}")
    seen = [(float(when), int(step)) for when, step in (line.split() for line in notes.read_text().splitlines())]
    killed = min(when for when, step in seen if step == KILLED_AT)
    after = [when for when, step in seen if step == KILLED_AT + 1]
    if not after:
        raise Failed("no step was made after the kill")
    return min(after) - killed


def cost(stage: Stage, framework: str) -> float:
    text, _ = run(stage, surviving(framework), None, "")
    return float(re.findall(r"COST (\S+)", text)[0]) * 1e3


def under_torchrun(script: str) -> list[str]:
    return torchrun_command(2, script, flags=["--standalone", "--max-restarts=2"])


def under_argosy(script: str) -> list[str]:
    return [sys.executable, "-m", "argosy", "run", "-n", "2", "--max-restarts", "2", script]


def rows(stage: Stage, _: Options) -> Sequence[Row]:
    found: list[Row] = []
    for name in FRAMEWORKS:
        own = resuming(name)
        contenders = [
            Contender(name="argosy", sample=partial(gap, stage, surviving(name), None)),
            Contender(name="torchrun", sample=partial(gap, stage, own, under_torchrun), repeat_max=3),
            Contender(name="argosy, own resume", sample=partial(gap, stage, own, under_argosy), repeat_max=3),
        ]
        title = f"{name}: from SIGKILL of one of 2 ranks to the next new step"
        found.append(Row(key=name, title=title, contenders=contenders, goals=[Goal(of="argosy", at_most=1.0)]))
    costs = [Contender(name=name, sample=partial(cost, stage, name)) for name in FRAMEWORKS]
    title = "what the transaction takes of a step of 2 ranks, with its waits"
    goals = [Goal(of=name, at_most=1.0) for name in FRAMEWORKS]
    return [*found, Row(key="cost", title=title, unit="ms", base="", contenders=costs, goals=goals)]


def main() -> int:
    with Stage() as stage:
        return run_benches("Trainers of other people, through kills.", partial(rows, stage))


if __name__ == "__main__":
    sys.exit(main())
