"""Plain values as they are stored: JSON, with marks for what it cannot say. Pure, and without torch.

The marks: `{"$tensor": name}`, `{"$tuple": [...]}`, `{"$float": "inf"}`, `{"$int": "0x1ffffffffffffffff"}` for more
than 64 bits, and where keys are not text `{"$items": [[key, value], ...]}`.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast


def grown(value: Any, tensor: Callable[[str], Any]) -> Any:
    """What a description took apart: lists, tuples, dicts of any keys; `tensor` gives those of a name."""
    if isinstance(value, list):
        return [grown(inner, tensor) for inner in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    tree = cast(dict[str, Any], value)
    if "$float" in tree:
        return float(tree["$float"])
    if "$int" in tree:
        return int(tree["$int"], 16)
    if "$tensor" in tree:
        return tensor(tree["$tensor"])
    if "$tuple" in tree:
        return tuple(grown(inner, tensor) for inner in tree["$tuple"])
    items: list[tuple[Any, Any]] = tree["$items"] if "$items" in tree else list(tree.items())
    return {grown(key, tensor): grown(inner, tensor) for key, inner in items}


def holds_values(value: Any) -> bool:
    """Whether there is anything but tensors in it, grown or not."""
    if isinstance(value, dict):
        tree = cast(dict[Any, Any], value)
        inside = [each for _, each in tree["$items"]] if "$items" in tree else tree.values()
        return "$tensor" not in tree and any(map(holds_values, inside))
    if isinstance(value, list | tuple):
        return any(map(holds_values, cast(list[Any], value)))
    return not hasattr(value, "shape")


def references(value: Any) -> Iterator[str]:
    """The names of the tensors that values refer to."""
    if isinstance(value, dict):
        tree = cast(dict[str, Any], value)
        if "$tensor" in tree:
            yield tree["$tensor"]
        for inner in tree.values():
            yield from references(inner)
    elif isinstance(value, list):
        for inner in cast(list[Any], value):
            yield from references(inner)


def referring(value: Any, names: Mapping[str, str]) -> Any:
    """The same values with references to tensors of other names."""
    if isinstance(value, list):
        return [referring(inner, names) for inner in cast(list[Any], value)]
    if not isinstance(value, dict):
        return value
    tree = cast(dict[str, Any], value)
    if "$tensor" in tree:
        return {"$tensor": names.get(tree["$tensor"], tree["$tensor"])}
    return {key: referring(inner, names) for key, inner in tree.items()}
