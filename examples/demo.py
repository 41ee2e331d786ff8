"""Four ranks train a small transformer twice: once undisturbed, once with kills. The final weights are equal.

    make demo        (or: python examples/demo.py)

The second run loses one rank, then two at once. Takes half a minute on two cores and writes only below ./runs/.
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

ROOT = Path(__file__).resolve().parents[1]
STEPS, RANKS = 150, 4
KILLS = {50: [2], 100: [0, 3]}
"""After which step which ranks are killed."""
INTRODUCTION = """
Four ranks train a small transformer on the CPU, twice: undisturbed, then with
kill -9 on the way. Both runs must end with the same weights.
"""
ARGOSY = [sys.executable, "-m", "argosy"]


@dataclass
class Story:
    """What the output of a run has told so far."""

    step: int = 0
    killed: list[tuple[int, list[int]]] = field(default_factory=list[tuple[int, list[int]]])
    recovery_s: list[float] = field(default_factory=list[float])
    loss: str = ""
    weights: str = ""

    def read(self, line: str) -> None:
        if found := re.search(r"step (\d+)/\d+", line):
            self.step = int(found[1])
        elif found := re.search(r"resumed step \S+ after (\S+) s", line):
            self.recovery_s.append(float(found[1]))
        elif found := re.search(r"done +loss (\S+) +weights (\S+)", line):
            self.loss, self.weights = found[1], found[2]


def named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"


def pids_of(run: str) -> dict[int, int]:
    """Ask `argosy ps` for the ranks' processes, as a person would."""
    listing = subprocess.run([*ARGOSY, "ps", "--json"], cwd=ROOT, check=True, stdout=subprocess.PIPE)
    (ranks,) = [found["ranks"] for found in json.loads(listing.stdout) if found["name"] == run]
    return {found["index"]: found["pid"] for found in ranks}


def train(run: str, kills: dict[int, list[int]]) -> tuple[int, Story]:
    """Start the run, show its output as it comes, and kill ranks on the way."""
    options, script = ["-n", str(RANKS), "--name", run], ["examples/train.py", f"runs/{run}", str(STEPS)]
    print(f"$ argosy run {' '.join(options)} \\\n      {' '.join(script)}", flush=True)
    command = [*ARGOSY, "run", *options, *script]
    launch = subprocess.Popen(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
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
                print(
                    f"\n>>> kill -9 {' '.join(str(pids[rank]) for rank in victims)}   ({named(victims)})\n", flush=True
                )
    except KeyboardInterrupt:
        launch.wait()  # The terminal gave it the same Ctrl-C: it stops the ranks, and then ends.
        raise
    return launch.wait(), story


def losses_of(run: str) -> list[tuple[int, float]]:
    """Each step of the run's log with its loss."""
    from argosy.train import read_log  # Imports torch: too slow for the top, nothing would be shown for seconds.

    return [(row.step, row.values["loss"]) for row in read_log(ROOT / "runs" / run) if "loss" in row.values]


def picture(run: str, rows: list[tuple[int, float]], story: Story) -> Path:
    """Draw the loss over the steps, with a mark for each kill."""
    top = max(loss for _, loss in rows)
    points = " ".join(f"{40 + 700 * step / STEPS:.1f},{20 + 240 * (1 - loss / top):.1f}" for step, loss in rows)
    parts = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 780 320" font-family="sans-serif" font-size="12">']
    parts.append('<rect width="780" height="320" fill="white"/><path d="M40 20V260H740" fill="none" stroke="#888"/>')
    for step, victims in story.killed:
        x = 40 + 700 * step / STEPS
        parts.append(f'<path d="M{x:.1f} 20V260" stroke="#c22" stroke-dasharray="4 3"/>')
        parts.append(f'<text x="{x + 4:.1f}" y="32" fill="#c22">kill -9 {named(victims)}</text>')
    parts.append(f'<polyline points="{points}" fill="none" stroke="#25a" stroke-width="1.5"/>')
    parts.append(f'<text x="8" y="24">{top:.1f}</text><text x="8" y="260">0.0</text>')
    parts.append(f'<text x="40" y="280">0</text><text x="700" y="280">step {STEPS}</text>')
    parts.append('<text x="40" y="305">training loss of rank 0, four ranks</text></svg>')
    path = ROOT / "runs" / run / "loss.svg"
    path.write_text("\n".join(parts) + "\n")
    return path


def table(run: str, story: Story, calm: Story) -> str:
    rows = losses_of(run)
    same = "the same weights, bit for bit" if calm.weights == story.weights else "NOT THE SAME WEIGHTS"
    lines = [
        ("steps", f"{story.step} of {STEPS}"),
        ("killed", ", ".join(f"{named(ranks)} after step {step}" for step, ranks in story.killed)),
        ("recovered in", ", ".join(f"{seconds:.1f} s" for seconds in story.recovery_s)),
        ("steps lost", f"{STEPS - len(rows)}"),
        ("final loss", story.loss),
        ("final weights", f"{story.weights} (digest)"),
        ("undisturbed run", f"{calm.weights}: {same}"),
        ("loss curve", f"{picture(run, rows, story).relative_to(ROOT)}"),
    ]
    report = subprocess.run([*ARGOSY, "report", f"runs/{run}"], cwd=ROOT, capture_output=True, text=True)
    if report.returncode == 0:
        lines.append(("report", f"{Path(report.stdout.strip()).relative_to(ROOT)}: where every second went"))
    return "\n".join(f"  {name:<17}{value}" for name, value in lines)


def argosy_here() -> str:
    """How to call argosy from the current directory."""
    beside = Path(sys.executable).with_name("argosy")
    if shutil.which("argosy"):
        return "argosy"
    if not beside.is_file():
        return f"{sys.executable} -m argosy"
    return os.path.relpath(beside) if beside.is_relative_to(Path.cwd()) else str(beside)


def next_commands() -> str:
    rows = [
        (f"{argosy_here()} why", "what failed first, and how the run recovered"),
        (f"{argosy_here()} logs", "what the ranks printed, before and after the kills"),
        (f"{argosy_here()} ps --all", "all runs"),
    ]
    width = max(len(command) for command, _ in rows)
    return "\n".join(f"  {command:<{width}}   {what}" for command, what in rows)


def main() -> int:
    name, stories = time.strftime("demo-%m%d-%H%M%S"), list[Story]()
    print(INTRODUCTION)
    try:
        for title, run, kills in [("Undisturbed", f"{name}-calm", {}), ("With kills", name, KILLS)]:
            print(f"{len(stories) + 1}. {title}\n")
            code, story = train(run, kills)
            if code or len(story.killed) < len(kills) or not story.weights:
                print(f"\nthe demo failed: argosy run ended with exit code {code} at step {story.step}")
                print(f"hint: {argosy_here()} why {run}")
                return code or 1
            stories.append(story)
            print()
    except KeyboardInterrupt:
        return 130
    calm, story = stories
    print(f"Result\n\n{table(name, story, calm)}\n\nNext\n\n{next_commands()}")
    return 0 if calm.weights == story.weights else 1


if __name__ == "__main__":
    sys.exit(main())
