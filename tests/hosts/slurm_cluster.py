"""A real Slurm on this machine: slurmctld and four slurmd, with their own munge, ports and directories."""

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from console import Console, until

from argosy.supervise import clear_host

TOOLS = ("munged", "slurmctld", "slurmd", "sbatch")
FREEZER = Path("/sys/fs/cgroup/freezer")
CONF = """
ClusterName={name}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={place}/munge.sock,cred_expire=5
StateSaveLocation={place}/state
SlurmdSpoolDir={place}/spool-%n
SlurmctldPidFile={place}/slurmctld.pid
SlurmdPidFile={place}/slurmd-%n.pid
ProctrackType=proctrack/{tracking}
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2
ReturnToService=1
KillWait=60
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
NodeName={name}n[1-4] NodeHostName={host} NodeAddr=127.0.0.1 Port=[{ports}] CPUs=16 RealMemory=4000 State=UNKNOWN
PartitionName=usual Nodes=ALL Default=YES PriorityTier=1 GraceTime=60
PartitionName=urgent Nodes=ALL PriorityTier=2
"""


class SlurmCluster:
    """Its four nodes are called `<name>n1` to `<name>n4`."""

    def __init__(self, place: Path) -> None:
        self.place, self.name = place, f"t{os.getpid()}"
        self.nodes = [f"{self.name}n{number}" for number in range(1, 5)]
        self.env = {"SLURM_CONF": str(place / "slurm.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        for name in ("state", "log", *(f"spool-{node}" for node in self.nodes)):
            (self.place / name).mkdir(parents=True)
        key = self.place / "key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o600)
        first = _free_ports(5)
        tracking = "cgroup" if FREEZER.is_dir() else "linuxproc"
        conf = CONF.format(
            name=self.name,
            host=socket.gethostname().partition(".")[0],
            port=first,
            ports=f"{first + 1}-{first + 4}",
            place=self.place,
            tracking=tracking,
        )
        (self.place / "slurm.conf").write_text(conf)
        (self.place / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupMountpoint=/sys/fs/cgroup\n")
        names = {option: f"--{option}={self.place}/munge.{end}" for option, end in _MUNGE.items()}
        self._daemon("munged", "--foreground", "--force", f"--key-file={key}", *names.values())
        until(lambda: (self.place / "munge.sock").exists(), "munge")
        self._daemon("slurmctld", "-D", "-f", self.env["SLURM_CONF"])
        for node in self.nodes:
            self._daemon("slurmd", "-D", "-N", node, "-f", self.env["SLURM_CONF"])
        until(lambda: self.ask("sinfo", "-h", "-o", "%T").split() == ["idle"], "four idle nodes")

    def _daemon(self, *words: str) -> None:
        with (self.place / "log" / f"{words[0]}{len(self._daemons)}").open("wb") as out:
            self._daemons.append(
                subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env={**os.environ, **self.env}, cwd="/"
                )
            )

    def ask(self, *words: str) -> str:
        """What a command of Slurm's prints; nothing while its controller cannot answer."""
        return subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True).stdout.strip()

    def do(self, *words: str) -> str:
        ended = subprocess.run(words, env={**os.environ, **self.env}, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def state(self, job: str) -> str:
        """Of a job; empty once Slurm has forgotten it."""
        fields = self.ask("scontrol", "show", "job", "-o", job).split()
        return next((field.partition("=")[2] for field in fields if field.startswith("JobState=")), "")

    def wait_for(self, job: str, *states: str) -> None:
        until(lambda: self.state(job) in states, f"job {job} {' or '.join(states)}")

    def processes(self, node: str | None = None) -> list[int]:
        """What lives in the cgroups of jobs on a node, or on all."""
        found: list[int] = []
        for name in [node] if node else self.nodes:
            for procs in (FREEZER / f"slurm_{name}").glob("uid_*/job_*/**/cgroup.procs"):
                with suppress(OSError):
                    found += map(int, procs.read_text().split())
        return found

    def check_nothing_is_left(self, job: str, lost: str = "") -> None:
        """No process of the job on any node; none of Argosy's files of it either, but on a node that was lost."""
        until(lambda: self.state(job) not in ("RUNNING", "COMPLETING"), f"the end of job {job}")
        until(lambda: not self.processes(), "nodes without processes")
        home = Path(f"/tmp/argosy-{os.getuid()}")
        assert list(home.glob(f"{job}-*")) + list(home.glob(f"{job}.*-*")) == []
        left = [path for node in self.nodes for path in home.glob(f"*.{node}")]
        for path in [path for path in left if lost and path.name.endswith(f".{lost}")]:
            clear_host(path)
        assert [path for path in left if path.exists()] == []

    def end(self) -> None:
        self.ask("scancel", "--signal=KILL", "--partition=usual,urgent")
        self.ask("scancel", "--user=root")
        with suppress(AssertionError):
            until(lambda: not self.ask("squeue", "-h"), "an empty queue", 90.0)
        for daemon in reversed(self._daemons):
            daemon.send_signal(signal.SIGTERM)
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                daemon.kill()
                daemon.wait()
        for node in self.nodes:
            for folder in sorted((FREEZER / f"slurm_{node}").glob("**/"), reverse=True):
                with suppress(OSError):
                    folder.rmdir()


_MUNGE = {"socket": "sock", "pid-file": "pid", "log-file": "log", "seed-file": "seed"}


def _free_ports(count: int) -> int:
    """The first of some ports in a row that are free; the kernel hands out none of these by itself."""
    top = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for first in range(top - 2000 - os.getpid() % 997, 1024, -count):
        try:
            for port in range(first, first + count):
                with socket.create_server(("127.0.0.1", port)):
                    pass
        except OSError:
            continue
        return first
    raise AssertionError("no free ports")


@contextmanager
def slurm_cluster(place: Path) -> Generator[SlurmCluster]:
    """Start it, and end all of it; the test is skipped where Slurm is not installed or this is not root."""
    if os.geteuid() != 0 or not all(shutil.which(tool, path=f"{os.environ['PATH']}:/usr/sbin") for tool in TOOLS):
        pytest.skip("a Slurm of the test's own needs root and the packages slurm-wlm and munge")
    cluster = SlurmCluster(place)
    try:
        cluster.start()
        yield cluster
    finally:
        cluster.end()


class Submitted:
    """One `argosy run --on slurm`, whose job is followed by its number."""

    def __init__(self, cluster: SlurmCluster, console: Console, name: str) -> None:
        self.cluster, self.console, self.name = cluster, console, name
        self.directory = console.cwd / "runs" / name
        self.out = console.cwd / f"{name}.out"
        console.env |= cluster.env

    def start(self, *words: str) -> "subprocess.Popen[bytes]":
        return self.console.start("run", "--dir", str(self.directory), *words, out=self.out)

    @property
    def text(self) -> str:
        return self.out.read_text() if self.out.exists() else ""

    @property
    def job(self) -> str:
        until(lambda: "argosy: job " in self.text, "the number of a job")
        return self.text.partition("argosy: job ")[2].split()[0]

    def wait_for(self, text: str) -> None:
        """Until the run has said this; if the job is over before, what it said is shown."""
        over = ("is completed", "is failed", "is cancelled", "is timeout")
        until(lambda: text in self.text or any(word in self.text for word in over), f"{text!r} from {self.name}")
        assert text in self.text, self.text
