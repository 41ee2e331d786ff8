"""Who talks to a keeper, and what it remembers of what they said."""

from dataclasses import dataclass, field
from typing import TypeVar

from argosy.checkpoint.format import era_of, step_of
from argosy.checkpoint.keeper.messages import FromClient, Lend
from argosy.checkpoint.keeper.shipping import Arriving
from argosy.fabric import Link

K = TypeVar("K")
V = TypeVar("V")
REMEMBERED = 64


def remember(known: dict[K, V], key: K, value: V, count: int = REMEMBERED) -> None:
    """Note something, and forget what is long ago."""
    known[key] = value
    if len(known) > count:
        del known[next(iter(known))]


def label(name: str) -> str:
    """How a step is called, by the name of its directory."""
    era = era_of(name)
    return f"step {step_of(name)}" + (f" of era {era}" if era else "")


@dataclass(slots=True, eq=False)
class Guest:
    """Whoever is at the other end of a link."""

    link: Link[FromClient]
    rank: int | None = None
    seen: set[int] = field(default_factory=set[int])
    reading: list[int] = field(default_factory=list[int])
    waiting: Lend | None = None
    waits_since: float = 0.0
    is_patient: bool = True
    """It is not told again and again to wait."""
    filling: set[int] = field(default_factory=set[int])
    """Slots that were lent to it, and not given back."""
    arriving: Arriving | None = None
