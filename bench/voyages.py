"""Trainings of four ranks under each contender, for ever: how they are started, broken, and read.

What a contender did is read from the records of bench/scripts/stepping.py, which all of them write alike.
"""

import contextlib
import os
import random
import signal
import statistics
import struct
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import SCRIPTS, Live, Stage, free_port, torchrun_command
from harness import Failed
from peers import ROOT, python_of

SIZE = 4
UP_S = 300.0
BACK_S = 90.0
"""The cap on each try to come back."""
CALM_STEPS = 20
"""Made by all ranks before each kill: that long is a step when nothing happens."""
RECORD = struct.Struct("<dqd")
C10D = ["--rdzv-backend=c10d", "--local-addr=127.0.0.1", "--monitor-interval=0.01"]
OWN_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}


@dataclass(frozen=True, slots=True)
class Counted:
    """A step that counts, as one process saw it."""

    rank: int
    pid: int
    at: float
    step: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Killed:
    """What one SIGKILL cost."""

    whole_s: float
    """Until the replacement has made a step that nobody had made before."""
    next_s: float
    """Until any rank has: sooner where the others go on without it."""
    redone: int
    """Steps that another rank made twice."""
    calm_s: float
    """A step before the kill."""


@dataclass(frozen=True, slots=True)
class Voyage:
    """A training that runs."""

    command: Live
    home: Path

    def counted(self, since: float = 0.0) -> list[Counted]:
        """All steps that count so far, by time."""
        found: list[Counted] = []
        for path in self.home.glob("*.steps"):
            rank, pid, _ = path.name.split(".")
            content = path.read_bytes()
            whole = len(content) // RECORD.size * RECORD.size
            found += [Counted(int(rank), int(pid), *record) for record in RECORD.iter_unpack(content[:whole])]
        return sorted((each for each in found if each.at >= since), key=lambda each: each.at)

    def wait(self, enough: Callable[[], bool], deadline_s: float, what: str) -> None:
        end = time.monotonic() + deadline_s
        while not enough():
            if self.command.ended:
                raise Failed(f"ended, {what}: {self.command.last_word()}")
            if time.monotonic() > end:
                raise Failed(f"{what}: not within {deadline_s:g} s")
            time.sleep(0.02)

    def wait_calm(self, deadline_s: float) -> list[Counted]:
        """Wait until all ranks made some steps together; returns these."""
        since = time.time()

        def calm() -> bool:
            found = self.counted(since)
            return all(sum(each.rank == rank for each in found) >= CALM_STEPS for rank in range(SIZE))

        self.wait(calm, deadline_s, f"{CALM_STEPS} steps of {SIZE} ranks")
        return self.counted(since)

    def kill(self, rank: int) -> tuple[int, float]:
        """SIGKILL the newest process of a rank that made steps; returns it and the time."""
        pid = [each.pid for each in self.counted() if each.rank == rank][-1]
        if not self._is_there(rank, pid):
            raise Failed(f"rank {rank} was not back")
        at = time.time()
        os.kill(pid, signal.SIGKILL)
        return pid, at

    def _is_there(self, rank: int, pid: int) -> bool:
        """Whether this is still the process that writes the record: once it is gone the number may be anybody's."""
        record = str(self.home / f"{rank}.{pid}.steps")
        with contextlib.suppress(OSError):
            return any(os.readlink(link) == record for link in Path(f"/proc/{pid}/fd").iterdir())
        return False

    def kill_and_wait(self, rank: int, pause_s: float) -> Killed:
        calm = self.wait_calm(UP_S)
        time.sleep(pause_s)
        redone = self.redone_by_others(rank)
        pid, at = self.kill(rank)
        before = max(each.step for each in self.counted() if each.at <= at)

        def replaced() -> list[Counted]:
            return [e for e in self.counted(at) if e.rank == rank and e.pid != pid and e.step > before]

        self.wait(lambda: bool(replaced()), BACK_S, f"rank {rank} back")
        seconds = replaced()[0].at - at
        calm_s = statistics.median(each.seconds for each in calm)
        # What others had decided together with the lost rank may be recorded a moment later: it is no news.
        news = [
            each.at - at
            for each in self.counted(at)
            if each.rank != rank and (each.step > before + 1 or (each.step > before and each.at - at > calm_s))
        ]
        return Killed(seconds, min([*news, seconds]), self.redone_by_others(rank) - redone, calm_s)

    def redone_by_others(self, rank: int) -> int:
        """How many steps some other rank made twice until now."""
        steps: dict[int, list[int]] = {}
        for each in self.counted():
            if each.rank != rank:
                steps.setdefault(each.rank, []).append(each.step)
        return max((len(made) - len(set(made)) for made in steps.values()), default=0)


def kill_in_turn(voyage: Voyage, victims: Sequence[int], seed: int) -> list[Killed | Failed]:
    """Kill one rank after another, at any point between two saves; a lost try ends the series."""
    found: list[Killed | Failed] = []
    pauses = random.Random(seed)
    for rank in victims:
        try:
            found.append(voyage.kill_and_wait(rank, pauses.random()))
        except Failed as failed:
            return [*found, failed]
    return found


@contextlib.contextmanager
def open_stage() -> Generator[Stage]:
    """A stage on which all trainings find the model, and compiled code is kept as long as it lasts."""
    with Stage() as stage:
        os.environ["PYTHONPATH"] = str(ROOT / "examples")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(stage.root / "inductor")
        yield stage


@contextlib.contextmanager
def argosy_voyage(stage: Stage, *how: str, collectives: str = "") -> Generator[Voyage]:
    """`collectives="gloo"`: through Gloo although all ranks share a host."""
    home, run_dir = stage.new_dir(), stage.new_dir()
    words = ["run", "-n", str(SIZE), "--dir", str(run_dir), str(SCRIPTS / "train_argosy.py"), str(home), *how]
    with stage.argosy(*words, extra={"ARGOSY_COLLECTIVES": collectives}) as command:
        yield Voyage(command, home)


@contextlib.contextmanager
def torchrun_voyage(stage: Stage, save_every: int, *, best: bool) -> Generator[Voyage]:
    home = stage.new_dir()
    port = free_port()
    where = [f"--rdzv-endpoint=127.0.0.1:{port}", *C10D] if best else []
    where = where or ["--master-addr=127.0.0.1", f"--master-port={port}"]
    script = [str(SCRIPTS / "train_torchrun.py"), str(home), str(save_every)]
    argv = torchrun_command(SIZE, *script, flags=[*where, "--max-restarts=1000"])
    with stage.live(argv, OWN_STORE if best else None) as command:
        yield Voyage(command, home)


@contextlib.contextmanager
def lightning_voyage(stage: Stage, save_every: int) -> Generator[Voyage]:
    """Started, and started again, by torchrun at its best: Lightning restarts nothing itself."""
    home, python = stage.new_dir(), python_of("lightning")
    script = [str(SCRIPTS / "train_lightning.py"), str(home), str(save_every)]
    where = [f"--rdzv-endpoint=127.0.0.1:{free_port()}", *C10D, "--max-restarts=1000"]
    argv = [python, *torchrun_command(SIZE, *script, flags=where)[1:]]
    with stage.live(argv, OWN_STORE) as command:
        yield Voyage(command, home)


@contextlib.contextmanager
def torchft_voyage(stage: Stage, *, best: bool) -> Generator[Voyage]:
    """A lighthouse, and replicas each of which a shell starts again at once."""
    home, python, port = stage.new_dir(), python_of("torchft"), free_port()
    flags = "--join_timeout_ms 1000 --quorum_tick_ms 10 --heartbeat_timeout_ms 1000" if best else ""
    lighthouse = f"{Path(python).with_name('torchft_lighthouse')} --bind 127.0.0.1:{port} --min_replicas 1 {flags}"
    replica = f"{python} {SCRIPTS / 'train_torchft.py'} {home}"
    loops = f"for r in {' '.join(map(str, range(SIZE)))}; do (while :; do REPLICA=$r {replica}; done) & done"
    extra = {"TORCHFT_LIGHTHOUSE": f"http://127.0.0.1:{port}"}
    with stage.live(["sh", "-c", f"{lighthouse} & sleep 1; {loops}; wait"], extra) as command:
        yield Voyage(command, home)
