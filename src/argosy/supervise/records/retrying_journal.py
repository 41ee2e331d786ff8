"""Journals on a disk that may be full: what cannot be written is kept, and written before what comes next."""

from collections import deque
from collections.abc import Iterator
from pathlib import Path

from argosy.observe import Journal, JournalEntry, follow

KEPT_MAX = 100_000
"""Records kept in memory; of more the oldest are lost."""


class RetryingJournal:
    """The appending end of a journal; it never raises for the disk."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._journal: Journal | None = None
        self._kept: deque[bytes] = deque(maxlen=KEPT_MAX)
        self.trouble = ""
        """Why records could not be written; "" if all are."""

    def append(self, record: bytes) -> None:
        """Write a record, or keep it until there is room."""
        self._kept.append(record)
        self.retry()

    def retry(self) -> None:
        """Write what was kept."""
        try:
            while self._kept:
                if self._journal is None:
                    self._journal = Journal(self._path)
                self._journal.append(self._kept[0])
                self._kept.popleft()
            self.trouble = ""
        except OSError as error:
            self.trouble = f"{error.strerror}: {self._path}"

    def close(self) -> None:
        """Let go of the file."""
        if self._journal is not None:
            self._journal.close()
            self._journal = None


def read_records(path: Path) -> Iterator[bytes]:
    """Yield the records that are whole; none if there is no file. Damage is skipped: the rest still counts."""
    if path.exists():
        yield from (item.record for item in follow(path) if isinstance(item, JournalEntry))
