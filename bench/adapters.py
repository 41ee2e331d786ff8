"""What adapters cost: SIGKILL to the next step, and time per step, under Trainer and Lightning with DDP on two ranks.

    python bench/adapters.py

Each framework runs examples/survive_NAME.py three times: undisturbed, and with one kill at step 8. A step's cost is
what `Transaction` adds around the framework's own work, measured inside rank 0. Takes some minutes.
"""

import os
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
MEASURE = """
import atexit, os, signal, sys, time
from argosy.train import Step
from argosy.train.adapters import Transaction
spent, steps = [0.0], []
def timed(kind, name):
    whole = getattr(kind, name)
    def call(*words, **how):
        began = time.perf_counter()
        try:
            return whole(*words, **how)
        finally:
            spent[0] += time.perf_counter() - began
    setattr(kind, name, call)
for name in ("open", "vote"):
    timed(Transaction, name)
timed(Transaction, "commit")
inner = Transaction.commit
def note(self):
    inner(self)
    steps.append(spent[0])
    spent[0] = 0.0
Transaction.commit = note
enter = Step.__enter__
def dying(self):
    if len(sys.argv) > 2 and not self.rehearsal and self.number == 8 and os.environ["RANK"] == "1":
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
    return enter(self)
Step.__enter__ = dying
if os.environ["RANK"] == "0":
    atexit.register(lambda: print("COST", sorted(steps[3:])[len(steps[3:]) // 2] * 1e3, flush=True))
"""


def run(name: str, place: Path, *words: str) -> str:
    script = place / f"{name}_steps.py"
    script.write_text(MEASURE + (ROOT / "examples" / f"survive_{name}.py").read_text())
    argosy = str(Path(sys.executable).with_name("argosy"))
    command = [argosy, "run", "-n", "2", str(script), tempfile.mkdtemp(dir=place), *words]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(command, cwd=place, env=environment, capture_output=True, text=True, timeout=900)
    if ended.returncode:
        raise SystemExit(ended.stdout + ended.stderr)
    return ended.stdout + ended.stderr


def main() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for name in ("trainer", "lightning"):
            costs = [float(re.findall(r"COST (\S+)", run(name, Path(directory)))[0]) for _ in range(3)]
            texts = [run(name, Path(directory), "kill") for _ in range(3)]
            gaps = [float(re.findall(r"resumed step [\d,]+ after (\S+) s", text)[0]) for text in texts]
            print(f"{name}: SIGKILL to the next step: median {statistics.median(gaps):.1f} s of {gaps} (goal 1 s)")
            print(f"{name}: cost per step, with its waits: {statistics.median(costs):.2f} ms (goal 1 ms)")


if __name__ == "__main__":
    main()
