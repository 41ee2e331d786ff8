"""JSON lines: one sample per line, found by an index of line starts that is built when the file is opened."""

import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from argosy.data.errors import Unreadable
from argosy.data.permute import Indices
from argosy.data.stored import Stored

_CHUNK = 16 << 20


class Jsonl:
    """Samples are the decoded lines; empty lines are none."""

    def __init__(self, paths: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], *, store: Any = None) -> None:
        several = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
        self.files = [Stored(path, store) for path in several]
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
            raise Unreadable(self.where(index), f"no JSON: {error}: {line[:60]!r}") from None

    def where(self, index: int) -> str:
        """File and line, as editors take it."""
        file, before, position = self._file(index), 0, 0
        start = int(self._starts[index])
        while position < start:
            chunk = file.read(position, min(_CHUNK, start - position))
            before += chunk.count(b"\n")
            position += len(chunk)
        return f"{file.path}:{before + 1}"

    def _file(self, index: int) -> Stored:
        return self.files[int(np.searchsorted(self._ends, index, side="right"))]


def _index_lines(file: Stored) -> tuple[Indices, Indices]:
    """Where each line that is not empty starts and stops."""
    breaks: list[Indices] = []
    for offset in range(0, file.size, _CHUNK):
        chunk = np.frombuffer(file.read(offset, _CHUNK), np.uint8)
        breaks.append(np.flatnonzero(chunk == 10) + offset)
    stops = np.concatenate([*breaks, np.array([file.size])]).astype(np.int64)
    starts = np.concatenate([np.array([0]), stops[:-1] + 1]).astype(np.int64)
    kept = stops - starts > 1  # A line of one byte is at best a digit, and often a carriage return.
    for number in np.flatnonzero(stops - starts == 1):
        kept[number] = file.read(int(starts[number]), 1).strip() != b""
    return starts[kept], stops[kept]
