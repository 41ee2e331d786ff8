"""Call a function after a module has been imported; imports nothing itself."""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


class _ImportHook:
    """A finder that delegates to the other finders, and wraps the loader of a watched module."""

    def __init__(self, names: Iterable[str], action: Callable[[], None]) -> None:
        self._waiting, self._action = set(names), action

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in self._waiting:
            return None
        self._waiting.discard(name)
        if not self._waiting:
            sys.meta_path.remove(self)
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec = find(name, path, target) if find is not None and finder is not self else None
            if spec is not None:
                with suppress(Exception):
                    self._wrap(spec.loader)
                return spec
        return None

    def _wrap(self, loader: Any) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            del loader.exec_module  # The module keeps its original loader.
            original(module)
            # While torch itself is being imported, its submodules are not ready to be patched.
            top = sys.modules.get(module.__name__.partition(".")[0])
            if top is module or not getattr(getattr(top, "__spec__", None), "_initializing", False):
                with suppress(Exception):
                    self._action()

        loader.exec_module = exec_module


def when_imported(names: Iterable[str], action: Callable[[], None]) -> None:
    """Call `action` after each of `names` has been imported; its exceptions are suppressed."""
    sys.meta_path.insert(0, _ImportHook(names, action))
