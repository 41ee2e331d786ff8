"""Errors of this room.

CannotCapture   the step cannot become one graph; the message names the line
BadGraph        a graph breaks a rule that every graph keeps
"""

from argosy.core import ArgosyError, ConfigError


class CannotCapture(ConfigError):
    """A part of the step cannot be captured; `place` is the line of the user's code, or empty."""

    def __init__(self, what: str, place: str = "", *, hint: str = "") -> None:
        super().__init__(what, place, hint=hint)
        self.what, self.place = what, place

    def __str__(self) -> str:
        return f"{self.what}: {self.place}" if self.place else self.what


class BadGraph(ArgosyError):
    """A graph breaks a rule, such as a collective that nothing waits for."""
