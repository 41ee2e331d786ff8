"""Column files: frames of numpy columns in a journal, so that a torn or damaged frame never hides the others.

A frame is one record: a msgpack array of a header (a map: `ColumnFrame`) and the columns, each as its raw little-endian
bytes, compressed together. Times are stored as differences.
"""

import os
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from argosy.observe.journal import Damage, JournalEntry, follow

Columns = dict[str, NDArray[Any]]


class ColumnFrame(msgspec.Struct, frozen=True):
    """Rows of one kind (`spans`, `rank`, `host`), and what holds for all of them."""

    what: str
    rows: int
    dtypes: dict[str, str]
    about: dict[str, Any] = {}


def encode_frame(what: str, columns: Mapping[str, NDArray[Any]], about: Mapping[str, Any]) -> bytes:
    """Pack columns of equal length."""
    rows = len(next(iter(columns.values())))
    frame = ColumnFrame(what, rows, {name: column.dtype.str for name, column in columns.items()}, dict(about))
    parts = [
        np.diff(column, prepend=column.dtype.type(0)) if name == "time" else column for name, column in columns.items()
    ]
    body = zlib.compress(b"".join(np.ascontiguousarray(part).tobytes() for part in parts), 1)
    return msgspec.msgpack.encode((frame, body))


_decoder = msgspec.msgpack.Decoder(tuple[ColumnFrame, bytes])


def decode_frame(record: bytes) -> tuple[ColumnFrame, Columns]:
    """Unpack what `encode_frame` packed.

    Raises:
        ValueError: it is no frame.
    """
    try:
        frame, body = _decoder.decode(record)
        raw = zlib.decompress(body)
        columns, at = Columns(), 0
        for name, dtype in frame.dtypes.items():
            column = np.frombuffer(raw, dtype, frame.rows, at)
            at += column.nbytes
            columns[name] = np.cumsum(column, dtype=column.dtype) if name == "time" else column
    except (msgspec.MsgspecError, zlib.error, TypeError) as error:
        raise ValueError(f"not a frame of columns: {error}") from None
    return frame, columns


def read_frames(path: str | os.PathLike[str]) -> Iterator[tuple[ColumnFrame, Columns] | Damage]:
    """Yield the frames of a file and the damage between them; a missing file has none."""
    try:
        for item in follow(path):
            if isinstance(item, Damage):
                yield item
                continue
            try:
                yield decode_frame(item.record)
            except ValueError:
                yield Damage(item.end - len(item.record), len(item.record))
    except FileNotFoundError:
        return


def read_headers(path: str | os.PathLike[str]) -> Iterator[ColumnFrame]:
    """Yield the headers of the frames that can be read."""
    try:
        for item in follow(path):
            if isinstance(item, JournalEntry):
                try:
                    yield _decoder.decode(item.record)[0]
                except msgspec.MsgspecError:
                    continue
    except OSError:
        return
