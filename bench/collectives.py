"""How fast the collectives of one host are, and how soon a group knows of a death and is whole again.

    python bench/collectives.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Every operation goes through `torch.distributed`; each sample is a fresh set of ranks and its own median.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from functools import partial

from contenders import SCRIPTS
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import mpirun, python_of

DEADLINE_S = 170.0
SIZES = [4, 4 << 10, 64 << 10, 1 << 20, 16 << 20, 256 << 20]
QUICK_SIZES = [4, 1 << 20, 16 << 20]
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


def time_operation(backend: str, operation: str, nbytes: int, ranks: int) -> float:
    command = [sys.executable, "-m", "argosy.collective.bench", "--json", "--ranks", str(ranks)]
    command += ["--backends", backend, "--operations", operation, "--sizes", str(nbytes)]
    return float(json.loads(run(command))[0]["median_s"])


def time_mpi(operation: str, nbytes: int, ranks: int) -> float:
    flags = ["--oversubscribe", "--allow-run-as-root", "-n", str(ranks)]
    script = str(SCRIPTS / "mpi_collective.py")
    return float(run([mpirun(), *flags, str(python_of("mpi")), script, operation, str(nbytes)]))


def time_script(what: str, backend: str, ranks: int) -> list[float]:
    command = [sys.executable, str(SCRIPTS / "collective_steps.py"), what, backend, str(ranks)]
    return [float(line) for line in run(command).split()]


def operation_row(operation: str, nbytes: int, ranks: int) -> Row:
    """Argosy beside Gloo and MPI; the goals are those of four ranks and of the ends of the scale."""
    contenders = [
        Contender(name=name, sample=partial(time_operation, name, operation, nbytes, ranks))
        for name in ("gloo", "argosy")
    ]
    contenders.append(Contender(name="mpi", sample=partial(time_mpi, operation, nbytes, ranks)))
    judged = ranks == 4 and (nbytes == SIZES[-1] or (nbytes == 4 and operation in ("all_reduce", "barrier")))
    goals = [Goal(of="argosy", times_of="gloo", times=4)] if judged else []
    title = f"{operation} of {nbytes} bytes, {ranks} ranks" if operation != "barrier" else f"barrier, {ranks} ranks"
    return Row(key=f"{operation}-{nbytes}-{ranks}", title=title, contenders=contenders, base="gloo", goals=goals)


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    for ranks in (2, 4):
        for operation in OPERATIONS:
            found += [operation_row(operation, size, ranks) for size in (QUICK_SIZES if options.quick else SIZES)]
        found.append(operation_row("barrier", 4, ranks))
    for what, times in (("ddp", 1.3), ("fsdp2", 1.5)):
        both = [Contender(name=name, sample=partial(time_script, what, name, 4)) for name in ("gloo", "argosy")]
        goals = [Goal(of="argosy", times_of="gloo", times=times)]
        title = f"whole step of a 14M transformer, {what}, 4 ranks"
        found.append(Row(key=what, title=title, contenders=both, base="gloo", goals=goals))
    faults = [(f"loss-{name}", f"SIGKILL to PeerLost on each other rank, in {name}") for name in LOSSES]
    for key, title in (*faults, ("reform", "re-form of 4 ranks, one replaced by a process that is there")):
        contender = Contender(name="argosy", sample=partial(time_script, key, "argosy", 4))
        goal = Goal(of="argosy", at_most=0.1, percentile=99)
        found.append(Row(key=key, title=title, contenders=[contender], base="argosy", goals=[goal], percentile=99))
    contender = Contender(name="argosy", sample=partial(time_script, "memory", "argosy", 4), repeat_max=1)
    goal = Goal(of="argosy", at_most=16, percentile=100)
    title = "shared memory of a rank with 1, 4 and 12 groups (the largest counts)"
    found.append(
        Row(key="memory", title=title, contenders=[contender], base="argosy", unit="MiB", goals=[goal], percentile=100)
    )
    return found


def main() -> int:
    return run_benches("Collectives: argosy beside Gloo and MPI.", rows)


if __name__ == "__main__":
    sys.exit(main())
