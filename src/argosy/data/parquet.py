"""Parquet files, read by row group through pyarrow or, if that is not installed, DuckDB."""

from collections import OrderedDict
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol, cast

import numpy as np

from argosy.core import ConfigError
from argosy.data.collate import Array, Empty
from argosy.data.errors import Unreadable
from argosy.data.permute import Indices
from argosy.data.stored_file import Paths, StoredFile, open_files

Columns = dict[str, Any]
"""By name: an array, or a list if the values are not numbers of one shape."""


class _Backend(Protocol):
    def row_groups(self, file: StoredFile) -> list[int]: ...
    def read(self, file: StoredFile, group: int, span: tuple[int, int], columns: list[str] | None) -> Columns: ...


class Parquet:
    """Samples are rows, as dicts. Each worker keeps `groups_kept` row groups in memory.

    Use it with `Shuffle.blocks(rows_per_group, window)`, window at most `groups_kept`: a full shuffle would read a
    row group for each sample.
    """

    def __init__(
        self, paths: Paths, *, columns: Sequence[str] | None = None, groups_kept: int = 8, store: Any = None
    ) -> None:
        self.columns, self.groups_kept = None if columns is None else list(columns), groups_kept
        self.files = open_files(paths, store)
        self._backend = _choose_backend()
        counts = [_guarded(file, "its row groups", self._backend.row_groups, file) for file in self.files]
        self._groups = [(number, group) for number, each in enumerate(counts) for group in range(len(each))]
        self._ends = np.cumsum([count for each in counts for count in each], dtype=np.int64)
        self._file_starts = np.cumsum([0, *(sum(each) for each in counts)])
        self._kept: OrderedDict[int, Columns] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    @property
    def rows_per_group(self) -> int:
        """The size of the largest row group: the block size to shuffle by."""
        return int(np.diff(self._ends, prepend=0).max(initial=0))

    def __getitem__(self, index: int) -> dict[str, Any]:
        group, row = self._locate(index)
        return {name: _own(column[row]) for name, column in self._read(group).items()}

    def where(self, index: int) -> str:
        group, row = self._locate(index)
        number, inner = self._groups[group]
        return f"{self.files[number].path} row group {inner} row {row}"

    def gather(self, indices: Indices, empty: Empty) -> Columns | None:
        """Make a whole batch at once; None if a column does not hold numbers of one shape."""
        groups = np.searchsorted(self._ends, indices, side="right")
        rows = indices - np.concatenate([[0], self._ends[:-1]])[groups]
        result: Columns = {}
        for group in np.unique(groups):
            chosen = groups == group
            for name, column in self._read(int(group)).items():
                if not isinstance(column, np.ndarray) or cast(Array, column).dtype.hasobject:
                    return None
                values = cast(Array, column)
                if name not in result:
                    result[name] = empty((len(indices), *values.shape[1:]), values.dtype)
                if result[name].shape[1:] != values.shape[1:] or result[name].dtype != values.dtype:
                    return None
                result[name][chosen] = values[rows[chosen]]
        return result

    def _locate(self, index: int) -> tuple[int, int]:
        group = int(np.searchsorted(self._ends, index, side="right"))
        return group, index - (int(self._ends[group - 1]) if group else 0)

    def _read(self, group: int) -> Columns:
        columns = self._kept.get(group)
        if columns is None:
            number, inner = self._groups[group]
            file = self.files[number]
            start = (int(self._ends[group - 1]) if group else 0) - int(self._file_starts[number])
            span = (start, int(self._ends[group]) - int(self._file_starts[number]))
            columns = _guarded(file, f"row group {inner}", self._backend.read, file, inner, span, self.columns)
            self._kept[group] = columns
            while len(self._kept) > self.groups_kept:
                self._kept.popitem(last=False)
        self._kept.move_to_end(group)
        return columns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_kept": OrderedDict[int, Columns]()}


def _own(value: Any) -> Any:
    """Return a copy of an array: the user may change a sample, but not the row group that is kept."""
    return cast(Array, value).copy() if isinstance(value, np.ndarray) else value


def _guarded(file: StoredFile, what: str, function: Any, *args: Any) -> Any:
    """Call a Parquet library, and add file and row group to its errors."""
    try:
        return function(*args)
    except Unreadable:
        raise
    except Exception as error:
        raise Unreadable(file.path, f"{what} cannot be read: {str(error).strip().splitlines()[0]}") from error


def _choose_backend() -> _Backend:
    if find_spec("pyarrow") is not None:
        return _Arrow()
    if find_spec("duckdb") is not None:
        return _Duck()
    raise ConfigError("Parquet needs pyarrow or duckdb", hint="pip install pyarrow")


class _Arrow:
    def __init__(self) -> None:
        self._open: dict[str, Any] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"_open": cast("dict[str, Any]", {})}

    def _file(self, file: StoredFile) -> Any:
        if file.path not in self._open:
            import pyarrow.parquet as parquet  # pyright: ignore

            self._open[file.path] = cast(Any, parquet).ParquetFile(file.path if file.is_local else file.file())
        return self._open[file.path]

    def row_groups(self, file: StoredFile) -> list[int]:
        metadata = self._file(file).metadata
        return [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]

    def read(self, file: StoredFile, group: int, span: tuple[int, int], columns: list[str] | None) -> Columns:
        table = self._file(file).read_row_group(group, columns=columns, use_threads=False)
        return {name: _from_arrow(table.column(name).combine_chunks()) for name in table.column_names}


def _from_arrow(column: Any) -> Any:
    """Convert numbers to an array, lists of one length to a two-dimensional array, anything else to a list."""
    if hasattr(column, "combine_chunks"):
        column = column.combine_chunks()
    kind = str(column.type)
    if column.null_count:
        return column.to_pylist()
    if kind.startswith(("list<", "large_list<", "fixed_size_list<")):
        values = column.flatten()
        whole = len(column) > 0 and len(values) % len(column) == 0 and not values.null_count
        width = len(values) // len(column) if whole else 0
        if whole and (kind.startswith("fixed") or _even(column, width)) and "<" not in str(values.type):
            return values.to_numpy(zero_copy_only=False).reshape(len(column), width)
        return [np.asarray(row) for row in column.to_pylist()]
    if kind.startswith(("int", "uint", "float", "double", "halffloat", "bool")):
        return column.to_numpy(zero_copy_only=False)
    return column.to_pylist()


def _even(column: Any, width: int) -> bool:
    return bool((np.diff(column.offsets.to_numpy()) == width).all())


class _Duck:
    def row_groups(self, file: StoredFile) -> list[int]:
        query = "SELECT row_group_id, any_value(row_group_num_rows) FROM parquet_metadata(?) GROUP BY 1 ORDER BY 1"
        return [rows for _, rows in self._ask(file, query, [file.path]).fetchall()]

    def read(self, file: StoredFile, group: int, span: tuple[int, int], columns: list[str] | None) -> Columns:
        names = "*" if columns is None else ", ".join('"' + name.replace('"', '""') + '"' for name in columns)
        query = (
            f"SELECT {names} EXCLUDE (file_row_number) FROM read_parquet(?, file_row_number=true) "
            "WHERE file_row_number >= ? AND file_row_number < ? ORDER BY file_row_number"
        )
        if columns is not None:
            query = query.replace(" EXCLUDE (file_row_number)", "")
        return {
            name: _from_duck(values) for name, values in self._ask(file, query, [file.path, *span]).fetchnumpy().items()
        }

    def _ask(self, file: StoredFile, query: str, values: list[Any]) -> Any:
        import duckdb  # pyright: ignore

        if not file.is_local:
            raise ConfigError("Parquet in an object store needs pyarrow", hint="pip install pyarrow")
        connection = cast(Any, duckdb).connect(config={"threads": 1})
        return connection.execute(query, values)


def _from_duck(values: Any) -> Any:
    if isinstance(values, np.ma.MaskedArray) and cast(Any, values).mask.any():
        return cast(Any, values).tolist()
    array: Array = np.asarray(cast(Any, values))
    if not array.dtype.hasobject:
        return array
    rows = list(array)
    if rows and isinstance(rows[0], list | np.ndarray):
        arrays = [np.asarray(row) for row in rows]
        return np.stack(arrays) if len({each.shape for each in arrays}) == 1 else arrays
    return rows
