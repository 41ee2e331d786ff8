"""Token files: integers of two or four bytes without a header, as nanoGPT writes them."""

import mmap
from typing import Any, cast

import numpy as np
from numpy.typing import DTypeLike

from argosy.core import ConfigError
from argosy.data.collate import Array, Empty, in_heap
from argosy.data.errors import Unreadable
from argosy.data.permute import Indices
from argosy.data.stored_file import Paths, open_files


class Tokens:
    """Samples `(x, y)`, both int64: `length` tokens, and the same shifted by one. Local files are mapped."""

    def __init__(self, paths: Paths, length: int, *, dtype: DTypeLike = np.uint16, store: Any = None) -> None:
        if length < 1:
            raise ConfigError(f"length must be at least 1: {length}")
        self.length, self.dtype = length, np.dtype(dtype)
        if self.dtype.kind not in "ui":
            raise ConfigError(f"tokens must be integers, such as uint16 or uint32: {self.dtype}")
        self.files = open_files(paths, store)
        for file in self.files:
            if file.size % self.dtype.itemsize:
                raise Unreadable(file.path, f"{file.size} bytes are not a multiple of a {self.dtype} token")
        counts = [max(0, file.size // self.dtype.itemsize - 1) // length for file in self.files]
        self._ends = np.cumsum(counts, dtype=np.int64)
        self._maps: dict[int, Array] = {}

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def __getitem__(self, index: int) -> tuple[Array, Array]:
        x, y = self.gather(np.array([index]), in_heap)
        return x[0], y[0]

    def where(self, index: int) -> str:
        number, place = self._locate(np.array([index]))
        return f"{self.files[int(number[0])].path} token {int(place[0]) * self.length}"

    def gather(self, indices: Indices, empty: Empty) -> tuple[Array, Array]:
        """Make a whole batch at once."""
        x, y = (empty((len(indices), self.length), np.int64) for _ in range(2))
        numbers, places = self._locate(indices)
        for number in np.unique(numbers):
            chosen = numbers == number
            rows = self._rows(int(number), places[chosen])
            if chosen.all():
                x[...], y[...] = rows[:, :-1], rows[:, 1:]
            else:
                x[chosen], y[chosen] = rows[:, :-1], rows[:, 1:]
        return x, y

    def _locate(self, indices: Indices) -> tuple[Indices, Indices]:
        numbers = np.searchsorted(self._ends, indices, side="right")
        starts = np.concatenate([[0], self._ends[:-1]])
        return numbers, indices - starts[numbers]

    def _rows(self, number: int, places: Indices) -> Array:
        if self.files[number].is_local:
            return self._mapped(number)[places]
        size, file = self.dtype.itemsize, self.files[number]
        parts = [file.read(int(place) * self.length * size, (self.length + 1) * size) for place in places]
        return np.frombuffer(b"".join(parts), self.dtype).reshape(len(parts), self.length + 1)

    def _mapped(self, number: int) -> Array:
        """Return the file as overlapping rows of length + 1."""
        rows = self._maps.get(number)
        if rows is None:
            with self.files[number].file() as file:
                memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
            if len(memory) < self.files[number].size:
                raise Unreadable(self.files[number].path, "it is shorter than when it was opened")
            flat: Array = np.frombuffer(memory, self.dtype)
            count = max(0, len(flat) - 1) // self.length
            step = self.dtype.itemsize
            rows = np.lib.stride_tricks.as_strided(
                flat, (count, self.length + 1), (self.length * step, step), writeable=False
            )
            self._maps[number] = rows
        return rows

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_maps": cast("dict[int, Array]", {})}
