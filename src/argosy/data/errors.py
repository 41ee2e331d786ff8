"""Errors of the input, one class per thing that the caller can do next."""

from argosy.core import ArgosyError, ConfigError


class SampleError(ArgosyError):
    """A sample could not be made; `where` names it, `cause` is the error of its source."""

    def __init__(self, where: str, cause: str, *, hint: str = "") -> None:
        super().__init__(where, cause, hint=hint)
        self.where, self.cause = where, cause

    def __str__(self) -> str:
        return f"{self.where}: {self.cause}"


class WorkerLost(ArgosyError):
    """Worker processes died or hung over the same work too often; the message names the work."""


class TooManySkipped(ArgosyError):
    """More samples failed than `Skip` allows."""


class SourceChanged(ConfigError):
    """The source, seed or order differs from the state to resume from."""


class Unreadable(ArgosyError):
    """A file or object cannot be read, or does not have the expected format."""

    def __init__(self, path: str, cause: str, *, hint: str = "") -> None:
        super().__init__(path, cause, hint=hint)
        self.path, self.cause = path, cause

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}"
