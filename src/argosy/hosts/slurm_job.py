"""Ask Slurm for an allocation: the batch script of a run, its submission, and where the job stands.

The script runs `argosy run` on the job's first node, which is then the head. Slurm tells it, and it alone, before the
job's time is up; `scancel`, preemption and requeueing send it the same signal.
"""

import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from argosy.core import ConfigError
from argosy.hosts.slurm import ask_slurm, show

WARN_S = 120
"""How long before the time limit the run begins to save and to end."""
SCRIPT, OUT, ERR = "slurm.sh", "slurm.out", "slurm.err"
OVER = frozenset(
    (
        *("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED"),
        *("OUT_OF_MEMORY", "DEADLINE", "BOOT_FAIL", "REVOKED"),
    )
)
SHARES = ("exclusive", "oversubscribe", "cpus-per-task", "mem", "mem-per-cpu")
"""Options that say which part of a node the job takes; without one it takes whole nodes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchJob:
    """What the script is made of."""

    name: str
    directory: Path
    nodes: int
    options: dict[str, str]
    """Of `sbatch`, without their dashes; they win over ours."""
    words: Sequence[str]
    """The arguments of `argosy run` in the job."""
    cwd: str


@dataclass(frozen=True, slots=True)
class JobStatus:
    """Where a job stands."""

    state: str
    reason: str = ""
    nodes: str = ""
    code: int = 0
    restarts: int = 0

    @property
    def is_over(self) -> bool:
        return self.state in OVER

    def __str__(self) -> str:
        if self.state == "PENDING":
            return f"is pending ({self.reason})" + (f", requeued {self.restarts} times" if self.restarts else "")
        return f"is {self.state.lower()}" + (f" on {self.nodes}" if self.state == "RUNNING" else "")


def parse_options(text: str) -> dict[str, str]:
    """The options of `sbatch` in `--on slurm:partition=gpu,time=60`.

    Raises:
        ConfigError: this is something else.
    """
    options: dict[str, str] = {}
    for part in text.split(",") if text else ():
        key, equals, value = part.partition("=")
        if not key.strip() or not key.replace("-", "").isalnum() or (equals and not value) or "\n" in value:
            raise ConfigError(f"not an option of sbatch: {part!r}", hint="--on slurm:partition=gpu,time=60")
        options[key.strip()] = value
    return options


def batch_script(job: BatchJob) -> str:
    """The script, ready for `sbatch`."""
    plain = str(job.directory).replace("%", "%%")
    options = {
        "job-name": job.name,
        "nodes": str(job.nodes),
        "ntasks-per-node": "1",
        **({} if any(share in job.options for share in SHARES) else {"exclusive": ""}),
        "no-kill": "",
        "requeue": "",
        "open-mode": "append",
        "signal": f"B:TERM@{WARN_S}",
        "output": f"{plain}/{OUT}",
        "error": f"{plain}/{ERR}",
        **job.options,
    }
    lines = [f"#SBATCH --{key}" + (f"={_quoted(value)}" if value else "") for key, value in options.items()]
    start = [sys.executable, "-m", "argosy", "run", *job.words]
    commands = ["unset ARGOSY_RUNTIME_DIR", f"cd {shlex.quote(job.cwd)} || exit 1", f"exec {shlex.join(start)}"]
    return "\n".join(["#!/bin/bash", *lines, *commands, ""])


def _quoted(value: str) -> str:
    return f'"{value}"' if any(letter in value for letter in " \t#") else value


def submit_script(script: Path) -> str:
    """Hand a script to Slurm; returns the number of the job.

    Raises:
        ConfigError: Slurm refuses it.
    """
    return ask_slurm("sbatch", "--parsable", str(script)).strip().partition(";")[0]


def job_status(number: str) -> JobStatus | None:
    """Where a job stands; None if Slurm has forgotten it.

    Raises:
        ConfigError: Slurm cannot be asked.
    """
    try:
        job = show("job", number)
    except ConfigError as error:
        if "Invalid job id" in str(error):
            return None
        raise
    code, _, signal = job.get("ExitCode", "0:0").partition(":")
    ended = int(code) or (128 + int(signal) if signal.isdecimal() and int(signal) else 0)
    return JobStatus(job["JobState"], job.get("Reason", ""), job.get("NodeList", ""), ended, int(job["Restarts"]))


def cancel_job(number: str, signal: str = "") -> None:
    """End a job, or send its batch script a signal.

    Raises:
        ConfigError: Slurm refuses.
    """
    ask_slurm("scancel", *(("--batch", f"--signal={signal}") if signal else ()), number)
