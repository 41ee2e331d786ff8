"""How long ranks take to start, meet and go, and how much memory each holds.

    python bench/launch.py [--quick] [--only ROW[:CONTENDER],...] [--repeat N] [--json PATH]

Times are wall time of the whole command, from its start to its exit. Cold: nothing of Argosy runs before.
Warm: warden, agent and zygote linger from an earlier launch, as they do for a user.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from contenders import SCRIPTS, Stage, argosy, free_port, torchrun_command
from harness import Contender, Failed, Goal, Options, Row, run_benches
from peers import mpirun, python_of

DEADLINE_S = 400.0
UNSHARED_RANK_GB, SPARE_GB = 0.37, 2.0
MPI_FLAGS = ["--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--mca", "plm", "isolated"]


def script(name: str) -> str:
    return str(SCRIPTS / name)


def time_torchrun(stage: Stage, ranks: int, name: str, *args: str) -> float:
    return stage.time(torchrun_command(ranks, script(name), *args), DEADLINE_S)


def time_argosy(stage: Stage, ranks: int, name: str, *args: str, warm: bool) -> float:
    command = ["run", "-n", str(ranks), script(name), *args]
    if warm:
        return stage.time_warm(name, *command, deadline_s=DEADLINE_S)
    return stage.time_cold(*command, deadline_s=DEADLINE_S)


def time_peer(stage: Stage, peer: str, ranks: int, what: str) -> float:
    return stage.time([python_of(peer), script(f"{peer}_launch.py"), str(ranks), what], DEADLINE_S)


def ray(stage: Stage, ranks: int, what: str) -> Contender:
    """Ray with as many actors as surely fit in memory, which its name says; they cost half a second each."""
    return Contender(name=f"ray, {ranks} ranks", sample=partial(time_peer, stage, "ray", ranks, what), repeat_max=1)


def time_forkserver(stage: Stage, ranks: int, what: str) -> float:
    return stage.time([sys.executable, script("forkserver.py"), str(ranks), what], DEADLINE_S)


def with_port(timed: Callable[..., float], stage: Stage, ranks: int, name: str, *args: str) -> Callable[[], float]:
    """A sample whose ranks meet on a port of their own each time."""
    return lambda: timed(stage, ranks, name, *args, str(free_port()))


def ranks_that_fit(ranks: int) -> int:
    """How many unshared ranks memory holds. Fewer make torchrun look better, never worse."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    free_gb = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable")) / 1e6
    return min(ranks, int((free_gb - SPARE_GB) / UNSHARED_RANK_GB))


def ddp_row(stage: Stage, ranks: int) -> Row:
    name, fit, dear = "ddp_step.py", ranks_that_fit(ranks), 1 if ranks < 64 else 2
    said = "" if fit == ranks else f" (torchrun only {fit}: no memory for {ranks} of its ranks)"
    return Row(
        key="ddp",
        title=f"start {ranks} ranks, take one step of a tiny DDP model over Gloo, exit{said}",
        contenders=[
            Contender(name="torchrun", sample=partial(time_torchrun, stage, fit, name), repeat_max=dear),
            Contender(name="argosy cold", sample=partial(time_argosy, stage, ranks, name, warm=False)),
            Contender(name="argosy warm", sample=partial(time_argosy, stage, ranks, name, warm=True)),
        ],
        goals=[
            Goal(of="argosy cold", times_of="torchrun", times=15),
            Goal(of="argosy warm", times_of="torchrun", times=40),
        ],
    )


def barrier_row(stage: Stage, ranks: int, *, quick: bool) -> Row:
    name = "torch_barrier.py"
    cold, warm = partial(time_argosy, warm=False), partial(time_argosy, warm=True)
    dear = [
        Contender(name="torchrun gloo", sample=with_port(time_torchrun, stage, ranks, name, "gloo"), repeat_max=1),
        Contender(name="monarch", sample=partial(time_peer, stage, "monarch", ranks, "torch"), repeat_max=1),
        ray(stage, min(ranks, 32), "torch"),
    ]
    return Row(
        key="barrier",
        title=f"start {ranks} ranks with torch, pass a barrier, exit",
        contenders=[
            Contender(name="torchrun", sample=with_port(time_torchrun, stage, ranks, name, "tcp"), repeat_max=1),
            Contender(name="forkserver", sample=partial(time_forkserver, stage, ranks, "torch")),
            Contender(name="argosy cold", sample=with_port(cold, stage, ranks, name, "argosy")),
            Contender(name="argosy warm", sample=with_port(warm, stage, ranks, name, "argosy")),
            *([] if quick else dear),
        ],
        goals=[
            Goal(of="argosy cold", times_of="forkserver", times=1 / 1.3),
            Goal(of="argosy warm", times_of="torchrun", times=50),
        ],
    )


def private_mb(stage: Stage, ranks: int, time_it: Callable[..., float]) -> float:
    report = stage.new_dir()
    time_it(stage, ranks, "ddp_step.py", str(report))
    held = [int(path.read_text()) for path in report.glob("*.kb")]
    if len(held) != ranks:
        raise Failed(f"{len(held)} of {ranks} ranks reported")
    return statistics.mean(held) / 1000


def memory_row(stage: Stage, ranks: int) -> Row:
    return Row(
        key="memory",
        title=f"private memory per rank after the first optimizer step, {ranks} ranks (smaps_rollup)",
        unit="MB",
        contenders=[
            Contender(name="torchrun", sample=lambda: private_mb(stage, ranks, time_torchrun), repeat_max=1),
            Contender(name="argosy", sample=lambda: private_mb(stage, ranks, partial(time_argosy, warm=True))),
        ],
        goals=[Goal(of="argosy", times_of="torchrun", times=15)],
    )


def bare_row(stage: Stage, ranks: int, *, quick: bool) -> Row:
    name = "bare.py"

    def by_mpirun() -> float:
        flags = [*MPI_FLAGS, *["--mca", "btl", "self,vader", "--mca", "oob_tcp_if_include", "lo", "-np"], str(ranks)]
        return stage.time([mpirun(), *flags, sys.executable, script(name), str(free_port())], DEADLINE_S)

    return Row(
        key="bare",
        title=f"start {ranks} ranks without torch, pass a TCP barrier, exit",
        contenders=[
            Contender(name="torchrun", sample=with_port(time_torchrun, stage, ranks, name)),
            Contender(name="argosy cold", sample=with_port(partial(time_argosy, warm=False), stage, ranks, name)),
            Contender(name="argosy warm", sample=with_port(partial(time_argosy, warm=True), stage, ranks, name)),
            Contender(name="forkserver", sample=partial(time_forkserver, stage, ranks, "plain")),
            Contender(name="mpirun", sample=by_mpirun),
            Contender(name="monarch", sample=partial(time_peer, stage, "monarch", ranks, "plain"), repeat_max=1),
            *([] if quick else [ray(stage, min(ranks, 64), "plain")]),
        ],
        goals=[
            Goal(of="argosy cold", times_of="torchrun", times=8),
            Goal(of="argosy warm", times_of="torchrun", times=8),
            Goal(of="argosy warm", times_of="monarch", times=20),
        ],
    )


def start_row(stage: Stage) -> Row:
    """What a bare interpreter takes is told beside, since nothing written in Python can be below it."""

    def timed(*argv: str) -> Callable[[], Sequence[float]]:
        return lambda: [stage.time(argv, 30) for _ in range(5)]

    torchrun_help = partial(stage.time, torchrun_command(1, "--help"), 30)

    return Row(
        key="start",
        title="start the command line (`python -c pass` is the floor)",
        base="torchrun --help",
        contenders=[
            Contender(name="python", sample=timed(sys.executable, "-c", "pass"), warm_up=True),
            Contender(name="import argosy", sample=timed(sys.executable, "-c", "import argosy"), warm_up=True),
            Contender(name="argosy --help", sample=timed(*argosy(), "--help"), warm_up=True),
            Contender(name="torchrun --help", sample=torchrun_help, repeat_max=2),
        ],
        goals=[Goal(of="argosy --help", at_most=0.100), Goal(of="import argosy", at_most=0.050)],
    )


def rows(stage: Stage, options: Options) -> list[Row]:
    quick = options.quick
    many, most, held = (4, 16, 4) if quick else (64, 256, 16)
    return [
        start_row(stage),
        bare_row(stage, most, quick=quick),
        barrier_row(stage, many, quick=quick),
        ddp_row(stage, many),
        memory_row(stage, held),
    ]


def main() -> int:
    with Stage() as stage:
        return run_benches("Launch: argosy run beside its peers.", partial(rows, stage))


if __name__ == "__main__":
    sys.exit(main())
