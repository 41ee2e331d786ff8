"""Read what a run recorded: its directory alone is enough, on any machine.

Damage is named, never raised: a run with a torn file opens with what can be read.
"""

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from argosy.control import LaunchEnded, LaunchStarted, RankExited, RankStarted
from argosy.observe import Columns, Damage, follow, metrics_directory, read_frames
from argosy.supervise import RunRecord, read_facts, read_record


@dataclass(slots=True)
class ProcessRecords:
    """The spans of one process of a rank. Times are in ns since the epoch, by one offset for the whole process."""

    rank: int
    generation: int
    names: list[str]
    columns: Columns
    lost: int = 0

    def ids(self, names: Iterable[str]) -> list[int]:
        """The numbers of these names, as far as they were used."""
        return [number for number, name in enumerate(self.names) if name in names]


@dataclass(slots=True)
class ProcessLife:
    """One process of a slot, in ns since the epoch by the agent's clock."""

    rank: int
    generation: int
    begin: int
    end: int
    ok: bool = True
    """False if it failed or was killed."""
    how: str = ""


@dataclass(slots=True)
class Group:
    """A process group as one rank knows it."""

    number: int
    name: str
    size: int
    members: tuple[int, ...]


@dataclass(slots=True)
class LaunchData:
    """Everything recorded in one launch."""

    number: int
    size: int
    begin: int
    end: int
    ended: bool
    lives: list[ProcessLife] = field(default_factory=list[ProcessLife])
    processes: dict[tuple[int, int], ProcessRecords] = field(default_factory=dict[tuple[int, int], ProcessRecords])
    groups: dict[tuple[int, int], dict[int, Group]] = field(default_factory=dict[tuple[int, int], dict[int, Group]])
    journal: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    samples: dict[str, Columns] = field(default_factory=dict[str, Columns])


@dataclass(slots=True)
class RunData:
    """A run and its launches, oldest first."""

    directory: Path
    record: RunRecord
    launches: list[LaunchData]
    scalars: list[tuple[int, float, dict[str, float]]]
    """Step, time and values, in order of their steps."""
    damage: list[str]


def load_run(directory: Path, now: float) -> RunData:
    """Read a run's directory; `now` ends what is still running.

    Raises:
        ConfigError: the directory holds no run.
    """
    record, damage = read_record(directory), list[str]()
    launches = _launches(read_facts(directory), record, now)
    for launch in launches:
        for folder, ahead_ns in metrics_folders(directory, launch.number):
            _read_spans(folder, launch, damage, ahead_ns)
            _read_journals(folder, launch, damage)
            _read_samples(folder, launch, damage, ahead_ns)
    scalars = _scalars(directory, launches, damage)
    return RunData(directory, record, launches, scalars, damage)


def metrics_folders(directory: Path, launch: int) -> list[tuple[Path, int]]:
    """Where the records of a launch are: the run's own, then those of its hosts; and how far their clocks are ahead."""
    found = [(metrics_directory(directory, launch), 0)]
    for host in sorted(directory.glob("hosts/*")):
        ahead_s = 0.0
        with contextlib.suppress(OSError, msgspec.MsgspecError):
            ahead_s = msgspec.json.decode((host / "clock.json").read_bytes(), type=dict[str, float])["ahead_s"]
        found.append((metrics_directory(host, launch), int(ahead_s * 1e9)))
    return found


def _launches(facts: Sequence[Any], record: RunRecord, now: float) -> list[LaunchData]:
    launches: list[LaunchData] = []
    open_lives: dict[tuple[int, int], ProcessLife] = {}

    def close(at: int) -> None:
        for life in open_lives.values():
            life.end = at
        open_lives.clear()

    for fact in facts:
        at = int(fact.at * 1e9)
        if isinstance(fact, LaunchStarted):
            close(at)
            launches.append(LaunchData(fact.launch, fact.size, at, at, ended=False))
        elif not launches:
            continue
        elif isinstance(fact, RankStarted):
            life = ProcessLife(fact.rank.index, fact.rank.generation, at, at)
            open_lives[life.rank, life.generation] = life
            launches[-1].lives.append(life)
        elif isinstance(fact, RankExited):
            life = open_lives.pop((fact.rank.index, fact.rank.generation), None)
            if life is not None:
                life.end, life.ok, life.how = at, fact.status.ok or fact.asked, str(fact.oom or fact.status)
        elif isinstance(fact, LaunchEnded):
            close(at)
            launches[-1].ended = True
        launches[-1].end = max(launches[-1].end, at)
    if launches and not launches[-1].ended:
        end = int((record.ended_at or now) * 1e9)
        launches[-1].end = max(launches[-1].end, end)
        close(launches[-1].end)
    return launches


def _read_spans(folder: Path, launch: LaunchData, damage: list[str], ahead_ns: int) -> None:
    parts: dict[tuple[int, int], list[Columns]] = {}
    offsets: dict[tuple[int, int], int] = {}
    for item in read_frames(folder / "spans"):
        if isinstance(item, Damage):
            damage.append(f"{folder / 'spans'}: {item}")
            continue
        frame, columns = item
        about = frame.about
        key = about["rank"], about["generation"]
        process = launch.processes.get(key)
        if process is None:
            process = launch.processes[key] = ProcessRecords(*key, [], {})
        process.lost += about["lost"]
        process.names[about["first_name"] :] = about["names"]
        offset = offsets.setdefault(key, about["wall"] - about["monotonic"] - ahead_ns)
        parts.setdefault(key, []).append({**columns, "time": columns["time"] + offset})
    for key, found in parts.items():
        process = launch.processes[key]
        process.columns = {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        if process.lost:
            damage.append(f"rank {key[0]}: {process.lost} span records were overwritten before they were read")


def _read_journals(folder: Path, launch: LaunchData, damage: list[str]) -> None:
    for path in sorted(folder.glob("*.journal")):
        rank, generation = (int(part) for part in path.name.split(".")[:2])
        for entry in _entries(path, damage):
            entry.update(rank=rank, generation=generation)
            if entry.get("kind") == "group":
                members = entry.get("members") or range(*(entry.get("span") or [0, entry["size"], 1]))
                group = Group(entry["number"], entry["name"], entry["size"], tuple(members))
                launch.groups.setdefault((rank, generation), {})[group.number & 0xFF] = group
            else:
                launch.journal.append(entry)


def _entries(path: Path, damage: list[str]) -> Iterable[dict[str, Any]]:
    """The maps of a journal; what cannot be read is named."""
    try:
        for item in follow(path):
            if isinstance(item, Damage):
                damage.append(f"{path}: {item}")
                continue
            with contextlib.suppress(msgspec.MsgspecError):
                entry = msgspec.msgpack.decode(item.record)
                if isinstance(entry, dict):
                    yield entry
    except OSError as error:
        if not isinstance(error, FileNotFoundError):
            damage.append(f"{path}: {error.strerror}")


def _read_samples(folder: Path, launch: LaunchData, damage: list[str], ahead_ns: int) -> None:
    parts = {what: [columns] for what, columns in launch.samples.items()}  # Of other hosts.
    for item in read_frames(folder / "samples"):
        if isinstance(item, Damage):
            damage.append(f"{folder / 'samples'}: {item}")
            continue
        frame, columns = item
        offset = frame.about["wall"] - frame.about["monotonic"] - ahead_ns
        parts.setdefault(frame.what, []).append({**columns, "time": columns["time"] + offset})
    launch.samples = {
        what: {name: np.concatenate([part[name] for part in found]) for name in found[0]}
        for what, found in parts.items()
    }


def _scalars(
    directory: Path, launches: Sequence[LaunchData], damage: list[str]
) -> list[tuple[int, float, dict[str, float]]]:
    """What `run.log` wrote, after rollbacks; and what was mirrored from other loggers by the first rank that logs."""
    rows: dict[int, tuple[int, float, dict[str, float]]] = {}
    for entry in _entries(directory / "metrics" / "log", damage):
        step, at = int(entry["step"]), float(entry["at"])
        if entry.get("type") == "back":
            rows = {key: row for key, row in rows.items() if key <= step}
        else:
            before = rows.get(step, (step, at, {}))[2]
            rows[step] = step, at, {**before, **entry["values"]}
    for launch in launches:
        for entry in launch.journal:
            if entry.get("kind") == "scalar":
                step = int(entry.get("step", -1))
                before = rows.get(step, (step, 0.0, {}))[2]
                rows[step] = step, float(entry["at"]), {**before, entry["name"]: entry["value"]}
    return [rows[step] for step in sorted(rows)]
