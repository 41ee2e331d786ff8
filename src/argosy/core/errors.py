"""Errors, one class per action that the caller can take next.

ArgosyError
  ConfigError      the user changes the script, the command or the configuration
  PeerLost         retry with the replacement, or without the peer
  DeadlinePassed   retry later, or find out which process is slow
"""


class ArgosyError(Exception):
    """The base of all errors that Argosy raises on purpose; `hint` says what to do next."""

    hint: str = ""

    def __init__(self, *args: object, hint: str = "") -> None:
        super().__init__(*args)
        if hint:
            self.hint = hint
            self.add_note(f"hint: {hint}")  # Tracebacks show it.


class ConfigError(ArgosyError):
    """The request cannot be carried out as written."""


class PeerLost(ArgosyError):
    """A rank, service or daemon at the other end is gone."""

    def __init__(self, peer: str, cause: str, *, hint: str = "") -> None:
        super().__init__(peer, cause, hint=hint)
        self.peer, self.cause = peer, cause

    def __str__(self) -> str:
        return f"{self.peer} is lost: {self.cause}"


class DeadlinePassed(ArgosyError):
    """A wait ended at its deadline."""

    def __init__(self, what: str, seconds: float, *, hint: str = "") -> None:
        super().__init__(what, seconds, hint=hint)
        self.what, self.seconds = what, seconds

    def __str__(self) -> str:
        after = f" after {self.seconds:g} s" if self.seconds else ""
        return f"timed out{after}: {self.what}"
