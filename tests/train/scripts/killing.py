"""The beginning of a script whose ranks die where they are told to.   SCRIPT DIRECTORY [RANK.GENERATION:PLACE:STEP]...

PLACE is one of `enter` (the step begins), `vote` (the gradients are there), `voted`, and `commit` (the framework has
made its update, and now logs, evaluates or saves). Each process appends its id to DIRECTORY.pids/RANK.
"""

import os
import signal
import sys
from pathlib import Path

from argosy.train import Step
from argosy.train.adapters import Transaction

directory, *deaths = sys.argv[1:]
rank, generation = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
Path(directory + ".pids").mkdir(exist_ok=True)
with Path(directory + ".pids", rank).open("a") as file:
    file.write(f"{os.getpid()}\n")


def place(name: str, step: Step | None) -> None:
    if step is not None and not step.rehearsal and f"{rank}.{generation}:{name}:{step.number}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


enter, decide, commit = Step.__enter__, Step.decide, Transaction.commit


def dying_enter(self):
    place("enter", self)
    return enter(self)


def dying_decide(self):
    place("vote", self)
    decide(self)
    place("voted", self)


def dying_commit(self):
    step = self._step
    commit(self)
    place("commit", step)


Step.__enter__, Step.decide, Transaction.commit = dying_enter, dying_decide, dying_commit
