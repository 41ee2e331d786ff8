"""The nodes of a Slurm allocation. One job step per node runs the agent there; the end of the step is Slurm's word.

Everything on a node is in the cgroup of its step and ends with it. Who asks for an allocation is in slurm_job.py.
"""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

from argosy.core import ConfigError
from argosy.hosts.engines import HostProcess, route_to, start_process

ANSWER_S = 10.0
HURRY_S = 2.0
INTERACTIVE_STEP = "4294967290"
"""The id of the step in which `salloc` runs a shell."""
STEP = (
    *("srun", "--overlap", "--nodes=1", "--ntasks=1", "--mem=0", "--cpu-bind=none"),
    *("--export=ALL", "--input=0", "--quiet"),
)
OF_THE_JOB = (
    *("SLURM_NTASKS", "SLURM_NPROCS", "SLURM_NTASKS_PER_NODE", "SLURM_TASKS_PER_NODE", "SLURM_NNODES"),
    *("SLURM_CPUS_PER_TASK", "SLURM_TRES_PER_TASK", "SLURM_DISTRIBUTION", "SLURM_JOB_NUM_NODES"),
    *("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_GPU", "SLURM_MEM_PER_NODE", "ARGOSY_RUNTIME_DIR"),
)
"""Variables that say how the whole job is laid out: `srun` would apply them to a step of one task."""


def in_allocation(environment: Mapping[str, str]) -> bool:
    """Whether this process commands a Slurm allocation: its batch script, or the shell of `salloc`.

    A task that `srun` started is one of several, and commands nothing.
    """
    step = environment.get("SLURM_STEP_ID")
    return "SLURM_JOB_ID" in environment and "SLURM_JOB_NODELIST" in environment and step in (None, INTERACTIVE_STEP)


class SlurmEngine:
    """The nodes of the allocation that this process is in."""

    def __init__(self) -> None:
        if "SLURM_JOB_NODELIST" not in os.environ:
            raise ConfigError("this is no Slurm allocation: SLURM_JOB_NODELIST is not set")
        self._job = os.environ["SLURM_JOB_ID"]
        self.names = ask_slurm("scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]).split()

    def open(self) -> str:
        here = os.environ.get("SLURMD_NODENAME")
        other = next((name for name in self.names if name != here), self.names[0])
        return route_to(_node(other).get("NodeAddr", other))

    def start(self, name: str, words: Sequence[str], ticket: bytes) -> HostProcess:
        return start_process(self._command(name, words), ticket)

    def _command(self, name: str, words: Sequence[str]) -> list[str]:
        cleared = [word for variable in OF_THE_JOB for word in ("-u", variable)]
        return ["env", *cleared, *STEP, f"--jobid={self._job}", f"--nodelist={name}", *words]

    def options(self, runtime: Path, name: str) -> list[str]:
        return []

    def reason(self, name: str, code: int) -> str:
        try:
            node = _node(name)
        except ConfigError:
            node = {}
        state = node.get("State", "")
        if any(word in state for word in ("DOWN", "FAIL", "NOT_RESPONDING")):
            return f"Slurm says that the node is {state}: {node.get('Reason', 'no reason given')}"
        return f"its job step ended ({code})"

    def close(self) -> None:
        pass


def reason_to_end(environment: Mapping[str, str]) -> str:
    """Why Slurm tells a job's batch script to end, as far as it says so; empty outside a job."""
    if not in_allocation(environment):
        return ""
    number = environment["SLURM_JOB_ID"]
    try:
        job = show("job", number, HURRY_S)
    except ConfigError:
        return f"Slurm, for job {number}"
    state = job.get("JobState", "")
    if state in ("RUNNING", "COMPLETING") and job.get("EndTime", "Unknown") != "Unknown":
        return f"Slurm: job {number} has to end at {job['EndTime']}"
    return f"Slurm: job {number} is {state.lower()}"


def requeue_preempted(environment: Mapping[str, str]) -> bool:
    """If Slurm preempts the job of this batch script, which has ended in time, have it started again later.

    Slurm itself requeues only jobs that it has to kill.
    """
    if not in_allocation(environment):
        return False
    number = environment["SLURM_JOB_ID"]
    try:
        job = show("job", number, HURRY_S)
        if job.get("PreemptTime", "None") in ("None", "Unknown") or job.get("Requeue") != "1":
            return False
        ask_slurm("scontrol", "requeue", number)
    except ConfigError:
        return False
    return True


def _node(name: str) -> dict[str, str]:
    return show("node", name)


def show(kind: str, name: str, answer_s: float = ANSWER_S) -> dict[str, str]:
    """What `scontrol` says of a node or a job: its fields by name.

    Raises:
        ConfigError: there is none, or Slurm cannot be asked.
    """
    fields: dict[str, str] = {}
    last = ""
    for word in ask_slurm("scontrol", "show", kind, "--oneliner", name, answer_s=answer_s).split():
        key, equals, value = word.partition("=")
        if equals and key[:1].isupper():
            last, fields[key] = key, value
        elif last:
            fields[last] += f" {word}"
    return fields


def ask_slurm(*words: str, answer_s: float = ANSWER_S) -> str:
    """What a command of Slurm's prints.

    Raises:
        ConfigError: it fails, or is not installed.
    """
    if shutil.which(words[0]) is None:
        raise ConfigError(f"Slurm is not installed here: there is no {words[0]}")
    try:
        asked = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=answer_s)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"Slurm does not answer within {answer_s:.0f} s: {' '.join(words)}") from None
    if asked.returncode:
        raise ConfigError(f"Slurm refuses: {asked.stderr.strip() or ' '.join(words)}")
    return asked.stdout
