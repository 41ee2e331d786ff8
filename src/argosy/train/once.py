"""Values that are made once per step, whatever happens to its attempts."""

import pickle
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.core import ConfigError


class Once:
    """Keeps them, pickled, until the step counts: in memory that outlives the rank where there is some.

    Each attempt gets a copy of its own: what it does to the value does not reach the next attempt.
    """

    def __init__(self, folder: Path | None, rank: int) -> None:
        self._path = None if folder is None else folder / f"{rank}.once"
        self._values: dict[tuple[int, str], bytes] = self._read()

    def get(self, step: int, name: str, make: Callable[[], Any], *, rehearsal: bool) -> Any:
        """The value for a step; one that is made in a rehearsal, perhaps from other data, is not kept.

        Raises:
            ConfigError: the value cannot be pickled.
        """
        key = (step, name)
        if key not in self._values:
            made = make()
            if rehearsal:
                return made
            try:
                self._values[key] = pickle.dumps(made)
            except (pickle.PicklingError, TypeError, AttributeError) as error:
                raise ConfigError(f"the value of step.once cannot be pickled: {name!r}: {error}") from error
            if self._path is not None:
                self._write(self._path)
        return pickle.loads(self._values[key])

    def forget(self, before: int | None = None) -> None:
        """Forget the values of steps before `before`, or of all."""
        kept = {} if before is None else {key: value for key, value in self._values.items() if key[0] >= before}
        if kept != self._values:
            self._values = kept
            if self._path is not None:
                self._write(self._path)

    def _write(self, path: Path) -> None:
        temporary = path.with_suffix(".new")
        temporary.write_bytes(pickle.dumps(self._values))
        temporary.replace(path)

    def _read(self) -> dict[tuple[int, str], bytes]:
        if self._path is not None:
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                return pickle.loads(self._path.read_bytes())
        return {}
