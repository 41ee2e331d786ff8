"""An unhandled exception with a cause, a context, notes and frames in several files."""

import functools
import json


def innermost(key: str) -> int:
    return {}[key]


@functools.lru_cache
def middle(key: str) -> int:
    try:
        return innermost(key)
    except KeyError as error:
        raise ValueError(f"no such cargo: {key}") from error


class Manifest:
    def total(self) -> int:
        try:
            return middle("salt")
        finally:
            json.loads("{")


def main() -> None:
    try:
        Manifest().total()
    except ValueError as error:
        error.add_note("while unloading")
        raise ExceptionGroup("two at once", [error, OSError(2, "gone", "manifest.json")]) from None


main()
