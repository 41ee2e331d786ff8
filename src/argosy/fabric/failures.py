"""Exceptions that travel: the exception itself where it can be pickled, and always its traceback as text."""

import pickle
import traceback
from types import TracebackType

import msgspec

from argosy.core import ArgosyError
from argosy.fabric.payload import dump


class Cancelled(BaseException):
    """Raised inside an endpoint whose caller gave up; not an `Exception`, so that no handler swallows it."""


class RemoteError(ArgosyError):
    """An endpoint raised something that cannot be sent; its type and text are here."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(kind, message)
        self.kind, self.message = kind, message

    def __str__(self) -> str:
        return f"{self.kind}: {self.message}"


class Failure(msgspec.Struct, frozen=True):
    """An exception as it is sent: `pickled` is empty if it could not be."""

    kind: str
    message: str
    trace: str
    pickled: bytes


def failure_of(error: BaseException) -> Failure:
    """Take an exception apart for sending; never raises."""
    lines = traceback.format_exception(type(error), error, _without_ours(error))
    pickled = b""
    try:
        candidate, buffers = dump(error.with_traceback(None))
        if not buffers and isinstance(pickle.loads(candidate), BaseException):
            pickled = candidate
    except Exception:
        pickled = b""
    return Failure(_name(error), _text(error), "".join(lines), pickled)


def rebuild(failure: Failure, where: str) -> BaseException:
    """The exception to raise at the caller, with a note that tells where it comes from."""
    error: BaseException
    try:
        error = pickle.loads(failure.pickled) if failure.pickled else RemoteError(failure.kind, failure.message)
    except Exception:
        error = RemoteError(failure.kind, failure.message)
    error.add_note(f"raised on {where}:\n{failure.trace.rstrip()}")
    return error


def _name(error: BaseException) -> str:
    kind = type(error)
    return kind.__qualname__ if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}.{kind.__name__}"


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return "(its text raised an error of its own)"


def _without_ours(error: BaseException) -> TracebackType | None:
    """The traceback from the user's first frame on."""
    trace = error.__traceback__
    while trace is not None and "argosy" in trace.tb_frame.f_globals.get("__name__", "").split(".")[:1]:
        trace = trace.tb_next
    return trace if trace is not None else error.__traceback__
