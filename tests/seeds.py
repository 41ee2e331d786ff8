"""Many inputs for a pure function, in one test: as a test each, pytest would take longer than what is tested."""

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(name: str, values: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call the test with each value of the parameter `name`, each in an empty `tmp_path`; a failure names the value."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def call_each(**arguments: Any) -> None:
            for number, value in enumerate(values):
                if (place := arguments.get("tmp_path")) is not None:
                    (place / f"{number}").mkdir()
                try:
                    test(**arguments | {name: value} | ({"tmp_path": place / f"{number}"} if place else {}))
                except BaseException as error:
                    error.add_note(f"{name}: {value!r}")
                    raise

        signature = inspect.signature(test)
        others = [parameter for parameter in signature.parameters.values() if parameter.name != name]
        call_each.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return call_each

    return decorate
