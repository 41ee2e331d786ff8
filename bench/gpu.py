"""For people who have GPUs: does a training survive there, and what does it cost? One JSON and a table.

    make gpu        (or: python bench/gpu.py [--ranks gpu] [--device cuda] [--steps 60] [--only PART,...] [--json PATH])

Parts: `ddp` and `fsdp2` train a small transformer, undisturbed and with two kills, to the same weights; `error` has a
device report an error; `save` snapshots and restores what is on a device; `collectives` compares with torch's group.
A part that fails is told in the JSON, and the next one runs. A rehearsal without a GPU: `--device cpu`, or
`--device emul`, the emulated accelerator of the tests.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

SCRIPTS = Path(__file__).parent / "scripts"
UP_S = 900.0
FIRST_STEPS = 5
"""Of each rank; in them memory is allocated and kernels are chosen."""


class PartFailed(Exception):
    """A part of the bench did not come to its end; its output says why."""


def argosy(home: Path, options: argparse.Namespace, script: str, *words: str) -> "subprocess.Popen[bytes]":
    """Start a script of this bench on all ranks; its output goes to HOME/output."""
    home.mkdir()
    argv = ["run", "-n", options.ranks, "--dir", str(home / "launch"), str(SCRIPTS / script), str(home), *words]
    with (home / "output").open("wb") as output:
        return subprocess.Popen([sys.executable, "-m", "argosy", *argv], stdout=output, stderr=output)


def finish(home: Path, command: "subprocess.Popen[bytes]") -> None:
    """Wait for the end of a command.

    Raises:
        PartFailed: it took too long, or its exit code is not 0.
    """
    try:
        code = command.wait(UP_S)
    except subprocess.TimeoutExpired:
        command.send_signal(signal.SIGINT)
        command.wait(60)
        raise PartFailed(f"no end after {UP_S:.0f} s: {tail(home)}") from None
    if code:
        raise PartFailed(f"exit code {code}: {tail(home)}")


def tail(home: Path) -> str:
    """The end of a command's output."""
    return (home / "output").read_text(errors="replace")[-3000:]


# --- trainings


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
            raise PartFailed(f"step {step} was not reached: {tail(home)}")
        time.sleep(0.02)


def train(home: Path, kind: str, options: argparse.Namespace, *, kills: int = 0, fault: bool = False) -> dict[str, Any]:
    """One training; with kills, the seconds from each to the next new step."""
    words = [kind, str(options.steps), options.device, *(["fault"] if fault else [])]
    command = argosy(home, options, "train_gpu.py", *words)
    back: list[float] = []
    try:
        for number in range(kills):
            wait_for_step(home, (number + 1) * options.steps // (kills + 1), command)
            victims = sorted(int(path.stem) for path in home.glob("*.steps"))
            before, killed_at = max(made for _, made, _ in read(home)), time.time()
            os.kill(pid_of(home, victims[-1 if number % 2 == 0 else 0]), signal.SIGKILL)
            wait_for_step(home, before + 2, command)
            back.append(min(when for when, made, _ in read(home) if made >= before + 2) - killed_at)
        finish(home, command)
    finally:
        if command.poll() is None:
            command.send_signal(signal.SIGINT)
            command.wait(60)
    steps = [seconds for _, _, seconds in read(home)][len(list(home.glob("*.steps"))) * FIRST_STEPS :]
    found = {"digest": (home / "digest").read_text(), "step_s": statistics.median(steps or [0.0])}
    return {**found, "kill_to_next_step_s": back, "output": tail(home) if fault else ""}


def kill_part(kind: str, place: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """A training with and without kills."""
    calm = train(place / f"{kind}-calm", kind, options)
    killed = train(place / f"{kind}-killed", kind, options, kills=2)
    same = calm["digest"] == killed["digest"]
    back = ", ".join(f"{seconds:.2f} s" for seconds in killed["kill_to_next_step_s"])
    lines = [
        f"{kind}: a step  {1000 * calm['step_s']:.1f} ms",
        f"{kind}: from SIGKILL to the next new step  {back}",
        f"{kind}: weights after two kills  {'equal' if same else 'DIFFERENT'}",
    ]
    return {"undisturbed": calm, "killed": killed, "same_weights": same}, lines, same


def error_part(place: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """A device reports an error in the middle of a training: the rank is replaced, and the weights stay the same."""
    if options.device == "cpu":
        return {"skipped": "the CPU reports no such error"}, ["error: skipped on the CPU"], True
    calm = train(place / "error-calm", "ddp", options)
    hurt = train(place / "error-hurt", "ddp", options, fault=True)
    named = [line for line in hurt["output"].splitlines() if "failed: " in line and "device" in line]
    same = calm["digest"] == hurt["digest"]
    lines = [
        f"error: named as  {named[0].strip() if named else 'NOT NAMED'}",
        f"error: weights after it  {'equal' if same else 'DIFFERENT'}",
    ]
    return {"named": named, "same_weights": same, "output": hurt["output"]}, lines, same and bool(named)


# --- saves and collectives


def measure(home: Path, options: argparse.Namespace, script: str) -> dict[str, Any]:
    """Run a script that writes what it measured to HOME/found.json."""
    finish(home, argosy(home, options, script, options.device))
    return json.loads((home / "found.json").read_text())


def save_part(place: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """Snapshots of what is on the device of one rank."""
    found = measure(place / "save", argparse.Namespace(**{**vars(options), "ranks": "1"}), "save_gpu.py")
    lines = [
        f"save: step time lost with a snapshot in each step  {100 * found['lost']:.1f}%",
        f"save: {found['bytes'] / 2**20:.0f} MiB on disk after  {found['durable_s']:.2f} s",
        f"save: restored state  {'equal' if found['restored'] else 'DIFFERENT'}",
    ]
    return found, lines, found["restored"]


def collectives_part(place: Path, options: argparse.Namespace) -> tuple[dict[str, Any], list[str], bool]:
    """All-reduce of tensors on the devices, against torch's own backend."""
    found = measure(place / "collectives", options, "collective_gpu.py")
    lines = [
        f"collectives: all-reduce of {size} bytes  {1e6 * own:.0f} us; {found['other']} {1e6 * other:.0f} us"
        for size, own, other in found["all_reduce"]
    ]
    return found, lines, True


# --- the whole


def describe(device: str) -> dict[str, Any]:
    import torch

    names, nccl = [device], ""
    if device == "cuda":
        module = torch.get_device_module(device)
        names = [module.get_device_name(n) for n in range(module.device_count())]
        nccl = ".".join(map(str, torch.cuda.nccl.version()))
    cpus = len(os.sched_getaffinity(0))
    return {"devices": names, "nccl": nccl, "torch": torch.__version__, "kernel": platform.release(), "cpus": cpus}


Part = Callable[[Path, argparse.Namespace], tuple[dict[str, Any], list[str], bool]]
PARTS: dict[str, Part] = {
    "ddp": lambda place, options: kill_part("ddp", place, options),
    "fsdp2": lambda place, options: kill_part("fsdp2", place, options),
    "error": error_part,
    "save": save_part,
    "collectives": collectives_part,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Kills, errors, saves and collectives on accelerators.")
    parser.add_argument("--ranks", default="")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu", "emul"])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--only", default=",".join(PARTS))
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    options = parser.parse_args()
    options.ranks = options.ranks or ("gpu" if options.device == "cuda" else "2")
    found: dict[str, Any] = {"machine": describe(options.device), "options": {**vars(options), "json": ""}}
    place = Path(tempfile.mkdtemp(prefix="argosy-gpu-"))
    print(f"output of the parts: {place}", flush=True)
    good = True
    for name in options.only.split(","):
        try:
            found[name], lines, well = PARTS[name](place, options)
        except (PartFailed, OSError, ValueError, KeyError) as error:
            found[name], lines, well = {"failed": str(error)}, [f"{name}: FAILED, see the JSON"], False
        good = good and well
        options.json.write_text(json.dumps(found, indent=1))  # After each part: it may be the last one.
        for line in lines:
            what, _, value = line.partition("  ")
            print(f"{what:58} {value}", flush=True)
    print(f"written: {options.json}; {'everything passed' if good else 'NOT everything passed'}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
