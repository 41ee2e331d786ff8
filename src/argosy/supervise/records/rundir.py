"""A run's directory: `run.json`, the journal of facts, logs, incidents; and the index that finds runs by name.

One writer, the agent. The directory may be on NFS: no mmap, no lock, no socket in it.
"""

import contextlib
import errno
import hashlib
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from argosy.control import AnyFact, Launch, LaunchStarted, RankStarted
from argosy.core import ConfigError, RankId
from argosy.fabric import runtime_dir, state_dir
from argosy.supervise.records.owner import Owner, is_elsewhere, read_owner
from argosy.supervise.records.retrying_journal import RetryingJournal, read_records

_fact_decoder = msgspec.msgpack.Decoder(AnyFact)


class RunRecord(msgspec.Struct, kw_only=True):
    """What `run.json` holds."""

    format: int = 1
    name: str
    argv: list[str]
    cwd: str
    size: int
    host: str
    launch: int
    state: Literal["running", "ended"]
    code: int | None = None
    reason: str = ""
    logs: str = ""
    """Where the output of this launch is, if not in the directory."""
    named: bool = True
    """The command line named the directory."""
    managed: bool = False
    """`argosy.Run` owned the step loop: the next launch resumes."""
    steps: int = 0
    """How far rank 0 came, as far as it could be seen."""
    started_at: float
    ended_at: float | None = None


def absent(*paths: Path) -> list[Path]:
    """Those of `paths` and their parents that do not exist, innermost first."""
    found = {each for path in paths for each in (path, *path.parents) if not each.exists()}
    return sorted(found, key=lambda each: -len(each.parts))


def write_atomically(path: Path, content: bytes, *, sync: bool = False) -> None:
    """Replace the file at once; readers see the old or the new one. With `sync` also after a power cut."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with open(temporary, "wb", buffering=0) as file:
            file.write(content)
            if sync:
                os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def overwrite(path: Path, content: bytes) -> None:
    """Write into the blocks that the file has: for a full disk.

    Raises:
        OSError: there is no such file, or it has too few.
    """
    with path.open("r+b", buffering=0) as file:
        if len(content) > os.fstat(file.fileno()).st_blocks * 512:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        file.write(content)
        file.truncate()


def run_id(directory: Path, launch: int) -> str:
    """A short name for one launch, unique on this host."""
    return f"{hashlib.blake2s(os.fsencode(directory), digest_size=4).hexdigest()}-{launch}"


class RunDir:
    """The writing end of a run's directory."""

    def __init__(self, directory: Path) -> None:
        self.path = directory
        self._journal = RetryingJournal(directory / "events")
        self._record_trouble = ""

    @property
    def trouble(self) -> str:
        """Why the journal or run.json could not be written; "" if they are. The run continues."""
        return self._journal.trouble or self._record_trouble

    def claim(self, owner: Owner, is_live: "Sequence[str]") -> None:
        """Become the directory's owner.

        Raises:
            ConfigError: another launch works on it; `is_live` names this host's living runs.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        for _ in range(2):
            try:
                fd = os.open(self.path / "owner.json", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
            except FileExistsError:
                self._refuse_if_live(owner, is_live)
                (self.path / "owner.json").unlink(missing_ok=True)
                continue
            try:
                os.write(fd, msgspec.json.encode(owner))
            finally:
                os.close(fd)
            return
        raise ConfigError(f"another launch took the directory just now: {self.path}")

    def _refuse_if_live(self, owner: Owner, is_live: Sequence[str]) -> None:
        other, runtime = read_owner(self.path), Path(owner.runtime)
        if other is None or owner.follows(other):
            return
        if other.run in is_live or is_elsewhere(other, runtime):
            stop = other.command(f"stop {self.path.name}", runtime)
            raise ConfigError(
                f"another launch works on this directory: {self.path}",
                hint=f"it runs on {other.host}; stop it with `{stop}`, or use another --dir",
            )

    def release(self, run: str) -> None:
        """Let the next launch have the directory, unless it has it."""
        owner = read_owner(self.path)
        if owner is not None and owner.run == run:
            with contextlib.suppress(OSError):
                (self.path / "owner.json").unlink()

    def write_record(self, record: RunRecord) -> None:
        """Replace run.json, unless it is of a later launch."""
        with contextlib.suppress(ConfigError):
            if read_record(self.path).launch > record.launch:
                return
        path, content = self.path / "run.json", msgspec.json.format(msgspec.json.encode(record), indent=2)
        self._record_trouble = ""
        try:
            write_atomically(path, content)
        except OSError as error:
            try:
                overwrite(path, content)
            except OSError:
                self._record_trouble = f"{error.strerror}: {path}"

    def record(self, fact: AnyFact) -> None:
        """Append one fact to the journal; without room for it, later."""
        self._journal.append(msgspec.msgpack.encode(fact))

    def retry(self) -> None:
        """Write the facts that there was no room for."""
        self._journal.retry()

    def close(self) -> None:
        self._journal.close()


def read_record(directory: Path) -> RunRecord:
    """Read run.json.

    Raises:
        ConfigError: the directory holds no run.
    """
    try:
        return msgspec.json.decode((directory / "run.json").read_bytes(), type=RunRecord)
    except OSError:
        raise ConfigError(f"not a run's directory: {directory}") from None
    except msgspec.MsgspecError as error:
        raise ConfigError(f"run.json cannot be read: {directory}: {error}") from None


def read_facts(directory: Path) -> list[AnyFact]:
    """All facts of a run, oldest first; records of unknown kinds are passed over."""
    facts: list[AnyFact] = []
    for payload in read_records(directory / "events"):
        with contextlib.suppress(msgspec.MsgspecError):
            facts.append(_fact_decoder.decode(payload))
    return facts


def facts_of_launch(directory: Path, launch: int) -> list[AnyFact]:
    """The facts of one launch, oldest first."""
    found: list[AnyFact] = []
    current = 0
    for fact in read_facts(directory):
        current = fact.launch if isinstance(fact, LaunchStarted) else current
        if current == launch:
            found.append(fact)
    return found


def started_ranks(directory: Path, launch: int) -> list[RankId]:
    """The ranks of a launch that have started, in all their generations."""
    return [fact.rank for fact in facts_of_launch(directory, launch) if isinstance(fact, RankStarted)]


def logs_directory(directory: Path, launch: int) -> Path:
    """Where the ranks of a launch write."""
    record = read_record(directory)
    return Path(record.logs) if record.logs and record.launch == launch else directory / "logs" / str(launch)


def next_launch(directory: Path) -> int:
    """The number of the launch that comes now, from 1."""
    with contextlib.suppress(ConfigError):
        return read_record(directory).launch + 1
    return 1


def default_name(launch_target: str, now: float | None = None) -> str:
    """`train-20261115-213045`."""
    stem = Path(launch_target).stem[:100] or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S', time.localtime(now))}"


def free_directory(directory: Path) -> Path:
    """The first of `train-x`, `train-x-2`, `train-x-3`... that does not exist."""
    number, free = 2, directory
    while free.exists():
        free = directory.with_name(f"{directory.name}-{number}")
        number += 1
    return free


def index_run(directory: Path, name: str) -> None:
    """Remember where a run is; failing to is not fatal, the directory itself can still be named."""
    folder = state_dir() / "runs"
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        digest = hashlib.blake2s(os.fsencode(directory), digest_size=4).hexdigest()
        write_atomically(folder / f"{name}@{digest}", os.fsencode(directory))


def forget_run(directory: Path) -> None:
    """Remove a run from the index."""
    digest = hashlib.blake2s(os.fsencode(directory), digest_size=4).hexdigest()
    for entry in (state_dir() / "runs").glob(f"*@{digest}"):
        entry.unlink(missing_ok=True)


def indexed_runs() -> list[tuple[str, Path]]:
    """Names and directories of all runs that still exist, newest last."""
    found: list[tuple[float, str, Path]] = []
    with contextlib.suppress(OSError):
        for entry in (state_dir() / "runs").iterdir():
            directory = Path(os.fsdecode(entry.read_bytes()))
            if (directory / "run.json").exists():
                found.append((entry.stat().st_mtime, entry.name.rpartition("@")[0], directory))
    return [(name, directory) for _, name, directory in sorted(found)]


def find_run(text: str) -> Path:
    """Resolve a directory, a name, a unique prefix of one, or `last`: the newest that is not alive elsewhere.

    Raises:
        ConfigError: there is no such run, or several.
    """
    if text != "last" and (Path(text) / "run.json").exists():
        return Path(text).resolve()
    runs = indexed_runs()
    if text == "last":
        if not runs:
            raise ConfigError("there is no run yet", hint="start one: argosy run train.py")
        return next((directory for _, directory in reversed(runs) if not _is_elsewhere(directory)), runs[-1][1])
    exact = [directory for name, directory in runs if name == text]
    here = [directory for directory in exact if directory.is_relative_to(Path.cwd())]
    if len(here) == 1 or len(exact) == 1:
        return (here or exact)[0]
    if exact:
        places = ", ".join(str(directory) for directory in exact)
        raise ConfigError(f"{len(exact)} runs are called {text!r}: {places}", hint="give the directory of one")
    matches = [(name, directory) for name, directory in runs if name.startswith(text)]
    if not matches:
        raise ConfigError(f"no such run: {text}", hint="`argosy ps --all` lists the runs")
    if len(matches) > 1:
        names = ", ".join(name for name, _ in matches)
        raise ConfigError(
            f"{len(matches)} runs begin with {text!r}: {names}", hint="give more of the name; `last` is the newest run"
        )
    return matches[0][1]


def _is_elsewhere(directory: Path) -> bool:
    owner = read_owner(directory)
    return owner is not None and is_elsewhere(owner, runtime_dir())


def new_record(launch: Launch, number: int, now: float) -> RunRecord:
    """The record of a launch that begins."""
    return RunRecord(
        name=launch.name,
        argv=launch.argv,
        cwd=launch.cwd,
        size=launch.size,
        host=socket.gethostname(),
        launch=number,
        logs=launch.logs,
        named=not launch.fresh,
        state="running",
        started_at=now,
    )
