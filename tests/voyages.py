"""Trainings under `argosy run` whose ranks are killed, and what they leave; train/scripts/voyage.py is the script."""

import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from console import PATIENCE_S, Console, until

from argosy.train import read_log

SCRIPT = str(Path(__file__).parent / "train" / "scripts" / "voyage.py")
STEPS = 9
SHORT = 200
"""Steps of each training of a campaign, which has as many of them as it needs."""
LONG = 1000
"""Steps of a training in which somebody dies about every second, from the first step to shortly before the last."""


class Landed:
    """What a voyage left."""

    def __init__(self, directory: Path, text: str) -> None:
        self.text = text
        line = next(line for line in text.splitlines() if "digests" in line)
        self.digests = line.split("digests")[1].partition("[")[0].split()
        self.rows = [(row.step, row.values) for row in read_log(directory)]
        self.built = [path.read_text().split() for path in sorted(directory.glob("built.*"))]
        self.samples: dict[int, list[str]] = {}
        """The samples of each step, by any generation of a rank; one line each."""
        for path in sorted(directory.glob("samples.*")):
            for line in path.read_text().splitlines():
                number, *ids = line.split()
                self.samples.setdefault(int(number), []).append(f"{path.name.split('.')[1]}: {' '.join(ids)}")


_landed: dict[Path, Landed] = {}
"""What was asked for before is not done again."""


def sail(console: Console, kind: str, ranks: int, *deaths: str, steps: int = STEPS) -> Landed:
    words = [kind, str(ranks), *([] if steps == STEPS else [str(steps)]), *deaths]
    directory = console.cwd / "-".join(words).replace(" ", "").replace(":", ".")
    if directory not in _landed:
        _landed[directory] = _sail(console, kind, ranks, *deaths, directory=directory, steps=steps)
    return _landed[directory]


def _sail(console: Console, kind: str, ranks: int, *deaths: str, directory: Path, steps: int = STEPS) -> Landed:
    directory.mkdir()
    words = ["run", "-n", str(ranks), SCRIPT, str(directory), kind, str(steps), *deaths]
    ended = console.argosy(*words, patience_s=PATIENCE_S + steps)
    assert ended.code == 0, ended.text
    return Landed(directory, ended.text)


def check(console: Console, kind: str, ranks: int, *deaths: str) -> Landed:
    calm, hard = sail(console, kind, ranks), sail(console, kind, ranks, *deaths)
    assert hard.digests == calm.digests
    assert [step for step, _ in hard.rows] == list(range(1, STEPS + 1))
    # What rank 0 had no time to say is said by another rank, of its own samples.
    unsaid = {int(death.split(":")[2]) + 1 for death in deaths if death.startswith("0.") and ":after vote:" in death}
    for (step, values), (_, expected) in zip(hard.rows, calm.rows, strict=True):
        assert step in unsaid or values["loss"] == expected["loss"]
    for number, lines in calm.samples.items():
        # A rank that died after the vote did not write its line; nobody trained on anything else.
        assert set(hard.samples.get(number, lines)) <= set(lines)
    # Each death was died, and whoever was not told to die was built once.
    for rank, pids in enumerate(hard.built):
        expected = 1 + sum((death.partition(">")[2] or death.partition(".")[0]) == str(rank) for death in deaths)
        assert len(pids) == expected, f"rank {rank} was built {len(pids)} times:\n{hard.text}"
    return hard


def progress(directory: Path) -> int:
    """The newest step that some rank has done."""
    last = [path.read_bytes().rsplit(b"\n", 2)[-2:-1] for path in directory.glob("samples.*")]
    return max((int(line[0].split()[0]) for line in last if line and line[0].strip()), default=-1)


PARTS = {
    "forward": "forward",
    "backward": "backward",
    "reduce": "backward",
    "before vote": "vote",
    "after vote": "after the vote",
}
"""Parts of a step; a pipeline's schedule runs both passes in its `forward`."""


def place_of(directory: Path, rank: str) -> str:
    """In which part of a step a rank was last, by its own words; else it was re-forming, or between steps."""
    with suppress(OSError):
        place = (directory / f"at.{rank}").read_text().rstrip("\0")
        return PARTS.get(place, "between steps" if place in ("evaluation", "snapshot") else "re-forming")
    return "re-forming"


def haunt(
    directory: Path,
    ended: Callable[[], bool],
    chance: random.Random,
    steps: int = LONG,
    places: "Counter[str] | None" = None,
    most: float = float("inf"),
) -> tuple[int, int]:
    """Kill ranks at random, mostly one and after some step was done; returns how many, and how often rank 0.

    It ends shortly before the last of the `steps`, or when `most` are killed. `places` counts where they were.
    """
    kills = zeroth = 0
    while (at := progress(directory)) < steps * 0.9 and kills < most and not ended():
        pids = {path.suffix[1:]: path.read_text().split() for path in directory.glob("built.*")}
        for rank in chance.sample(sorted(pids), min(len(pids), chance.choice([1, 1, 1, 1, 2]))):
            with suppress(OSError, IndexError):
                pid = int(pids[rank][-1])
                if Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"argosy: rank"):  # Not somebody else's by now.
                    os.kill(pid, signal.SIGKILL)
                    kills, zeroth = kills + 1, zeroth + (rank == "0")
                    if places is not None:
                        places[place_of(directory, rank)] += 1
        patience = time.monotonic() + PATIENCE_S
        patient = chance.random() < 0.8
        while patient and progress(directory) <= at and not ended() and time.monotonic() < patience:
            time.sleep(0.02)
        time.sleep(chance.random() * chance.choice([0.1, 1.0]))
    return kills, zeroth


def campaign(console: Console, kind: str, ranks: int, how: str) -> None:
    """Trainings whose ranks are killed at random until `ARGOSY_SOAK_KILLS` (200) are dead: all have the same digest.

    A training that hangs ends this with its output, after `PATIENCE_S`.
    """
    wanted, places, seeds = int(os.environ.get("ARGOSY_SOAK_KILLS", "200")), Counter[str](), 0
    calm = sail(console, kind, ranks, steps=SHORT)
    began = time.monotonic()
    while places.total() < wanted:
        directory, out = console.cwd / f"campaign-{kind}-{seeds}", console.cwd / f"campaign-{kind}-{seeds}.out"
        directory.mkdir()
        command = console.start("run", "-n", str(ranks), SCRIPT, str(directory), kind, str(SHORT), out=out)
        until(lambda at=directory: len(list(at.glob("built.*"))) == ranks, "all ranks")
        most = wanted - places.total()
        haunt(directory, lambda done=command: done.poll() is not None, random.Random(seeds), SHORT, places, most)
        assert command.wait(PATIENCE_S) == 0, out.read_text()[-8000:]
        hard = Landed(directory, out.read_text())
        assert hard.digests == calm.digests, f"seed {seeds}: {hard.digests}, undisturbed {calm.digests}"
        assert [step for step, _ in hard.rows] == list(range(1, SHORT + 1))
        shutil.rmtree(directory)
        seeds += 1
        print(f"\n{kind} on {ranks} ranks {how}: {places.total()} killed, {seeds} of {seeds} digests equal", flush=True)
    where = ", ".join(f"{place} {count}" for place, count in places.most_common())
    print(f"{kind} {how}: killed in {where}; {time.monotonic() - began:.0f} s")
