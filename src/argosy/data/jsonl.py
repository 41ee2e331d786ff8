"""JSON lines: one sample per line, found by an index of the lines that is built when the file is opened."""

from typing import Any

import msgspec
import numpy as np

from argosy.data.errors import Unreadable
from argosy.data.permute import Indices
from argosy.data.stored_file import Paths, StoredFile, open_files

_CHUNK = 16 << 20


class Jsonl:
    """Samples are the decoded lines, without empty ones."""

    def __init__(self, paths: Paths, *, store: Any = None) -> None:
        self.files = open_files(paths, store)
        spans = [_index_lines(file) for file in self.files]
        self._starts = np.concatenate([starts for starts, _ in spans])
        self._stops = np.concatenate([stops for _, stops in spans])
        self._ends = np.cumsum([len(starts) for starts, _ in spans], dtype=np.int64)

    def __len__(self) -> int:
        return len(self._starts)

    def __getitem__(self, index: int) -> Any:
        file = self._file(index)
        start, stop = int(self._starts[index]), int(self._stops[index])
        line = file.read(start, stop - start)
        try:
            return msgspec.json.decode(line)
        except msgspec.MsgspecError as error:
            raise Unreadable(self.where(index), f"not JSON: {error}: {line[:60]!r}") from None

    def where(self, index: int) -> str:
        """Return file and line, in the form that editors accept."""
        file, before, position = self._file(index), 0, 0
        start = int(self._starts[index])
        while position < start:
            chunk = file.read(position, min(_CHUNK, start - position))
            before += chunk.count(b"\n")
            position += len(chunk)
        return f"{file.path}:{before + 1}"

    def _file(self, index: int) -> StoredFile:
        return self.files[int(np.searchsorted(self._ends, index, side="right"))]


def _index_lines(file: StoredFile) -> tuple[Indices, Indices]:
    """Return the start and the end of each line that is not empty."""
    breaks: list[Indices] = []
    for offset in range(0, file.size, _CHUNK):
        chunk = np.frombuffer(file.read(offset, _CHUNK), np.uint8)
        breaks.append(np.flatnonzero(chunk == 10) + offset)
    stops = np.concatenate([*breaks, np.array([file.size])]).astype(np.int64)
    starts = np.concatenate([np.array([0]), stops[:-1] + 1]).astype(np.int64)
    kept = stops - starts > 1  # A line of one byte may be a carriage return, and is checked.
    for number in np.flatnonzero(stops - starts == 1):
        kept[number] = file.read(int(starts[number]), 1).strip() != b""
    return starts[kept], stops[kept]
