"""The record of exits of a host: the process that reaps appends to it before it tells anybody."""

import contextlib
import os
from pathlib import Path

import msgspec

from argosy.core import WaitStatus
from argosy.supervise.messages import Child
from argosy.supervise.records.retrying_journal import RetryingJournal, read_records


class ExitRecord(msgspec.Struct, frozen=True):
    """How a child ended, and when."""

    child: Child
    status: WaitStatus
    at: float


def _path(runtime: Path) -> Path:
    return runtime / "exits"


class Exits:
    """The appending end; several processes append to one file, a record at a time."""

    def __init__(self, runtime: Path) -> None:
        self._journal = RetryingJournal(_path(runtime))

    def append(self, record: ExitRecord) -> None:
        """Write one record; without room for it, later."""
        self._journal.append(msgspec.msgpack.encode(record))


def read_exits(runtime: Path) -> list[ExitRecord]:
    """All records that are whole."""
    return [msgspec.msgpack.decode(payload, type=ExitRecord) for payload in read_records(_path(runtime))]


def forget_exits(runtime: Path) -> None:
    """Start a new record; only while no child is alive. Its writers keep the file open: it is emptied, not removed."""
    with contextlib.suppress(OSError):
        os.truncate(_path(runtime), 0)
