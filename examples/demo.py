"""Four ranks train a small transformer twice: once undisturbed, once with kills. The final weights are equal.

    make demo        (or: python examples/demo.py)

The second run loses one rank, then two at once. Takes about a minute on two cores and writes only below ./runs/.
Expect a table of what happened, with both digests of the weights compared, and a picture of the loss.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from argosy.train import read_log

ROOT = Path(__file__).resolve().parents[1]
STEPS, RANKS = 150, 4
KILLS = {50: [2], 100: [0, 3]}
"""After which step which ranks die."""
ARGOSY = [sys.executable, "-m", "argosy"]


@dataclass
class Story:
    """What the output of a run has told so far."""

    step: int = 0
    killed: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    back_s: list[float] = field(default_factory=list[float])
    loss: str = ""
    weights: str = ""

    def read(self, line: str) -> None:
        if found := re.search(r"step (\d+)/\d+", line):
            self.step = int(found[1])
        elif found := re.search(r"resumed step \S+ after (\S+) s", line):
            self.back_s.append(float(found[1]))
        elif found := re.search(r"done +loss (\S+) +weights (\S+)", line):
            self.loss, self.weights = found[1], found[2]


def pids_of(run: str) -> dict[int, int]:
    """Ask `argosy ps` for the ranks' processes, as a person would."""
    listing = subprocess.run([*ARGOSY, "ps", "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    (ranks,) = [found["ranks"] for found in json.loads(listing.stdout) if found["name"] == run]
    return {found["index"]: found["pid"] for found in ranks}


def train(run: str, kills: dict[int, list[int]]) -> tuple[int, Story]:
    """Start the run, show its output as it comes, and kill ranks on the way."""
    words = ["run", "-n", str(RANKS), "--name", run, "examples/train.py", f"runs/{run}", str(STEPS)]
    print("$ argosy " + " ".join(words), flush=True)
    launch = subprocess.Popen([*ARGOSY, *words], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    story, left = Story(), dict(kills)
    assert launch.stdout is not None
    try:
        for line in launch.stdout:
            print(line, end="", flush=True)
            story.read(line)
            for step in [step for step in left if story.step >= step]:
                victims, pids = left.pop(step), pids_of(run)
                for rank in victims:
                    os.kill(pids[rank], signal.SIGKILL)
                story.killed.append((story.step, victims))
                print(f"\n>>> kill -9 {' '.join(str(pids[rank]) for rank in victims)}\n", flush=True)
    except KeyboardInterrupt:
        launch.wait()  # The terminal gave it the same Ctrl-C: it stops the ranks, and then ends.
        raise
    return launch.wait(), story


def picture(run: str, story: Story) -> Path:
    """Draw the loss over the steps, with a mark for each kill."""
    rows = [(row.step, row.values["loss"]) for row in read_log(ROOT / "runs" / run) if "loss" in row.values]
    top = max(loss for _, loss in rows)
    points = " ".join(f"{40 + 700 * step / STEPS:.1f},{20 + 240 * (1 - loss / top):.1f}" for step, loss in rows)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 320" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="780" height="320" fill="white"/><path d="M40 20V260H740" fill="none" stroke="#888"/>')
    for step, victims in story.killed:
        x, who = 40 + 700 * step / STEPS, " and ".join(map(str, victims))
        parts.append(f'<path d="M{x:.1f} 20V260" stroke="#c22" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="32" fill="#c22">kill -9 rank {who}</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#25a" stroke-width="1.5"/>')
    parts.append(f'<text x="8" y="24">{top:.1f}</text><text x="8" y="260">0.0</text>')
    parts.append(f'<text x="40" y="280">0</text><text x="700" y="280">step {STEPS}</text>')
    parts.append('<text x="40" y="305">training loss of rank 0, four ranks</text></svg>')
    path = ROOT / "runs" / run / "loss.svg"
    path.write_text("\n".join(parts) + "\n")
    return path


def table(run: str, story: Story, calm: Story) -> str:
    who = "; ".join(f"rank {' and '.join(map(str, ranks))} after step {step}" for step, ranks in story.killed)
    same = "the same" if calm.weights == story.weights else f"NOT THE SAME: {calm.weights}"
    rows = [
        ("steps", f"{story.step} of {STEPS}"),
        ("killed", f"{who}, with SIGKILL"),
        ("back after", ", ".join(f"{seconds:.1f} s" for seconds in story.back_s)),
        ("steps lost", f"{STEPS - len(read_log(ROOT / 'runs' / run))}"),
        ("final loss", story.loss),
        ("final weights", f"{story.weights} (digest)"),
        ("undisturbed", f"{same}, from a second run that nobody touched"),
        ("picture", f"{picture(run, story).relative_to(ROOT)}"),
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
        (f"{argosy} logs", "what the ranks wrote, before the kills and after them"),
        (f"{argosy} ps --all", "all runs, these too"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"  {command:<{width}}   {what}" for command, what in rows)


def main() -> int:
    name = time.strftime("demo-%Y%m%d-%H%M%S")
    try:
        _, calm = train(f"{name}-calm", {})
        print("\nThe same again, with kills.\n")
        code, story = train(name, KILLS)
    except KeyboardInterrupt:
        return 130
    if code or len(story.killed) < len(KILLS) or not story.weights:
        print(f"\nthe demo did not go as planned: argosy run ended with {code}, at step {story.step}")
        return code or 1
    print(f"\nWhat happened\n{table(name, story, calm)}\n\nTry next\n{next_commands()}")
    return 0 if calm.weights == story.weights else 1


if __name__ == "__main__":
    sys.exit(main())
