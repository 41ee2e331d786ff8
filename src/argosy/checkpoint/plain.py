"""Plain values as they are stored, for people to read. Pure, and without torch."""

from collections.abc import Iterable
from itertools import islice
from typing import Any, cast

from argosy.transfer import Value

WIDTH = 80
DEPTH = 2
"""A dict of lists is shown; what is in those only if it is no container."""


def in_a_line(value: Value, width: int = WIDTH) -> str:
    """A value in at most `width` characters; containers that are nested deeply are only hinted at."""
    text = _text(value, DEPTH, width)
    return text if len(text) <= width else f"{text[: width - 1]}…"


def _text(value: Value, depth: int, width: int) -> str:
    if isinstance(value, str):
        return repr(value[:width])
    if isinstance(value, list):
        return _joined("[]", (_text(each, depth - 1, width) for each in cast("list[Any]", value)), depth, width)
    if not isinstance(value, dict):
        return str(value)
    marked = cast("dict[str, Any]", value)
    if "$tensor" in marked:
        return f"<{marked['$tensor']}>"
    for mark in ("$float", "$int"):
        if mark in marked:
            return str(marked[mark])
    if "$tuple" in marked:
        return _joined("()", (_text(each, depth - 1, width) for each in marked["$tuple"]), depth, width)
    pairs: Iterable[tuple[Any, Any]] = marked["$items"] if "$items" in marked else marked.items()
    return _joined("{}", (f"{_key(key)}: {_text(each, depth - 1, width)}" for key, each in pairs), depth, width)


def _key(key: Any) -> str:
    """Names as they are; what is not text, or odd text, can be told from them."""
    return key if isinstance(key, str) and key.isidentifier() else repr(key)


def _joined(around: str, parts: Iterable[str], depth: int, width: int) -> str:
    """No more parts than the line could take are looked at."""
    taken = islice(parts, width if depth > 0 else 1)
    text = ", ".join(taken if depth > 0 else ["…" for _ in taken])
    return f"{around[0]}{text}{around[1]}"
