"""Restart policies, one module each, found by name; `docs/contributing.md` shows how to add one.

A policy offers `affected(failed, dims, along)`: the indices to replace when rank `failed` of a mesh with
dimensions `dims` (row-major, name to extent) is lost. `along` is what stood behind the colon.
"""

from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pkgutil import iter_modules

Affected = Callable[[int, Mapping[str, int], str], Sequence[int]]

POLICIES: dict[str, Affected] = {
    module.name: import_module(f"{__name__}.{module.name}").affected for module in iter_modules(__path__)
}
"""The policies by name: every module of this folder."""
