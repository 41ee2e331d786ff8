"""What can go wrong with input, one class per thing that the caller can do next."""

from argosy.core import ArgosyError, ConfigError


class SampleError(ArgosyError):
    """A sample could not be made; `where` says which, `cause` what its source said."""

    def __init__(self, where: str, cause: str, *, hint: str = "") -> None:
        super().__init__(where, cause, hint=hint)
        self.where, self.cause = where, cause

    def __reduce__(self) -> tuple[object, ...]:
        return _sample_error, (self.where, self.cause, self.hint)

    def __str__(self) -> str:
        return f"{self.where}: {self.cause}"


def _sample_error(where: str, cause: str, hint: str) -> SampleError:
    return SampleError(where, cause, hint=hint)


class WorkerLost(ArgosyError):
    """Worker processes died or hung over the same work too often; the message names the work."""


class TooManySkipped(ArgosyError):
    """More samples failed than the policy lets pass."""


class SourceChanged(ConfigError):
    """The source, seed or order is not that of the state to resume from."""


class Unreadable(ArgosyError):
    """A file or object cannot be read, or is not in the format that was expected."""

    def __init__(self, path: str, cause: str, *, hint: str = "") -> None:
        super().__init__(path, cause, hint=hint)
        self.path, self.cause = path, cause

    def __reduce__(self) -> tuple[object, ...]:
        return _unreadable, (self.path, self.cause, self.hint)

    def __str__(self) -> str:
        return f"{self.path}: {self.cause}"


def _unreadable(path: str, cause: str, hint: str) -> Unreadable:
    return Unreadable(path, cause, hint=hint)
