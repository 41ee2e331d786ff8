"""How long a researcher waits: for a first step, for an edit to show, for a cause, for the rank that hangs.

    python bench/researcher.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

What counts is what the command itself says in the terminal. Peers take part where they can; where one says
less than was asked for, its name says so.
"""

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from itertools import count
from pathlib import Path

from contenders import SCRIPTS, Live, Stage, torchrun_command, wait_until
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import ROOT, python_of

RANKS = 4
DEADLINE_S = 120.0
ABSENT = r"rank 3\b.* trouble\.py:\d+"
"""The rank that stayed away, and where it is instead."""
Start = Callable[..., AbstractContextManager[Live]]
"""Takes a stage, a script and its arguments."""

_numbers = count(1)


def by_torchrun(stage: Stage, script: Path, *args: str) -> AbstractContextManager[Live]:
    return stage.live(torchrun_command(RANKS, str(script), *args))


def by_argosy(stage: Stage, script: Path, *args: str) -> AbstractContextManager[Live]:
    return stage.argosy("run", "-n", str(RANKS), str(script), *args)


def by_peer(peer: str, stage: Stage, script: Path, *args: str) -> AbstractContextManager[Live]:
    return stage.live([python_of(peer), str(script), *args])


# --- clone to first step


def first_step(stage: Stage, start: Start) -> float:
    with start(stage, SCRIPTS / "ddp_step.py") as command:
        return command.wait_line("first step", DEADLINE_S) - command.started_at


def clone_and_step(stage: Stage) -> float:
    """From `git clone` through the set-up that borrows this environment's torch to the first step."""
    clone = stage.new_dir() / "argosy"
    began_at = time.time()
    set_up = (
        ["git", "clone", "--quiet", "--depth", "1", ROOT.as_uri(), str(clone)],
        [sys.executable, str(clone / "tools" / "environment.py"), "demo", sys.executable],
    )
    for command in set_up:
        with stage.live(command) as done:
            done.time(600)
    argv = [
        str(clone / ".venv/bin/python"),
        "-m",
        "argosy",
        "run",
        "-n",
        str(RANKS),
        str(SCRIPTS / "ddp_step.py"),
    ]
    extra = {"ARGOSY_RUNTIME_DIR": str(clone / "rt"), "PYTHONPATH": ""}
    try:
        with stage.live(argv, extra) as command:
            return command.wait_line("first step", DEADLINE_S) - began_at
    finally:
        with stage.live([*argv[:3], "stop", "--all"], extra) as command:
            command.wait(60)
        shutil.rmtree(clone, ignore_errors=True)


def clone_row(stage: Stage) -> Row:
    return Row(
        key="clone",
        title=f"from a clone or an installation to the first step of {RANKS} ranks over Gloo, torch being installed",
        contenders=[
            Contender(name="torchrun", sample=partial(first_step, stage, by_torchrun)),
            Contender(name="argosy, from git clone", sample=partial(clone_and_step, stage), repeat_max=2),
            Contender(name="argosy, installed", sample=partial(_cold, stage, partial(first_step, stage, by_argosy))),
        ],
    )


def _cold(stage: Stage, sample: Callable[[], float]) -> float:
    stage.go_cold()
    return sample()


# --- edit to first line


def edit_and_run(stage: Stage, name: str, start: Start, script: str) -> float:
    """Change one line of a script that was run before, and run it: seconds until the new line is seen."""
    home = stage.root / f"edited-{name}"
    home.mkdir(exist_ok=True)
    text = f"edit{next(_numbers)}"
    source = (SCRIPTS / script).read_text().replace('TEXT = "before"', f'TEXT = "{text}"')
    edited = home / script
    if not edited.exists():
        edited.write_text((SCRIPTS / script).read_text())
        with start(stage, edited) as command:
            command.wait_line("line before", DEADLINE_S)
            command.wait(DEADLINE_S)
    edited.write_text(source)
    with start(stage, edited) as command:
        return command.wait_line(f"line {text}", DEADLINE_S) - command.started_at


def edit_row(stage: Stage) -> Row:
    def contender(name: str, start: Start, script: str, repeat_max: int | None = None) -> Contender:
        return Contender(name=name, sample=partial(edit_and_run, stage, name, start, script), repeat_max=repeat_max)

    return Row(
        key="edit",
        title=f"from an edit to the first line of a script with torch on {RANKS} ranks",
        contenders=[
            contender("torchrun", by_torchrun, "hello.py"),
            contender("argosy", by_argosy, "hello.py"),
            contender("monarch", partial(by_peer, "monarch"), "monarch_hello.py", 2),
            contender("ray", partial(by_peer, "ray"), "ray_hello.py", 2),
        ],
        goals=[Goal(of="argosy", at_most=1.0)],
    )


# --- failure to named cause, hang to named rank


def trouble_at(home: Path, command: Live) -> float:
    """Wait for the rank's word that it goes wrong now."""
    wait_until(lambda: (home / "trouble").exists() or command.ended, DEADLINE_S, "the trouble")
    if not (home / "trouble").exists():
        raise Failed(f"ended before the trouble: {command.last_word()}")
    return float((home / "trouble").read_text())


def cause_named(stage: Stage, start: Start, script: str, *patterns: str) -> float:
    """Seconds from the raise until the output of the command, which must end by itself, holds all patterns."""
    home = stage.new_dir()
    args = ["raise"] if script == "trouble.py" else []
    with start(stage, SCRIPTS / script, str(home), *args) as command:
        at = trouble_at(home, command)
        command.wait(DEADLINE_S)
        return max(command.wait_line(pattern, 1.0) for pattern in patterns) - at


def cause_row(stage: Stage) -> Row:
    error = "ValueError: the loss is not finite"
    by_ray, by_monarch = partial(by_peer, "ray"), partial(by_peer, "monarch")
    argosy = partial(cause_named, stage, by_argosy, "trouble.py", rf"rank 2.*{error}")
    torchrun = partial(cause_named, stage, by_torchrun, "trouble.py", error, r"^\s+rank +: 2 ")
    return Row(
        key="cause",
        title=f"from an exception on one of {RANKS} ranks to the command naming rank and exception as the cause",
        contenders=[
            Contender(name="torchrun", sample=torchrun),
            Contender(name="argosy", sample=argosy),
            Contender(
                name="ray, no rank",
                sample=partial(cause_named, stage, by_ray, "ray_trouble.py", error),
                repeat_max=2,
            ),
            Contender(
                name="monarch, no rank",
                sample=partial(cause_named, stage, by_monarch, "monarch_trouble.py", error),
                repeat_max=2,
            ),
        ],
    )


def hang_named(stage: Stage, start: Start, patience_s: float) -> float:
    """Seconds from the moment rank 3 stays away until the command says so by itself."""
    home = stage.new_dir()
    with start(stage, SCRIPTS / "trouble.py", str(home), "hang") as command:
        at = trouble_at(home, command)
        return command.wait_line(ABSENT, patience_s, after=at) - at


def hang_asked(stage: Stage) -> float:
    """Seconds that `argosy stacks` takes to show where rank 3 is, asked two seconds after it stayed away."""
    home = stage.new_dir()
    with by_argosy(stage, SCRIPTS / "trouble.py", str(home), "hang") as command:
        trouble_at(home, command)
        time.sleep(2.0)
        with stage.argosy("stacks") as asked:
            asked.wait(DEADLINE_S)
            if not re.search(ABSENT, asked.text()):
                raise Failed(f"not named: {asked.last_word()}")
            return asked.seconds


def hang_row(stage: Stage, *, quick: bool) -> Row:
    patience_s = 15.0 if quick else 90.0
    soon = ["run", "-n", str(RANKS), "--hang-after", "3"]

    def impatient(stage: Stage, script: Path, *args: str) -> AbstractContextManager[Live]:
        return stage.argosy(*soon, str(script), *args)

    default = Contender(name="argosy", sample=partial(hang_named, stage, by_argosy, patience_s), repeat_max=1)
    return Row(
        key="hang",
        title=f"from rank 3 of {RANKS} skipping an all_reduce to the command naming it",
        contenders=[
            Contender(name="torchrun", sample=partial(hang_named, stage, by_torchrun, patience_s), repeat_max=1),
            *([] if quick else [default]),
            Contender(name="argosy --hang-after 3", sample=partial(hang_named, stage, impatient, 30.0), repeat_max=2),
            Contender(name="argosy stacks, asked", sample=partial(hang_asked, stage), repeat_max=2),
        ],
    )


def rows(stage: Stage, options: Options) -> Sequence[Row]:
    return [clone_row(stage), edit_row(stage), cause_row(stage), hang_row(stage, quick=options.quick)]


def main() -> int:
    if shutil.which("git") is None or subprocess.run(["git", "-C", str(ROOT), "rev-parse"], check=False).returncode:
        sys.exit("researcher.py times a clone of this repository: git and a repository are needed")
    with Stage() as stage:
        return run_benches("Researcher: from an idea to an answer, Argosy beside its peers.", partial(rows, stage))


if __name__ == "__main__":
    sys.exit(main())
