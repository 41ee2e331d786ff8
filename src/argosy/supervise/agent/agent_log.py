"""The agent log: the events that an agent decided on, written before their effects are performed.

The next agent replays them through the same decisions (`control/node.py`) and arrives at the same state.
"""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path

import msgspec

from argosy.control import Known, LogRecord, NodeState, Numbered, recover
from argosy.supervise.records.retrying_journal import RetryingJournal, read_records

BYTES_MAX = 4 << 20
"""A log that is longer, and twice as long as it began, is replaced by the state that it leads to."""

_decoder: "msgspec.msgpack.Decoder[list[LogRecord]]" = msgspec.msgpack.Decoder(list[LogRecord])


class AgentLog:
    """The appending end."""

    def __init__(self, runtime: Path) -> None:
        self._path = runtime / "agent.log"
        self._journal = RetryingJournal(self._path)
        self._bytes = self._path.stat().st_size if self._path.exists() else 0
        self._first_bytes = 0

    @property
    def trouble(self) -> str:
        """Why a restarted agent would not know all that happened; "" if it would."""
        return self._journal.trouble

    @property
    def is_empty(self) -> bool:
        return not self._bytes

    @property
    def is_long(self) -> bool:
        return self._bytes > max(BYTES_MAX, 2 * self._first_bytes)

    def append(self, records: Sequence[LogRecord]) -> None:
        """Write the records of one turn at once."""
        payload = msgspec.msgpack.encode(records)
        self._bytes += len(payload)
        self._journal.append(payload)

    def retry(self) -> None:
        """Write what there was no room for."""
        self._journal.retry()

    def restart(self, state: NodeState) -> None:
        """Begin a new log with the state that the old one led to."""
        fresh = self._path.with_name("agent.log.new")
        fresh.unlink(missing_ok=True)
        journal = RetryingJournal(fresh)
        payload = msgspec.msgpack.encode([Known(state)])
        journal.append(payload)
        journal.close()
        if not journal.trouble:  # Else the old one continues.
            fresh.replace(self._path)
            self._journal.close()
            self._journal, self._bytes, self._first_bytes = RetryingJournal(self._path), len(payload), len(payload)


def recall(runtime: Path, name: str = "") -> tuple[NodeState, list[Numbered]]:
    """Replay the log: the state that it leads to, and the effects to perform now. `name` is for an empty log."""
    return recover(name or socket.gethostname(), _records(runtime))


def _records(runtime: Path) -> Iterator[LogRecord]:
    for payload in read_records(runtime / "agent.log"):
        yield from _decoder.decode(payload)
