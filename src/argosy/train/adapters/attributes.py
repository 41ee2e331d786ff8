"""What a framework's object keeps in attributes of its own between steps: counters, averages, rollouts.

Only plain data: numbers, texts, tensors, and containers of them. Everything else belongs to the process.
"""

import pickle
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any, cast

from torch import Tensor

_LEAVES = (type(None), bool, int, float, complex, str, bytes)
_LARGE = 1 << 20
"""Bytes of an attribute that is larger before the first step: a dataset, not a counter."""


class Attributes:
    """The plain attributes of one object, except some names."""

    def __init__(self, owner: object, without: Iterable[str] = ()) -> None:
        self._owner, self._left_out = owner, {*without}
        self._left_out |= {name for name, data in self.take().items() if len(data) > _LARGE}

    def take(self) -> dict[str, bytes]:
        """Copies of all of them."""
        found: dict[str, bytes] = {}
        for name, value in vars(self._owner).items():
            if name not in self._left_out:
                with suppress(TypeError):
                    found[name] = pickle.dumps(plain(value))
        return found

    def give(self, found: Mapping[str, bytes]) -> None:
        """Set those that differ from `found`; containers stay the same objects."""
        now = self.take()
        for name, data in found.items():
            if now.get(name) != data:
                old = getattr(self._owner, name, None)
                setattr(self._owner, name, _filled(old, pickle.loads(data)))


def plain(value: Any) -> Any:
    """The value, in containers that can be pickled.

    Raises:
        TypeError: it is no plain data.
    """
    if type(value) in _LEAVES or (type(value) is Tensor and not value.requires_grad):
        return value
    if isinstance(value, dict):
        each = cast("dict[Any, Any]", value)
        return {plain(key): plain(inner) for key, inner in each.items()}
    if type(value) in (list, tuple, set, deque):
        items = [plain(each) for each in cast("Sequence[Any]", value)]
        return tuple(items) if isinstance(value, tuple) else set(items) if isinstance(value, set) else items
    raise TypeError(f"not plain data: {type(value)}")


def _filled(old: Any, new: Any) -> Any:
    """`old`, with the content of `new` if it is a container of that kind; else `new`."""
    if isinstance(old, dict) and isinstance(new, dict):
        known, wanted = cast("dict[Any, Any]", old), cast("dict[Any, Any]", new)
        for key in [key for key in known if key not in wanted]:
            del known[key]
        for key, value in wanted.items():
            known[key] = _filled(_of(known, key), value)
        return known
    if isinstance(old, list | deque) and isinstance(new, list):
        held = cast("list[Any] | deque[Any]", old)
        held.clear()
        held.extend(cast("list[Any]", new))
        return held
    return new


def _of(known: dict[Any, Any], key: Any) -> Any:
    """The value of a key; a dict that makes values by itself makes one."""
    try:
        return known[key]
    except KeyError:
        return None
