"""The board of one run: what its ranks tell each other, by key and value."""

import contextlib
from collections.abc import Hashable
from typing import Protocol

from argosy.core import ArgosyError
from argosy.fabric import BoardAdd, BoardAnswer, BoardGet, BoardSet, NotMember, Released


class Asker(Hashable, Protocol):
    """A rank that asked for something: the link to it, or its host's."""

    def send(self, message: BoardAnswer | NotMember | Released, /) -> None: ...


class Board:
    """Values by key, and the ranks that wait for some."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._view = 0
        self._waiting: dict[Asker, BoardGet] = {}

    def handle(self, link: Asker, message: BoardSet | BoardAdd | BoardGet, view: int) -> None:
        """Do what a rank asks; a rank that asks for something new no longer waits for what it asked before."""
        self._waiting.pop(link, None)
        self._view = view
        match message:
            case BoardSet(number=number, key=key, value=value):
                self._values[key] = value
                _answer(link, BoardAnswer(number, view))
                self._serve_waiting()
            case BoardAdd(number=number, key=key):
                count = max(int(self._values.get(key, b"0")), message.least) + message.amount
                self._values[key] = str(count).encode()
                _answer(link, BoardAnswer(number, view, [self._values[key]]))
                self._serve_waiting()
            case BoardGet(number=number, keys=keys, at_once=True) if any(key not in self._values for key in keys):
                _answer(link, BoardAnswer(number, view, absent=True))
            case BoardGet():
                self._waiting[link] = message
                self._serve_waiting()

    def forget(self, link: Asker) -> None:
        """A rank is gone."""
        self._waiting.pop(link, None)

    def _serve_waiting(self) -> None:
        for link, asked in list(self._waiting.items()):
            if all(key in self._values for key in asked.keys):
                del self._waiting[link]
                _answer(link, BoardAnswer(asked.number, self._view, [self._values[key] for key in asked.keys]))


def _answer(link: Asker, answer: BoardAnswer) -> None:
    with contextlib.suppress(ArgosyError):  # A rank that is gone waits for nothing.
        link.send(answer)
