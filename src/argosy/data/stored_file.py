"""Read ranges of bytes from a local file or an object store; each process opens the file for itself."""

import errno
import os
import stat
from collections.abc import Sequence
from typing import Any, cast

from argosy.core import ConfigError
from argosy.data.errors import Unreadable


class StoredFile:
    """A file or object: `size`, and `read(offset, length)`. It can be pickled."""

    def __init__(self, path: str | os.PathLike[str], store: Any = None) -> None:
        self.path = os.fspath(path)
        self._store = store
        self._fd: int | None = None
        self._key = self.path
        if store is None and "://" in self.path:
            self._store, self._key = _open_url(self.path)
        self.size = self._measure()

    @property
    def is_local(self) -> bool:
        return self._store is None

    def read(self, offset: int, length: int) -> bytes:
        """Return `length` bytes from `offset` on, fewer at the end.

        Raises:
            Unreadable: they cannot be read; obstore has retried.
        """
        length = min(length, self.size - offset)
        if length <= 0:
            return b""
        try:
            if self._store is None:
                data = os.pread(self._file(), length, offset)
            else:
                data = bytes(_obstore().get_range(self._store, self._key, start=offset, length=length))
        except Exception as error:
            raise Unreadable(self.path, f"{length} bytes at {offset} cannot be read: {_first_line(error)}") from error
        if len(data) < length:
            raise Unreadable(self.path, f"it ends at {offset + len(data)}, but had {self.size} bytes before")
        return data

    def file(self) -> Any:
        """Return a readable, seekable file object."""
        return open(self.path, "rb") if self._store is None else _obstore().open_reader(self._store, self._key)

    def _measure(self) -> int:
        try:
            if self._store is None:
                status = os.stat(self.path)
                if stat.S_ISDIR(status.st_mode):
                    raise IsADirectoryError(errno.EISDIR, "it is a directory: name the files in it")
                return status.st_size
            return cast(int, _obstore().head(self._store, self._key)["size"])
        except Exception as error:
            raise Unreadable(self.path, _first_line(error)) from error

    def _file(self) -> int:
        if self._fd is None:
            self._fd = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
        return self._fd

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_fd": None}

    def __del__(self) -> None:
        if getattr(self, "_fd", None) is not None:
            os.close(cast(int, self._fd))


Paths = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]
"""One path or URL, or several."""


def open_files(paths: Paths, store: Any) -> list[StoredFile]:
    """Open one file or several, in `store` or where their paths say."""
    return [StoredFile(path, store) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]


def _open_url(url: str) -> tuple[Any, str]:
    folder, _, name = url.rpartition("/")
    return _obstore().store.from_url(folder), name


def _obstore() -> Any:
    try:
        import obstore  # pyright: ignore
        import obstore.store  # pyright: ignore
    except ImportError:
        raise ConfigError("object stores need the package obstore", hint="pip install obstore") from None
    return cast(Any, obstore)


def _first_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
