"""How long a researcher waits: for a first step, for an edit to show, for a cause, for the rank that hangs.

    python bench/researcher.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

What counts is what the command itself says in the terminal. Peers take part where they can; where one says less
than was asked for, its name says so.
"""

import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path

from contenders import SCRIPTS, Live, Stage, torchrun_command, wait_until
from harness import Contender, Failed, Row, run_benches
from harness import Options as Options
from peers import ROOT, python_of

RANKS = 4
DEADLINE_S = 120.0
Start = Callable[[Stage, Sequence[str]], "contextmanager[Live]"]
_numbers = count(1)


@contextmanager
def by_torchrun(stage: Stage, script: Path, *args: str) -> Iterator[Live]:
    with stage.live(torchrun_command(RANKS, str(script), *args)) as command:
        yield command


@contextmanager
def by_argosy(stage: Stage, script: Path, *args: str, flags: Sequence[str] = ()) -> Iterator[Live]:
    with stage.argosy("run", "-n", str(RANKS), *flags, str(script), *args) as command:
        yield command


@contextmanager
def by_peer(peer: str, stage: Stage, script: Path, *args: str) -> Iterator[Live]:
    with stage.live([python_of(peer), str(script), *args]) as command:
        yield command
