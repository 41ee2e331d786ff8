"""Bugs that the machines of `argosy.control` could have, each one change of text, and how a seed is looked for.

The copy of the package with the bug is laid over the installed one in a process of its own.
"""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import argosy

CONTROL = Path(argosy.__file__).parent / "control"
SEARCH_S = 300.0
"""A machine with a bug may never return."""
SEARCH = """
import sys
import argosy
argosy.__path__.insert(0, sys.argv[1])
from argosy import control
assert control.__file__.startswith(sys.argv[1]), control.__file__
from argosy.sim import Violation, random_life
for seed in range(int(sys.argv[2])):
    try:
        random_life(seed)
    except Violation as violation:
        print(violation)
        break
"""


@dataclass(frozen=True, slots=True)
class PlantedBug:
    """One change to one file of `argosy.control`."""

    name: str
    file: str
    old: str
    new: str
    seeds: int = 1000
    """Within so many it is found."""


BUGS = [
    PlantedBug(
        "a lost host is still listened to (P7)",
        "run.py",
        "            if host not in state.lost:  # P7\n",
        "            if True:\n",
    ),
    PlantedBug(
        "ranks of an older generation are members (P5)",
        "run_state.py",
        "slot is not None and slot.generation == rank.generation and slot.alive",
        "slot is not None and slot.alive",
    ),
    PlantedBug(
        "letters are not repeated to a host that can be reached again",
        "node.py",
        "            out += mail.waiting\n",
        "",
    ),
    PlantedBug(
        "an acknowledgement counts for one letter too many",
        "node.py",
        """        case Acknowledged(peer, taken):
            mail = state.mail.setdefault(peer, Mail())
            mail.waiting = [letter for letter in mail.waiting if letter.number > taken]
        case ShutDown""",
        """        case Acknowledged(peer, taken):
            mail = state.mail.setdefault(peer, Mail())
            mail.waiting = [letter for letter in mail.waiting if letter.number > taken + 1]
        case ShutDown""",
    ),
    PlantedBug(
        "letters are taken twice (N3)",
        "node.py",
        "            if number == mail.taken + 1:  # N3\n",
        "            if number <= mail.taken + 1:\n",
    ),
    PlantedBug(
        "a zygote that is back is not asked again for its ranks",
        "host.py",
        "            _ask_again(state, key, process)\n",
        "",
    ),
    PlantedBug(
        "kills that were under way are not repeated by a new agent",
        "host.py",
        "        out += [KillTree(name, rank) for rank in sorted(run.killing)]\n",
        "",
    ),
    PlantedBug(
        "a new agent repeats signals (N2)",
        "node.py",
        "    return isinstance(effect.effect, Record | RetireZygote | RememberSpoiled)\n",
        "    return isinstance(effect.effect, Record | RetireZygote | RememberSpoiled | host.SendSignal)\n",
    ),
    PlantedBug(
        "nobody is killed after the grace (P3)",
        "run.py",
        "            _order(state, takedown.alive, KillRanks, out)\n",
        "",
    ),
    PlantedBug(
        "evidence is not awaited (P1)",
        "run.py",
        "        if takedown.evidence and now < takedown.evidence_until:\n",
        "        if False:\n",
    ),
    PlantedBug(
        "failures are not charged to the budget",
        "run.py",
        "    state.budget = charge(state.budget, failure)\n",
        "    state.budget = charge(type(state.budget)(), failure)\n",
    ),
    PlantedBug(
        "the exit code is not that of the failed rank (P4)",
        "run.py",
        "        takedown = _everyone(state, cause, code)\n",
        "        takedown = _everyone(state, cause, 1)\n",
    ),
    PlantedBug(
        "spare hosts are forgotten",
        "run.py",
        'spare = state.spares.pop(0) if state.spares and indices and not state.final and state.outcome is None else ""',
        'spare = ""',
    ),
    PlantedBug(
        "a rank starts while its unseen twin is being killed",
        "host.py",
        "if not waiting or run.killing or run.failed or",
        "if not waiting or run.failed or",
    ),
    PlantedBug(
        "what a lost starter may have started is not killed (H3)",
        "host.py",
        "        _kill(state, name, local.rank, out)  # H3\n",
        "",
    ),
    PlantedBug(
        "a generation starts while the one before is being started (P2)",
        "run.py",
        "    takedown.alive = {index for index in takedown.ranks if state.slots[index].alive}\n",
        "    takedown.alive = {index for index in takedown.ranks if state.slots[index].pid}\n",
    ),
    PlantedBug(
        "a new agent forgets zygotes that have not returned yet",
        "host.py",
        '            zygote.phase, zygote.awaited_until = "returning", now + RETURN_S\n',
        "            del state.zygotes[key]\n",
    ),
    PlantedBug(
        "one performed effect counts for all of its event (N1)",
        "node.py",
        "                pending = [each for each in pending if each[0] > number]\n",
        "                pending = []\n",
    ),
    PlantedBug(
        "the run goes on without the client that it belongs to",
        "run.py",
        '        _stop(state, StopWanted("the client is gone", signal.SIGTERM), now, out)\n',
        "",
    ),
    PlantedBug(
        "a takedown that takes over another one forgets its ranks",
        "run.py",
        "        takedown.ranks |= other.ranks\n",
        "",
        seeds=5000,
    ),
    PlantedBug(
        "only the first start opens a view",
        "run.py",
        "    state.view += 1\n",
        "    state.view = 1\n",
    ),
    PlantedBug(
        "the run ends when the first host has cleared up",
        "run.py",
        "            if state.outcome is not None and not state.clearing and not state.ended:\n",
        "            if state.outcome is not None and not state.ended:\n",
    ),
    PlantedBug(
        "a lost host that comes back keeps its ranks (P7)",
        "run.py",
        "    out.append(ToHost(host, ClearRun()))\n    if spare:\n",
        "    if spare:\n",
    ),
]


def plant(bug: PlantedBug | None, directory: Path) -> Path:
    """Copy the package's folder of machines, with a bug or as it is; return what to lay over the package."""
    copy = directory / "control"
    shutil.copytree(CONTROL, copy, ignore=shutil.ignore_patterns("__pycache__"))
    if bug is not None:
        text = (copy / bug.file).read_text()
        assert text.count(bug.old) == 1, f"{bug.file} does not have this once: {bug.old}"
        (copy / bug.file).write_text(text.replace(bug.old, bug.new))
    return directory


def first_violation(overlay: Path, seeds: int) -> str:
    """Live with the machines of a copy, one seed after the other; return the first violation, or nothing."""
    command = [sys.executable, "-c", SEARCH, str(overlay), str(seeds)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=SEARCH_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
