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

DEADLINE_S = 170.0
LARGE = 256 << 20
OPERATIONS = ["all_reduce", "reduce_scatter", "all_gather", "broadcast", "all_to_all"]


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


def time_script(what: str, backend: str, ranks: int) -> list[float]:
    command = [sys.executable, str(SCRIPTS / "collective_steps.py"), what, backend, str(ranks)]
    return [float(line) for line in run(command).split()]


def versus(key: str, title: str, sample: partial[float] | partial[list[float]], times: float) -> Row:
    """Argosy beside Gloo; `sample` lacks the backend."""
    both = [Contender(name=name, sample=partial(sample, name)) for name in ("gloo", "argosy")]
    return Row(
        key=key, title=title, contenders=both, base="gloo", goals=[Goal(of="argosy", times_of="gloo", times=times)]
    )


def rows(options: Options) -> list[Row]:
    found: list[Row] = []
    for ranks in (4,) if options.quick else (2, 4):
        large = LARGE >> 4 if options.quick else LARGE
        for operation in OPERATIONS:
            sample = partial(time_operation, operation=operation, nbytes=large, ranks=ranks)
            found.append(versus(f"{operation}-{ranks}", f"{operation} of {large} bytes, {ranks} ranks", sample, 4))
        for operation, nbytes in (("all_reduce", 4), ("barrier", 4)):
            sample = partial(time_operation, operation=operation, nbytes=nbytes, ranks=ranks)
            found.append(versus(f"small-{operation}-{ranks}", f"{operation} of 4 bytes, {ranks} ranks", sample, 4))
    for what, times in (("ddp", 1.3), ("fsdp2", 1.5)):

        def step(backend: str, what: str = what) -> list[float]:
            return time_script(what, backend, 4)

        found.append(versus(what, f"whole step of a 14M transformer, {what}, 4 ranks", partial(step), times))
    for key, title in (("loss", "SIGKILL to PeerLost on each other rank"), ("reform", "re-form of 4 ranks")):
        contender = Contender(name="argosy", sample=partial(time_script, key, "argosy", 4))
        goal = Goal(of="argosy", at_most=0.1, percentile=99)
        found.append(Row(key=key, title=title, contenders=[contender], base="argosy", goals=[goal], percentile=99))
    return found


def main() -> int:
    return run_benches("Collectives: argosy beside Gloo.", rows)


if __name__ == "__main__":
    sys.exit(main())
