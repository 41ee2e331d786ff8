"""Values other than tensors, as JSON can hold them, with torch."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import math
import re
from typing import Any

import numpy as np
from torch import Tensor

from argosy.core import ConfigError
from argosy.transfer.units import Value

FLOAT, INT = "$float", "$int"
SURROGATE = re.compile("[\ud800-\udfff]")
DEPTH = 64
"""Containers inside of each other: more is a mistake, and JSON's readers give up at a thousand."""


def key_of(name: str, key: Any) -> Value:
    """A key of a dict as JSON can say it."""
    if isinstance(key, tuple):
        return {"$tuple": [key_of(name, each) for each in key]}
    if not is_value(key) or isinstance(key, Tensor | np.generic):
        raise ConfigError(f"{name} cannot be kept: one of its keys is a {type(key).__name__}")
    return value_of(key)


def is_option(where: str, key: str, value: Any) -> bool:
    """Whether an entry of an optimizer's group is an option: not its parameters and their names, and not code."""
    if key in ("params", "param_names") or is_value(value):
        return key not in ("params", "param_names")
    if isinstance(value, Tensor | np.ndarray | list | tuple | dict | set | frozenset | bytes | complex | int):
        raise ConfigError(
            f"{where} has {key!r}, a {type(value).__name__} that cannot be kept",
            hint="numbers, strings, and lists and dicts of them can; give it to the dict under a name of its own",
        )
    return False


def is_value(value: Any, depth: int = DEPTH) -> bool:
    """Whether JSON can say it, or it is a tensor of one number."""
    if isinstance(value, list | tuple):
        return depth > 0 and all(is_value(inner, depth - 1) for inner in value)
    if isinstance(value, dict):
        return depth > 0 and all(isinstance(key, str) and is_value(each, depth - 1) for key, each in value.items())
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str):
        return value.isascii() or not SURROGATE.search(value)  # JSON is UTF-8.
    return value is None or isinstance(value, int | float) or _is_number(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1 and not value.is_complex()


def value_of(value: Any) -> Value:
    """The same as JSON can say it, which knows no infinity, and of whose integers some readers keep 64 bits."""
    if isinstance(value, list | tuple):
        return [value_of(inner) for inner in value]
    if isinstance(value, dict):
        return {key: value_of(inner) for key, inner in value.items()}
    if isinstance(value, Tensor | np.generic):
        value = value.item()
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return {INT: hex(value)}
    return {FLOAT: str(value)} if isinstance(value, float) and not math.isfinite(value) else value


def from_value(value: Value) -> Any:
    """What `value_of` was given, but lists for tuples."""
    if isinstance(value, dict):
        found = {key: from_value(inner) for key, inner in value.items()}
        return float(found[FLOAT]) if FLOAT in found else int(found[INT], 16) if INT in found else found
    return [from_value(inner) for inner in value] if isinstance(value, list) else value
