"""Doors that open on demand: a package's names are imported when they are first used."""

from collections.abc import Callable, Mapping
from importlib import import_module


def lazy(package: str, homes: Mapping[str, str]) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` and `__all__` for a package whose names live in `homes` (name to module)."""

    def __getattr__(name: str) -> object:
        home = homes.get(name)
        if home is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(home), name)

    return __getattr__, sorted(homes)
