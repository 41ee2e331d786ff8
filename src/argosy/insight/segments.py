"""All records of a launch as Parquet files, made from its frames when somebody first asks; what is newer stays columns.

A manifest names the files that count and how far into the frames they reach. It is replaced in one step, so a reader
sees either the old set or the new one; files that were replaced stay for GRACE_S for those who read them.

P1  The frames are the truth: files that are missing, cut off or damaged are made again.
P2  Where nothing can be written, or another process writes, all records come from the frames.
"""

import fcntl
import os
import time
import zlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from argosy.observe import Columns, Damage, SpanKind, decode_frame, follow

ROWS_MIN, ROWS_MAX, FILES_MAX = 20_000, 2_000_000, 16
"""Of a file; fewer new rows stay in the tail. More files than FILES_MAX are joined."""
GRACE_S = 60.0
Write = Callable[[Columns | list[str], Path], None]
"""Makes a Parquet file of columns, or of other Parquet files."""


class _File(msgspec.Struct):
    name: str
    size: int
    checksum: int


class _Manifest(msgspec.Struct):
    """What has been converted."""

    offset: int = 0
    files: list[_File] = []
    names: dict[str, list[str]] = {}
    """Names of spans by `rank.generation`, as far as the files reach."""
    retired: list[tuple[str, float]] = []


class Records(msgspec.Struct):
    """Parquet files, and columns for what is newer."""

    files: list[str]
    tail: Columns | None


def records_of(spans: Path, launch: int, begin: int, write: Write) -> Records:
    """The records in a file of frames; `begin` is the time that counts as 0."""
    folder = spans.with_name("parquet")
    manifest = _read(folder)
    parts, offset, names = _convert(spans, manifest, launch, begin)
    rows = sum(len(part["time"]) for part in parts)
    if rows >= ROWS_MIN:
        with suppress(OSError), _locked(folder):  # P2
            if _read(folder).offset == manifest.offset:
                _append(folder, manifest, parts, write)
                manifest.offset, manifest.names, parts = offset, names, []
                _replace(folder, manifest, write)
    tail = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]} if parts else None
    return Records([str(folder / file.name) for file in manifest.files], tail)


def forget_damaged(spans: Path) -> bool:
    """If a file is not what was written, remove the manifest: the next reader makes all again (P1)."""
    folder = spans.with_name("parquet")
    damaged = any(_checksum(folder / file.name) != file.checksum for file in _read(folder).files)
    if damaged:
        (folder / "manifest.json").unlink(missing_ok=True)
    return damaged


def _checksum(path: Path) -> int:
    found = 0
    with open(path, "rb") as file:
        while part := file.read(1 << 20):
            found = zlib.crc32(part, found)
    return found


def _read(folder: Path) -> _Manifest:
    try:
        found = msgspec.json.decode((folder / "manifest.json").read_bytes(), type=_Manifest)
        whole = all((folder / file.name).stat().st_size == file.size for file in found.files)
    except (OSError, msgspec.MsgspecError):
        return _Manifest()
    return found if whole else _Manifest()


def _convert(
    spans: Path, manifest: _Manifest, launch: int, begin: int
) -> tuple[list[Columns], int, dict[str, list[str]]]:
    """The records after the manifest's offset, with texts for numbers; and how far they reach."""
    names = {key: list(known) for key, known in manifest.names.items()}
    parts: list[Columns] = []
    offset = manifest.offset
    with suppress(FileNotFoundError):
        for item in follow(spans, offset):
            if isinstance(item, Damage):
                continue
            offset = item.end
            with suppress(ValueError):
                frame, columns = decode_frame(item.record)
                about = frame.about
                known = names.setdefault(f"{about['rank']}.{about['generation']}", [])
                known[about["first_name"] :] = about["names"]
                parts.append(_described(columns, about, known, launch, begin))
    return parts, offset, names


def _described(columns: Columns, about: dict[str, Any], names: list[str], launch: int, begin: int) -> Columns:
    rows, kinds = len(columns["time"]), [kind.name.lower() for kind in SpanKind]
    texts = np.array([*names, ""], object)
    return {
        "launch": np.full(rows, launch, np.int32),
        "rank": np.full(rows, about["rank"], np.int32),
        "generation": np.full(rows, about["generation"], np.int32),
        "lane": columns["lane"].astype(np.int32),
        "time": (columns["time"] + (about["wall"] - about["monotonic"] - begin)) / 1e9,
        "name": texts[np.minimum(columns["name"], len(names))],
        "kind": np.array(["", *kinds, ""], object)[np.minimum(columns["kind"], len(kinds) + 1)],
        "step": columns["step"].astype(np.int64),
        "argument": columns["argument"].astype(np.int64),
    }


def _append(folder: Path, manifest: _Manifest, parts: list[Columns], write: Write) -> None:
    while parts:
        taken, rows = 0, 0
        while taken < len(parts) and (not taken or rows + len(parts[taken]["time"]) <= ROWS_MAX):
            rows += len(parts[taken]["time"])
            taken += 1
        chosen, parts = parts[:taken], parts[taken:]
        columns = {name: np.concatenate([part[name] for part in chosen]) for name in chosen[0]}
        manifest.files = [*manifest.files, _write(folder, columns, write)]


def _write(folder: Path, content: Columns | list[str], write: Write) -> _File:
    path = folder / f"{time.time_ns()}.parquet"
    unfinished = folder / f".{path.name}"
    write(content, unfinished)
    os.replace(unfinished, path)
    return _File(path.name, path.stat().st_size, _checksum(path))


def _replace(folder: Path, manifest: _Manifest, write: Write) -> None:
    """Make the manifest count; join many files, and remove those that were replaced long ago."""
    now = time.time()
    if len(manifest.files) > FILES_MAX:
        joined = _write(folder, [str(folder / file.name) for file in manifest.files], write)
        manifest.retired = [*manifest.retired, *((file.name, now) for file in manifest.files)]
        manifest.files = [joined]
    old = [name for name, at in manifest.retired if now - at > GRACE_S]
    manifest.retired = [each for each in manifest.retired if each[0] not in old]
    unfinished = folder / ".manifest.json"
    unfinished.write_bytes(msgspec.json.encode(manifest))
    os.replace(unfinished, folder / "manifest.json")
    for name in old:
        (folder / name).unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    """Be the only writer.

    Raises:
        OSError: another process writes, or nothing can be written here.
    """
    folder.mkdir(exist_ok=True)
    fd = os.open(folder / "lock", os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(fd)
