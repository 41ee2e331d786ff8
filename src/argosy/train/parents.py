"""Which checkpoint a run branches off from."""

from pathlib import Path

from argosy.core import ConfigError


def parse_parent(parent: str | Path | None) -> tuple[Path, int | None] | None:
    """Read `directory` or `directory@step`.

    Raises:
        ConfigError: what follows the @ is no number, or there is no such directory.
    """
    if parent is None:
        return None
    text, step = str(parent), None
    head, at, tail = text.rpartition("@")
    if at and "/" not in tail:
        if not tail.isdigit():
            raise ConfigError(f"the step after @ must be a number: {text!r}")
        text, step = head, int(tail)
    if "://" not in text and not Path(text).is_dir():
        raise ConfigError(f"no such run: {text}", hint='a parent is a directory, or "directory@step"')
    return Path(text), step
