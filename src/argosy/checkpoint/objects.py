"""Checkpoints in an object store, through obstore: the same operations, of which only whole puts and deletes remain.

O1  An object is there whole or not at all, so what a disk needs syncs and renames for is one put here.
O2  The root is put only if it is not there: two writers of one step cannot both win.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, suppress
from typing import Any

from argosy.checkpoint.files import Files
from argosy.checkpoint.format import ROOT
from argosy.checkpoint.operations import Create, Operation, Rename, Slice, Sync, Truncate, Unlink, Write
from argosy.core import ConfigError

READ_TRIES = 3


@contextmanager
def as_os_error(url: str) -> Generator[None, None, None]:
    """Whatever the store complains of is an OSError to those who retry."""
    try:
        yield
    except OSError:
        raise
    except Exception as error:
        if type(error).__module__.startswith("obstore"):
            raise OSError(5, f"the object store failed: {first_line(error)}", url) from error
        raise


def first_line(error: Exception) -> str:
    """What obstore complains of, without the pages of debug text that follow."""
    return str(error).partition("\n")[0][:200]


def again(url: str, call: Callable[[], Any]) -> Any:
    """Read, and once more if the answer broke off: obstore tries refused requests again, but not half a body."""
    for _ in range(READ_TRIES - 1):
        with suppress(OSError), as_os_error(url):
            try:
                return call()
            except FileNotFoundError:
                break
    with as_os_error(url):
        return call()


class ObjectFiles:
    """Reads objects below a prefix."""

    def __init__(self, store: Any, url: str) -> None:
        self._store, self._url = store, url

    def listdir(self, path: str) -> list[str]:
        import obstore

        prefix = None if path == "." else f"{path}/"
        found = again(self._url, lambda: obstore.list_with_delimiter(self._store, prefix))
        names = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in names)

    def read(self, path: str) -> bytes:
        import obstore

        return again(self._url, lambda: bytes(obstore.get(self._store, path).bytes()))

    def size(self, path: str) -> int:
        import obstore

        return again(self._url, lambda: int(obstore.head(self._store, path)["size"]))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        import obstore

        end = min(offset + len(buffer), self.size(path))
        if end <= offset:
            return 0
        data = memoryview(again(self._url, lambda: obstore.get_range(self._store, path, start=offset, end=end)))
        buffer[: len(data)] = data
        return len(data)


class ObjectStore:
    """An S3-like store. Credentials and endpoint come from the environment, as obstore reads them."""

    def __init__(self, url: str, folder: str) -> None:
        try:
            from obstore.store import from_url
        except ImportError:
            raise ConfigError(
                f"an object store needs the obstore package: {url}", hint="pip install 'argosy[s3]'"
            ) from None
        self.name = f"{url.rstrip('/')}/{folder}"
        try:
            self._store: Any = from_url(self.name)
        except Exception as error:
            raise ConfigError(
                f"no object store can be opened by {url}: {first_line(error)}",
                hint="s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, or a directory",
            ) from None
        self.files: Files = ObjectFiles(self._store, self.name)

    def perform(
        self,
        operations: Iterable[Operation],
        arena: memoryview | None = None,
        before: Callable[[Operation], None] | None = None,
    ) -> None:
        """Gather what is written to each file, and put it when it is synced, or renamed if its name is temporary."""
        parts: dict[str, dict[int, memoryview]] = {}
        lengths: dict[str, int] = {}
        for operation in operations:
            if before:
                before(operation)
            match operation:
                case Create(path):
                    parts[path] = {}
                case Write(path, offset, data):
                    if isinstance(data, Slice):
                        assert arena is not None
                        parts[path][offset] = arena[data.start : data.start + data.length]
                    else:
                        parts[path][offset] = memoryview(data)
                case Truncate(path, length):
                    lengths[path] = length
                case Sync(path):
                    if not path.endswith(".tmp"):
                        self._put(path, parts.pop(path), lengths.get(path))
                case Rename(path, target):
                    self._put(target, parts.pop(path), None)
                case Unlink(path):
                    self.delete(path)
                case _:
                    pass  # Directories are not things here, and a put is durable when it returns.

    def _put(self, path: str, written: dict[int, memoryview], length: int | None) -> None:
        parts = [written[offset] for offset in sorted(written)]
        if length is not None:
            excess = sum(map(len, parts)) - length
            parts[-1] = parts[-1][: len(parts[-1]) - excess]
        data = bytes(parts[0]) if len(parts) == 1 else iter([bytes(part) for part in parts])
        is_root = path.endswith(f"/{ROOT}")
        import obstore

        with as_os_error(self.name):
            if is_root and isinstance(data, bytes):
                obstore.put(self._store, path, data, mode="create", use_multipart=False)  # O2
            else:
                obstore.put(self._store, path, data)

    def put(self, path: str, data: bytes, *, only_if_new: bool = False) -> bool:
        import obstore

        try:
            with as_os_error(self.name):
                mode = "create" if only_if_new else "overwrite"
                obstore.put(self._store, path, data, mode=mode, use_multipart=False)
        except FileExistsError:
            return False
        except OSError as error:
            if only_if_new and "AlreadyExists" in type(error.__cause__).__name__:
                return False
            raise
        return True

    def delete(self, path: str) -> None:
        import obstore

        with as_os_error(self.name):
            try:
                obstore.delete(self._store, path)
            except FileNotFoundError:
                return
