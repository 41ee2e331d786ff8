"""Ranks that run under a launcher and tell of themselves, so that a bench can break them and see them return."""

import contextlib
from collections.abc import Generator
from dataclasses import dataclass
from pathlib import Path

from contenders import SCRIPTS, Live, Stage, free_port, torchrun_command, wait_until
from harness import Failed

KINDS = {"bare": ["bare_steady.py"], "alone": ["steady.py", "alone"], "gloo": ["steady.py", "gloo"]}
"""Script and argument of each kind of rank; the directory goes between them."""


@dataclass(frozen=True, slots=True)
class Told:
    """One rank's word that it is ready, or made its first step."""

    rank: int
    pid: int
    at: float


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of a running command, as they told of themselves in a directory."""

    command: Live
    home: Path
    size: int
    run_dir: Path

    def told(self, what: str) -> list[Told]:
        said: list[Told] = []
        for path in self.home.glob(f"*.{what}"):
            rank, pid, _ = path.name.split(".")
            said.append(Told(int(rank), int(pid), float(path.read_text())))
        return sorted(said, key=lambda told: told.at)

    def now(self, what: str) -> dict[int, Told]:
        """The latest word of each rank whose process is there."""
        return {told.rank: told for told in self.told(what) if Path(f"/proc/{told.pid}").exists()}

    def wait_all(self, what: str, deadline_s: float, but: frozenset[int] = frozenset()) -> dict[int, Told]:
        """Wait until all ranks told, by processes other than `but`."""

        def all_told() -> bool:
            if self.command.ended:
                raise Failed(f"the launcher ended: {self.command.last_word()}")
            now = self.now(what)
            return len(now) == self.size and not but & {told.pid for told in now.values()}

        wait_until(all_told, deadline_s, f"{self.size} ranks {what}", every_s=0.01)
        return self.now(what)


def _script(kind: str, home: Path) -> list[str]:
    name, *args = KINDS[kind]
    return [str(SCRIPTS / name), str(home), *args]


@contextlib.contextmanager
def argosy_ranks(stage: Stage, size: int, kind: str, *flags: str) -> Generator[Ranks]:
    home, run_dir = stage.new_dir(), stage.new_dir()
    with stage.argosy("run", "-n", str(size), "--dir", str(run_dir), *flags, *_script(kind, home)) as command:
        yield Ranks(command, home, size, run_dir)


@contextlib.contextmanager
def torchrun_ranks(
    stage: Stage, size: int, kind: str, *flags: str, extra: dict[str, str] | None = None
) -> Generator[Ranks]:
    home = stage.new_dir()
    endpoint = [f"--rdzv-endpoint=127.0.0.1:{free_port()}"] if any("c10d" in flag for flag in flags) else []
    where = [] if endpoint else ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    argv = torchrun_command(size, *_script(kind, home), flags=[*where, *endpoint, *flags])
    with stage.live(argv, extra) as command:
        yield Ranks(command, home, size, home)
