"""Send exceptions from a rank to its caller: pickled where possible, and always with the traceback as text."""

import pickle
import traceback
from types import TracebackType

import msgspec

from argosy.core import ArgosyError
from argosy.fabric.payload import dump


class Cancelled(BaseException):
    """Raised inside an endpoint whose caller gave up; not an `Exception`, so that no handler swallows it."""


class RemoteError(ArgosyError):
    """An endpoint raised an exception that cannot be pickled; `kind` is its type, `message` its text."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class PackedError(msgspec.Struct, frozen=True):
    """An exception as it is sent; `pickled` is empty if pickling failed."""

    kind: str
    message: str
    trace: str
    pickled: bytes


def pack_error(error: BaseException) -> PackedError:
    """Convert an exception for sending; never raises."""
    lines = traceback.format_exception(type(error), error, _user_traceback(error))
    pickled = b""
    try:
        candidate, buffers = dump(error.with_traceback(None))
        if not buffers and isinstance(pickle.loads(candidate), BaseException):
            pickled = candidate
    except Exception:
        pickled = b""
    return PackedError(_name(error), _text(error), "".join(lines), pickled)


def rebuild(packed: PackedError, where: str) -> BaseException:
    """Return the exception to raise at the caller; a note holds the remote traceback."""
    error: BaseException
    try:
        error = pickle.loads(packed.pickled) if packed.pickled else RemoteError(packed.kind, packed.message)
    except Exception:
        error = RemoteError(packed.kind, packed.message)
    error.add_note(f"raised on {where}:\n{packed.trace.rstrip()}")
    return error


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its __str__ raised an error)"


def _user_traceback(error: BaseException) -> TracebackType | None:
    """Return the traceback from the first frame outside Argosy on."""
    trace = error.__traceback__
    while trace is not None and "argosy" in trace.tb_frame.f_globals.get("__name__", "").split(".")[:1]:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__
