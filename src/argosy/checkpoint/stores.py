"""Where checkpoints are: a run's directory."""

from pathlib import Path

from argosy.checkpoint.files import Files, LocalFiles
from argosy.checkpoint.format import step_of

CHECKPOINTS = "checkpoints"


def checkpoints_dir(path: str | Path) -> Path:
    """The directory of checkpoints: `checkpoints` of a run's directory, or the given one if it holds steps itself."""
    directory = Path(path)
    inner = directory / CHECKPOINTS
    if (
        not inner.is_dir()
        and directory.is_dir()
        and any(step_of(each.name) is not None for each in directory.iterdir())
    ):
        return directory
    return inner


def open_files(path: str | Path) -> tuple[Files, str]:
    """Open for reading, and say what it is."""
    return LocalFiles(checkpoints_dir(path)), "disk"
