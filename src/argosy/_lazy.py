"""Packages that import a name when it is first used. The names are listed once: under `if TYPE_CHECKING`."""

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any


def lazy(package: str) -> tuple[Callable[[str], object], list[str]]:
    """Return `__getattr__` and `__all__` for the names that `package` imports under `if TYPE_CHECKING`.

    Each is read from a line `from module import name as name` of the package's source; a module of the package itself
    is such a name, too.
    """
    loader: Any = sys.modules[package].__loader__
    lines = [line.split() for line in loader.get_source(package).splitlines() if line.startswith("    from ")]
    homes = {name: home for _, home, _, name, _, _ in lines}

    def __getattr__(name: str) -> object:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        if homes[name] == package:
            return import_module(f"{package}.{name}")
        return getattr(import_module(homes[name]), name)

    return __getattr__, sorted(homes)
