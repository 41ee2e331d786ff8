"""Checkpoints in an object store, through obstore: the same operations, of which only whole puts and deletes remain.

O1  An object is there whole or not at all, so what a disk needs syncs and renames for is one put here.
O2  The root is put only if it is not there: two writers of one step cannot both win.
"""
# pyright: reportMissingImports=false, reportUnknownMemberType=false, reportUnknownVariableType=false
# pyright: reportUnknownArgumentType=false

import errno
import time
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from datetime import timedelta
from typing import Any

from argosy.checkpoint.files import Files
from argosy.checkpoint.format import ROOT
from argosy.checkpoint.operations import Create, Operation, Rename, Slice, Sync, Truncate, Unlink, Write
from argosy.core import ConfigError

READ_TRIES = 3
RETRY_S = 12.0
"""A request that fails is made again for so long, inside obstore, then the call fails; obstore's own is 3 minutes."""
RETRY: dict[str, Any] = {
    "max_retries": 100,
    "retry_timeout": timedelta(seconds=RETRY_S),
    "backoff": {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=2), "base": 2},
}
PART = 120
NUMBERS: dict[type[OSError], int] = {
    FileNotFoundError: errno.ENOENT,
    FileExistsError: errno.EEXIST,
    PermissionError: errno.EACCES,
}


@contextmanager
def as_os_error(url: str) -> Generator[None, None, None]:
    """Whatever the store complains of is an OSError of one line to those who retry."""
    try:
        yield
    except OSError as error:
        if error.errno is not None:
            raise
        # One of obstore's, which has nothing but pages of text.
        what = "there is no such bucket" if "NoSuchBucket" in str(error) else first_line(error)
        raise OSError(NUMBERS.get(type(error), errno.EIO), what, url) from None
    except NotImplementedError as error:
        raise OSError(errno.EROFS, f"such stores cannot do this: {first_line(error)}", url) from None
    except Exception as error:
        if not type(error).__module__.startswith("obstore"):
            raise
        number = errno.EEXIST if "AlreadyExists" in type(error).__name__ else errno.EIO
        raise OSError(number, f"the object store failed: {first_line(error)}", url) from None


def first_line(error: Exception) -> str:
    """What obstore complains of and the cause at its end, without the pages of debug text that follow."""
    line = str(error).partition("\n")[0]
    return line if len(line) <= 2 * PART else f"{line[:PART]} ... {line[-PART:]}"


class Line:
    """The way to a store, in two kinds: requests that are made again when they fail, and such that are not.

    After a request failed for long enough, none is retried until one succeeds: cleaning up must not take minutes.
    """

    def __init__(self, url: str) -> None:
        from obstore.store import from_url

        make: Any = from_url
        self.url = url
        # Options of the client would replace those in the environment; its own give up connecting after 5 s, 30 in all.
        self.patient: Any = make(url, retry_config=RETRY)
        self.once: Any = make(url, retry_config=RETRY | {"max_retries": 0})
        self._is_down = False

    def call(self, call: Callable[[Any], Any], store: Any = None) -> Any:
        """Make a call with the store to use.

        Raises:
            OSError: what is wrong, in one line.
        """
        begun = time.monotonic()
        try:
            with as_os_error(self.url):
                found = call(store or (self.once if self._is_down else self.patient))
        except (FileNotFoundError, FileExistsError, PermissionError):
            self._is_down = False
            raise
        except OSError:
            self._is_down = self._is_down or time.monotonic() - begun > RETRY_S / 2
            raise
        self._is_down = False
        return found

    def read(self, call: Callable[[Any], Any]) -> Any:
        """Read, and once more if the answer broke off or never came. obstore retries only requests that were refused.

        A store that was down before is asked once.
        """
        tries = 1 if self._is_down else READ_TRIES
        for _ in range(tries - 1):
            try:
                return self.call(call)
            except FileNotFoundError:
                raise
            except OSError:
                if self._is_down:
                    break  # It did not answer for long: one request more may find it answering again.
        return self.call(call)


class ObjectFiles:
    """Reads objects below a prefix."""

    def __init__(self, line: Line) -> None:
        self._line, self.place = line, line.url

    def listdir(self, path: str) -> list[str]:
        import obstore

        prefix = None if path == "." else f"{path}/"
        found = self._line.read(lambda store: obstore.list_with_delimiter(store, prefix))
        names = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
        return sorted(str(name).rstrip("/").rpartition("/")[2] for name in names)

    def read(self, path: str) -> bytes:
        import obstore

        return self._line.read(lambda store: bytes(obstore.get(store, path).bytes()))

    def size(self, path: str) -> int:
        import obstore

        return self._line.read(lambda store: int(obstore.head(store, path)["size"]))

    def read_into(self, path: str, offset: int, buffer: memoryview) -> int:
        import obstore

        end = min(offset + len(buffer), self.size(path))
        if end <= offset:
            return 0
        data = memoryview(self._line.read(lambda store: obstore.get_range(store, path, start=offset, end=end)))
        buffer[: len(data)] = data
        return len(data)


class ObjectStore:
    """An S3-like store. Credentials and endpoint come from the environment, as obstore reads them."""

    def __init__(self, url: str, folder: str) -> None:
        self.name = f"{url.rstrip('/')}/{folder}"
        try:
            self._line = Line(self.name)
        except ImportError:
            raise ConfigError(f"an object store needs the obstore package: {url}", hint="pip install obstore") from None
        except Exception as error:
            raise ConfigError(
                f"no object store can be opened by {url}: {first_line(error)}",
                hint="s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH, or a directory",
            ) from None
        self.files: Files = ObjectFiles(self._line)

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
                case Rename(path, target, replaces):
                    self._put(target, parts.pop(path), None, only_if_new=not replaces and target.endswith(f"/{ROOT}"))
                case Unlink(path):
                    self.delete(path)
                case _:
                    pass  # Directories are not things here, and a put is durable when it returns.

    def _put(self, path: str, written: dict[int, memoryview], length: int | None, *, only_if_new: bool = False) -> None:
        parts = [written[offset] for offset in sorted(written)]
        if length is not None:
            excess = sum(map(len, parts)) - length
            parts[-1] = parts[-1][: len(parts[-1]) - excess]
        import obstore

        if only_if_new:
            data = b"".join(parts)
            if not self.put(path, data, only_if_new=True) and self.files.read(path) != data:  # O2
                raise FileExistsError(17, "another writer was first", f"{self.name}/{path}")
        else:
            source: Any = parts[0] if len(parts) == 1 else iter(parts)  # From where they lie, uncopied.
            self._line.call(lambda store: obstore.put(store, path, source), self._line.patient)

    def put(self, path: str, data: bytes, *, only_if_new: bool = False) -> bool:
        import obstore

        mode = "create" if only_if_new else "overwrite"
        try:
            self._line.call(lambda store: obstore.put(store, path, data, mode=mode, use_multipart=False))
        except FileExistsError:
            return False
        return True

    def alone(self, timeout_s: float) -> AbstractContextManager[bool]:
        return nullcontext(False)  # There are no locks.

    def delete(self, path: str) -> None:
        import obstore

        with suppress(FileNotFoundError):
            self._line.call(lambda store: obstore.delete(store, path))
