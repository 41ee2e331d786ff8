"""Plain values as they are stored, for people to read. Pure, and without torch."""

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

from argosy.transfer import Value, grown

WIDTH = 80
DEPTH = 2
"""A dict of lists is shown; what is in those only if it is no container."""


class _Reference(str):
    def __repr__(self) -> str:
        return f"<{self}>"


def in_a_line(value: Value) -> str:
    """A value in at most `WIDTH` characters; containers that are nested deeply are only hinted at."""
    text = _text(grown(value, _Reference), DEPTH)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 1]}…"


def _text(value: Any, depth: int) -> str:
    if isinstance(value, dict):
        pairs = cast("dict[Any, Any]", value).items()
        return _joined("{}", (f"{_key(key)}: {_text(each, depth - 1)}" for key, each in pairs), depth)
    if isinstance(value, list | tuple):
        around = "[]" if isinstance(value, list) else "()"
        return _joined(around, (_text(each, depth - 1) for each in cast("list[Any]", value)), depth)
    return repr(value)


def _key(key: Any) -> str:
    """Names as they are; what is not text, or odd text, can be told from them."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def _joined(around: str, parts: Iterable[str], depth: int) -> str:
    """No more parts than the line could take are looked at."""
    taken = islice(parts, WIDTH) if depth > 0 else ("…" for _ in islice(parts, 1))
    return f"{around[0]}{', '.join(taken)}{around[1]}"
