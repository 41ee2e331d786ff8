"""Four ranks train a small transformer; one is killed half way; the run goes on by itself.

    make demo        (or: python examples/demo.py)

Takes half a minute on two cores and writes only below ./runs/. Expect a table of what happened at the end.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STEPS, RANKS, VICTIM = 300, 4, 2
ARGOSY = [sys.executable, "-m", "argosy"]


@dataclass
class Story:
    """What the output of the run has told so far."""

    step: int = 0
    killed_pid: int = 0
    killed_at: float = 0.0
    killed_step: int = 0
    resumed_step: int = 0
    back_s: float = 0.0
    again: int = 0
    loss: str = ""
    weights: str = ""

    def read(self, line: str, now: float) -> None:
        if found := re.search(r"resumed from step (\d+)", line):
            self.resumed_step = int(found[1])
            self.again = self.step - self.resumed_step
        elif found := re.search(r"step (\d+)/\d+", line):
            self.step = int(found[1])
            if self.resumed_step and not self.back_s:
                self.back_s = now - self.killed_at
        elif found := re.search(r"done +loss (\S+) +weights (\S+)", line):
            self.loss, self.weights = found[1], found[2]


def pid_of(run: str, rank: int) -> int:
    """Ask `argosy ps` for a rank's process, as a person would."""
    listing = subprocess.run([*ARGOSY, "ps", "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    (ranks,) = [found["ranks"] for found in json.loads(listing.stdout) if found["name"] == run]
    return next(found["pid"] for found in ranks if found["index"] == rank)


def watch(launch: subprocess.Popen[str], run: str) -> Story:
    """Show the output of the run as it comes; half way, kill a rank."""
    story = Story()
    assert launch.stdout is not None
    for line in launch.stdout:
        print(line, end="", flush=True)
        story.read(line, time.monotonic())
        if story.step >= STEPS // 2 and not story.killed_pid:
            story.killed_pid = pid_of(run, VICTIM)
            story.killed_step, story.killed_at = story.step, time.monotonic()
            os.kill(story.killed_pid, signal.SIGKILL)
            print(f"\n>>> kill -9 {story.killed_pid}  (rank {VICTIM} of {RANKS})\n", flush=True)
    return story


def table(story: Story, run: str) -> str:
    rows = [
        ("steps", f"{story.step} of {STEPS}"),
        ("killed", f"rank {VICTIM} (pid {story.killed_pid}) with SIGKILL, after step {story.killed_step}"),
        ("back after", f"{story.back_s:.1f} s, from its own checkpoint of step {story.resumed_step}"),
        ("steps done again", f"{story.again}"),
        ("final loss", f"{story.loss}"),
        ("final weights", f"{story.weights} (digest)"),
        ("written to", f"runs/{run}"),
    ]
    return "\n".join(f"  {name:<18}{value}" for name, value in rows)


def next_commands() -> str:
    beside = Path(sys.executable).with_name("argosy")
    if shutil.which("argosy"):
        argosy = "argosy"
    elif beside.is_file():
        argosy = os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)
    else:
        argosy = f"{sys.executable} -m argosy"
    rows = [
        (f"{argosy} why", "what failed first, and what was done about it"),
        (f"{argosy} logs", "what the ranks wrote, before the kill and after it"),
        (f"{argosy} ps --all", "all runs, this one too"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"  {command:<{width}}   {what}" for command, what in rows)


def main() -> int:
    run = time.strftime("demo-%Y%m%d-%H%M%S")
    checkpoint = f"runs/{run}/checkpoints/gpt.pt"
    words = ["run", "-n", str(RANKS), "--max-restarts", "3", "--name", run]
    words += ["examples/train_gpt.py", str(STEPS), checkpoint]
    print("$ argosy " + " ".join(words), flush=True)
    launch = subprocess.Popen([*ARGOSY, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    try:
        story = watch(launch, run)
    except KeyboardInterrupt:
        launch.wait()  # The terminal gave it the same Ctrl-C: it stops the ranks, and then ends.
        return 130
    code = launch.wait()
    if code or not story.resumed_step:
        print(f"\nthe demo did not go as planned: argosy run ended with {code}, at step {story.step}")
        return code or 1
    print(f"\nWhat happened\n{table(story, run)}\n\nTry next\n{next_commands()}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
