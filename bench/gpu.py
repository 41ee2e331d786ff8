"""For people who have GPUs: does a training survive kills on them, and what does it cost? One JSON and a table.

    make gpu        (or: python bench/gpu.py [--ranks gpu] [--device cuda] [--steps 60] [--json PATH])

DDP and FSDP2 train a small transformer with one rank per GPU, undisturbed and with two kills. Both must end with the
same weights. `--device cpu --ranks 2` shows on a machine without a GPU that the command itself works.
"""

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts" / "train_gpu.py"
UP_S = 900.0


def read(home: Path) -> list[tuple[float, int, float]]:
    """Time, step and seconds of each step that any rank has recorded."""
    lines = [line.split() for path in home.glob("*.steps") for line in path.read_text().splitlines()]
    return sorted((float(a), int(b), float(c)) for a, b, c in lines if a != "pid")


def pid_of(home: Path, rank: int) -> int:
    """The newest process of a rank."""
    lines = (home / f"{rank}.steps").read_text().splitlines()
    return [int(line.split()[1]) for line in lines if line.startswith("pid")][-1]


def wait_for_step(home: Path, step: int, command: "subprocess.Popen[bytes]") -> None:
    end = time.monotonic() + UP_S
    while not any(made >= step for _, made, _ in read(home)):
        if command.poll() is not None or time.monotonic() > end:
            raise SystemExit(f"step {step} was not reached: read {home}/output")
        time.sleep(0.02)


def train(home: Path, kind: str, options: argparse.Namespace, *, kill: bool) -> dict[str, Any]:
    """One training; with two kills, the seconds from each to the next new step."""
    home.mkdir()
    words = ["run", "-n", options.ranks, str(SCRIPT), str(home), kind, str(options.steps), options.device]
    back: list[float] = []
    with (home / "output").open("wb") as output:
        command = subprocess.Popen([sys.executable, "-m", "argosy", *words], stdout=output, stderr=output)
    for number, at in enumerate((options.steps // 3, 2 * options.steps // 3) if kill else ()):
        wait_for_step(home, at, command)
        victims = sorted(int(path.stem) for path in home.glob("*.steps"))
        before, killed_at = max(made for _, made, _ in read(home)), time.time()
        os.kill(pid_of(home, victims[-1 if number == 0 else 0]), signal.SIGKILL)
        wait_for_step(home, before + 2, command)
        back.append(min(when for when, made, _ in read(home) if made >= before + 2) - killed_at)
    code = command.wait(UP_S)
    steps = [seconds for _, _, seconds in read(home)][len(list(home.glob("*.steps"))) * 5 :]
    digest = (home / "digest").read_text() if code == 0 else ""
    return {"code": code, "digest": digest, "step_s": statistics.median(steps or [0.0]), "kill_to_next_step_s": back}


def describe(device: str) -> dict[str, Any]:
    import torch

    module = torch.get_device_module(device)
    names = [module.get_device_name(n) for n in range(module.device_count())] if device == "cuda" else [device]
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if device == "cuda" else ""
    return {"devices": names, "nccl": nccl, "torch": torch.__version__, "kernel": platform.release()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills, saves and steps on accelerators.")
    parser.add_argument("--ranks", default="gpu")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    found: dict[str, Any] = {"machine": describe(options.device), "steps": options.steps}
    place = Path(tempfile.mkdtemp(prefix="argosy-gpu-"))
    print(f"output of the runs: {place}")
    print(f"{'':6} {'step':>9} {'kill to next step':>20}  weights after kills")
    for kind in ("ddp", "fsdp2"):
        calm = train(place / f"{kind}-calm", kind, options, kill=False)
        killed = train(place / f"{kind}-killed", kind, options, kill=True)
        same = bool(calm["digest"]) and calm["digest"] == killed["digest"]
        found[kind] = {"undisturbed": calm, "killed": killed, "same_weights": same}
        back = ", ".join(f"{seconds:.2f} s" for seconds in killed["kill_to_next_step_s"])
        print(f"{kind:6} {1000 * calm['step_s']:6.1f} ms {back:>20}  {'equal' if same else 'DIFFERENT'}", flush=True)
    options.json.write_text(json.dumps(found, indent=1))
    print(f"written: {options.json}")
    return 0 if all(found[kind]["same_weights"] for kind in ("ddp", "fsdp2")) else 1


if __name__ == "__main__":
    sys.exit(main())
