"""How fast the collectives of one host are, and how soon a group knows of a death and is whole again.

    python bench/collectives.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Every operation goes through `torch.distributed`; each sample is the median that one set of ranks found.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from contenders import SCRIPTS
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import mpirun, python_of

DEADLINE_S = 280.0
REPEAT_MAX = 2
"""Sets of four ranks per operation, and of any per training: each takes dozens of samples. Two ranks have no goals."""
TRIES, QUICK_TRIES = 34, 6
"""Kills per operation, each of which three ranks notice, and groups that are re-formed."""
SIZES = [4, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
QUICK_SIZES = [4, 16 << 20]
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]
LOSSES = [*OPERATIONS, "small_all_reduce", "barrier", "recv"]


def run(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S)
    except subprocess.TimeoutExpired as error:
        raise Failed(f"not within {DEADLINE_S:g} s") from error
    if done.returncode != 0:
        raise Failed((done.stderr.strip().splitlines() or ["silent"])[-1])
    return done.stdout


class Sheet:
    """One operation on all sizes: measured by one set of ranks at a time, and handed out cell by cell.

    A set of ranks costs seconds, most cells milliseconds. Samples of Argosy and Gloo alternate in it.
    """

    def __init__(self, operation: str, ranks: int, sizes: Sequence[int]) -> None:
        self._operation, self._ranks = operation, ranks
        self._sizes = ",".join(map(str, sizes))
        self._cells: dict[tuple[str, int], list[float]] = {}

    def take(self, contender: str, nbytes: int) -> float:
        if not self._cells.get((contender, nbytes)):
            for name, size, seconds in self._by_mpi() if contender == "mpi" else self._by_torch():
                self._cells.setdefault((name, size), []).append(seconds)
        return self._cells[contender, nbytes].pop()

    def _by_torch(self) -> list[tuple[str, int, float]]:
        command = [sys.executable, "-m", "argosy.collective.bench", "--json", "--ranks", str(self._ranks)]
        found = json.loads(run([*command, "--operations", self._operation, "--sizes", self._sizes]))
        return [(cell["backend"], cell["nbytes"], cell["median_s"]) for cell in found]

    def _by_mpi(self) -> list[tuple[str, int, float]]:
        flags = ["--oversubscribe", "--allow-run-as-root", "-n", str(self._ranks)]
        script = [str(python_of("mpi")), str(SCRIPTS / "mpi_collective.py"), self._operation, self._sizes]
        lines = [line.split() for line in run([mpirun(), *flags, *script]).splitlines()]
        return [("mpi", int(size), float(seconds)) for size, seconds in lines]


def time_script(what: str, backend: str, tries: int = 1) -> list[float]:
    command = [sys.executable, str(SCRIPTS / "collective_steps.py"), what, backend, str(tries)]
    return [float(line) for line in run(command).split()]


def operation_row(operation: str, nbytes: int, ranks: int, sheet: Sheet, repeat: int) -> Row:
    """Argosy beside Gloo and MPI; the goals are those of four ranks and of the ends of the scale."""
    names = ("gloo", "argosy", "mpi")
    contenders = [Contender(name=name, sample=partial(sheet.take, name, nbytes), repeat_max=repeat) for name in names]
    judged = ranks == 4 and (nbytes == SIZES[-1] or (nbytes <= 4 and operation in ("all_reduce", "barrier")))
    goals = [Goal(of="argosy", times_of="gloo", times=4)] if judged else []
    title = f"{operation} of {nbytes} bytes, {ranks} ranks" if operation != "barrier" else f"barrier, {ranks} ranks"
    return Row(key=f"{operation}-{nbytes}-{ranks}", title=title, contenders=contenders, base="gloo", goals=goals)


def rows(options: Options) -> list[Row]:
    repeat = 1 if options.quick else REPEAT_MAX
    found: list[Row] = []
    for ranks in (4,) if options.quick else (2, 4):
        for operation in [*OPERATIONS, "barrier"]:
            sizes = [0] if operation == "barrier" else QUICK_SIZES if options.quick else SIZES
            sheet = Sheet(operation, ranks, sizes)
            found += [operation_row(operation, size, ranks, sheet, repeat if ranks == 4 else 1) for size in sizes]
    for what, times in (("ddp", 1.3), ("fsdp2", 1.5)):
        both = [
            Contender(name=name, sample=partial(time_script, what, name), repeat_max=repeat)
            for name in ("gloo", "argosy")
        ]
        goals = [Goal(of="argosy", times_of="gloo", times=times)]
        title = f"whole step of a 14M transformer, {what}, 4 ranks"
        found.append(Row(key=what, title=title, contenders=both, base="gloo", goals=goals))
    return [*found, *fault_rows(QUICK_TRIES if options.quick else TRIES), memory_row()]


def fault_rows(tries: int) -> list[Row]:
    found: list[Row] = []
    losses = [(f"loss-{name}", f"SIGKILL to PeerLost on each other rank, in {name}") for name in LOSSES]
    for key, title in (*losses, ("reform", "re-form of 4 ranks, one replaced by a process that is there")):
        contender = Contender(name="argosy", sample=partial(time_script, key, "argosy", tries), repeat_max=1)
        goal = Goal(of="argosy", at_most=0.1, percentile=99)
        found.append(Row(key=key, title=title, contenders=[contender], base="argosy", goals=[goal], percentile=99))
    return found


def memory_row() -> Row:
    contender = Contender(name="argosy", sample=partial(time_script, "memory", "argosy"), repeat_max=1)
    goal = Goal(of="argosy", at_most=16, percentile=100)
    title = "shared memory of a rank with 1, 4 and 12 groups (the largest counts)"
    return Row(
        key="memory", title=title, contenders=[contender], base="argosy", unit="MiB", goals=[goal], percentile=100
    )


def main() -> int:
    return run_benches("Collectives: argosy beside Gloo and MPI.", rows)


if __name__ == "__main__":
    sys.exit(main())
