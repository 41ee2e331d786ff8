"""Values that are made once per step, whatever happens to its attempts."""

import pickle
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.core import ArgosyError, ConfigError


class Once:
    """Keeps them, pickled, until the step counts: in memory that outlives the rank where there is some.

    Each attempt gets a copy of its own: what it does to the value does not reach the next attempt.
    """

    def __init__(self, folders: Sequence[Path], rank: int) -> None:
        self._paths = [folder / f"{rank}.once" for folder in folders]
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
            self._write()
        return pickle.loads(self._values[key])

    def put(self, step: int, name: str, value: Any) -> None:
        """Keep a value for a step that may be still to come, in the place of an earlier one."""
        self._values[step, name] = pickle.dumps(value)
        self._write()

    def kept(self, step: int, name: str) -> Any:
        """The value of a step, or None."""
        found = self._values.get((step, name))
        return None if found is None else pickle.loads(found)

    def forget(self, before: int | None = None) -> None:
        """Forget the values of steps before `before`, or of all."""
        kept = {} if before is None else {key: value for key, value in self._values.items() if key[0] >= before}
        if kept != self._values:
            self._values = kept
            self._write()

    def _write(self) -> None:
        """Into the first folder that takes them; then nothing older stays in others.

        Raises:
            ArgosyError: none does. A replacement of this rank would make other values.
        """
        kept: Path | None = None
        for path in self._paths:
            with suppress(OSError):  # It is full, or somebody has removed it.
                temporary = path.with_suffix(".new")
                temporary.write_bytes(pickle.dumps(self._values))
                kept = temporary.replace(path)
                break
        if kept is None and self._paths:
            raise ArgosyError(f"no room for the values of step.once in {self._paths[0].parent}")
        for path in self._paths:
            with suppress(OSError):
                if path != kept:
                    path.unlink(missing_ok=True)

    def _read(self) -> dict[tuple[int, str], bytes]:
        found: dict[tuple[int, str], bytes] = {}
        for path in self._paths:
            with suppress(OSError, EOFError, pickle.UnpicklingError):
                found |= pickle.loads(path.read_bytes())
        return found
