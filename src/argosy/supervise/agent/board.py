"""The board of one run: what its ranks tell each other, by key and value."""

import contextlib

from argosy.core import ArgosyError
from argosy.fabric import BoardAdd, BoardAnswer, BoardGet, BoardSet, Link
from argosy.supervise.messages import ToAgent


class Board:
    """Values by key, and the ranks that wait for some."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._waiting: dict[Link[ToAgent], BoardGet] = {}

    def handle(self, link: Link[ToAgent], message: BoardSet | BoardAdd | BoardGet) -> None:
        """Do what a rank asks; whoever asks for something new waits for nothing else any more."""
        self._waiting.pop(link, None)
        match message:
            case BoardSet(number=number, key=key, value=value):
                self._values[key] = value
                _answer(link, BoardAnswer(number))
                self._serve_waiting()
            case BoardAdd(number=number, key=key):
                count = max(int(self._values.get(key, b"0")), message.least) + message.amount
                self._values[key] = str(count).encode()
                _answer(link, BoardAnswer(number, [self._values[key]]))
                self._serve_waiting()
            case BoardGet():
                self._waiting[link] = message
                self._serve_waiting()

    def forget(self, link: Link[ToAgent]) -> None:
        """A rank is gone."""
        self._waiting.pop(link, None)

    def _serve_waiting(self) -> None:
        for link, asked in list(self._waiting.items()):
            if all(key in self._values for key in asked.keys):
                del self._waiting[link]
                _answer(link, BoardAnswer(asked.number, [self._values[key] for key in asked.keys]))


def _answer(link: Link[ToAgent], answer: BoardAnswer) -> None:
    with contextlib.suppress(ArgosyError):  # A rank that is gone waits for nothing.
        link.send(answer)
