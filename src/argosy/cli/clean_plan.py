"""Decide what `argosy clean` removes.

Pure: `clean_find.py` reads the disk, `clean_do.py` removes.

C1  What is alive is never touched.
C2  A run with checkpoints stays as it is unless the user asks for checkpoints to go.
C3  A file that Argosy did not write is never removed, nor is the directory that holds it.
C4  Nothing is removed that was not selected.
"""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from argosy.core import ConfigError

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".safetensors", ".ckpt", ".distcp")
YOUNG_S = 10.0
"""Daemons that start make their directory a moment before they can be seen in it."""

_OURS = re.compile(
    r"run\.json|owner\.json|events|\.(run|owner)\.json\.\d+|finished\.(json|new)|report\.html|\.report\.html\.new"
    r"|metrics/log|(hosts/[^/]+/)?metrics/\d+/(spans|samples|(start|peak)\.json|\d+\.\d+\.journal)"
    r"|logs/\d+/\d+\.\d+\.((out|err)(\.1(\.new)?)?|error\.json)"
    r"|incidents/\d{13}-\w+(-\d+\.\d+)?/\.?(incident\.json|stacks\.txt)(\.\d+)?"
)
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}

Kind = Literal["daemons", "run", "leftover", "cache"]
_REASONS = {"daemons": "idle", "leftover": "its daemons were killed", "cache": "is made again when needed"}


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What the user asked to remove: an item must match all that is given."""

    directories: frozenset[str] = frozenset()
    leftovers: bool = False
    everything: bool = False
    older_than_s: float | None = None
    larger_than: int | None = None
    checkpoints: bool = False

    @property
    def given(self) -> bool:
        return bool(self.directories) or self.leftovers or self.sweeping

    @property
    def limited(self) -> bool:
        return self.older_than_s is not None or self.larger_than is not None

    @property
    def sweeping(self) -> bool:
        """Nothing is named, so everything is considered."""
        return not self.directories and not self.leftovers and (self.everything or self.limited)


class File(msgspec.Struct, frozen=True):
    """A file of an item, relative to its path, and the disk space that it takes."""

    path: str
    bytes: int


class Item(msgspec.Struct, frozen=True, kw_only=True):
    """Something of Argosy's on this machine. `daemons` are alive, a `leftover` belongs to killed ones."""

    kind: Kind
    name: str
    path: str
    since: float = 0.0
    """When the run ended, or when the path was last changed."""
    alive: str = ""
    """Why it must not be touched."""
    shared: str = ""
    """Why the run's directory, and checkpoints in it, are not Argosy's to remove."""
    ours: list[File] = []
    checkpoints: list[File] = []
    strangers: int = 0
    """Files that Argosy did not write."""

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in (*self.ours, *self.checkpoints))


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """The decision about one item: it is removed, in part (`files`), or kept; and why."""

    item: Item
    action: Literal["remove", "part", "keep"]
    reason: str
    files: list[File] = []

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in self.files)

    @property
    def checkpoints(self) -> int:
        return sum(file in self.item.checkpoints for file in self.files)


def plan_cleaning(items: Sequence[Item], selection: Selection, now: float) -> list[Removal]:
    """Return a decision for every item that is selected, in the order in which to act."""
    order = ("daemons", "run", "leftover", "cache")
    selected = [item for item in items if _is_selected(item, selection)]  # C4
    return [_decide(item, selection, now) for item in sorted(selected, key=lambda item: order.index(item.kind))]


def _is_selected(item: Item, selection: Selection) -> bool:
    match item.kind:
        case "run":
            return item.path in selection.directories or selection.sweeping
        case "leftover":
            return selection.leftovers or selection.sweeping
        case _:
            return selection.sweeping and not selection.limited


def _decide(item: Item, selection: Selection, now: float) -> Removal:
    keep = item.alive  # C1
    if not keep and item.kind == "leftover" and now - item.since < YOUNG_S:
        keep = "changed a moment ago: daemons may be starting"
    if not keep and selection.older_than_s is not None and now - item.since <= selection.older_than_s:
        keep = "too young"
    if not keep and selection.larger_than is not None and item.bytes <= selection.larger_than:
        keep = "too small"
    if not keep and item.checkpoints and not selection.checkpoints:  # C2
        keep = f"{count(len(item.checkpoints), 'checkpoint file')}: add --checkpoints"
    if keep:
        return Removal(item=item, action="keep", reason=keep)
    if item.kind != "run":
        return Removal(item=item, action="remove", reason=_REASONS[item.kind], files=item.ours)
    going = list(item.ours)
    if not item.shared:
        # Next to files of the user's own, only the folder `checkpoints` holds checkpoints for sure (C3).
        certain = [file for file in item.checkpoints if file.path.startswith("checkpoints/")]
        going += certain if item.strangers else item.checkpoints
    staying = item.strangers + len(item.ours) + len(item.checkpoints) - len(going)
    reason = "ended"
    if item.shared:
        reason = f"{item.shared}: only Argosy's files"
    elif staying:
        reason = f"{count(staying, 'other file')} kept"
    if len(going) > len(item.ours):
        reason += f", with {count(len(going) - len(item.ours), 'checkpoint file')}"
    return Removal(item=item, action="part" if item.shared or staying else "remove", reason=reason, files=going)


def classify(path: str, *, linked: bool) -> Literal["ours", "checkpoint", "stranger"]:
    """Say whose a file below a run's directory is. A link is judged by its name, never by its target."""
    if path == "checkpoints" or path.startswith("checkpoints/") or path.endswith(CHECKPOINT_SUFFIXES):
        return "checkpoint"
    return "ours" if not linked and _OURS.fullmatch(path) else "stranger"


def parse_age(text: str) -> float:
    """`90s`, `30min`, `12h`, `7d`, `2w`: seconds; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)", text.strip().lower())
    if match is None:
        raise ConfigError(f"not a time: {text!r}", hint="write 30min, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(text: str) -> int:
    """`500M`, `1G`, `1.5GB`, `1GiB`: bytes, in powers of 1024; raises ConfigError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"not a size: {text!r}", hint="write 500M, 1G or 1.5T")
    return int(float(match[1]) * _BYTES[match[2]])


def format_bytes(count: int) -> str:
    """`248 B`, `24 kB`, `12.3 MB`, `1.2 GB`; powers of 1024."""
    for size, unit in ((1 << 40, "TB"), (1 << 30, "GB"), (1 << 20, "MB")):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count / 1024:.0f} kB" if count >= 1024 else f"{count} B"


def count(number: int, noun: str) -> str:
    """`1 file`, `2 files`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
