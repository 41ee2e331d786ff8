"""What the words of a run take: what is of a wrong kind is refused where it is written, not where it is used."""

from pathlib import Path
from typing import Any

from argosy.checkpoint import checked_keep
from argosy.core import ConfigError
from argosy.train.spikes import Spike


def check_count(what: str, value: Any, least: int = 1) -> None:
    """Refuse what is no whole number, or too small."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{what} must be a whole number of at least {least}: {value!r}")


def check_run(save_every: Any, save_every_s: Any, keep: Any, spike: Any) -> None:
    """Refuse arguments of `Run` that it could not use.

    Raises:
        ConfigError: it names the first of them.
    """
    check_count("save_every", save_every)
    if isinstance(save_every_s, bool) or not isinstance(save_every_s, int | float) or not save_every_s > 0:
        raise ConfigError(f"save_every_s must be a number of seconds above 0: {save_every_s!r}")
    checked_keep([] if keep is None else keep)
    if spike is not None and not isinstance(spike, Spike):
        raise ConfigError(
            f"spike must be a Spike: {spike!r}", hint="from argosy.train import Spike; Run(spike=Spike())"
        )


def check_name(what: str, name: Any) -> None:
    if not isinstance(name, str):
        raise ConfigError(f"{what} takes a name: {name!r}")


def check_directory(directory: Path) -> None:
    """Make it, if it is not there."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        said = "it is a file" if directory.is_file() else error.strerror
        raise ConfigError(f"{directory} cannot be used as a run directory: {said}") from error


def check_whole(broken: str) -> None:
    """Refuse to go on where an exception of the script has left a step in between, or this rank to itself."""
    if broken:
        raise ConfigError(
            f"{broken} and the script caught it: the run cannot continue in this process",
            hint="let the exception leave the loop, or catch it inside the block, before optimizer.step()",
        )


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
