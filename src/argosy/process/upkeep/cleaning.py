"""Decide what `argosy clean` removes.

Pure: `remains.py` looks at the disk and removes.

C1  What is alive is never touched.
C2  A run with checkpoints stays as it is unless checkpoints were asked for.
C3  A file that Argosy did not write is never removed, and so neither is the directory that holds it.
C4  Nothing is removed that was not selected.
"""

import re
from collections.abc import Sequence
from typing import Literal

import msgspec

from argosy.core import ConfigError

CHECKPOINT_SUFFIXES = (".pt", ".pth", ".safetensors", ".ckpt", ".distcp")
YOUNG_S = 10.0
"""Daemons that start make their directory first and can be seen in it a little later."""

_OURS = (
    re.compile(r"run\.json|owner\.json|events|\.(run|owner)\.json\.\d+"),
    re.compile(r"logs/\d+/\d+\.\d+\.(out|err)(\.1(\.new)?)?"),
    re.compile(r"incidents/\d{13}-\w+(-\d+\.\d+)?/\.?(incident\.json|stacks\.txt)(\.\d+)?"),
)
_SECONDS = {"s": 1, "min": 60, "m": 60, "h": 3600, "d": 86400, "w": 604800}
_BYTES = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Selection(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked to have removed: all that is given must hold."""

    directories: frozenset[str] = frozenset()
    leftovers: bool = False
    """What dead daemons left, by name."""
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
        """Nothing is named, so that everything is looked at."""
        return not self.directories and not self.leftovers and (self.everything or self.limited)


class Found(msgspec.Struct, frozen=True):
    """A file below a run's directory, with the disk space that it takes."""

    path: str
    bytes: int


class RunRemains(msgspec.Struct, frozen=True, kw_only=True):
    """What a run has on disk. Paths are relative to its directory."""

    name: str
    directory: str
    ended_at: float
    alive: str = ""
    """Why it must not be touched."""
    shared: str = ""
    """Why its directory is not for Argosy to remove, nor checkpoints in it."""
    ours: list[Found] = []
    checkpoints: list[Found] = []
    strangers: int = 0

    @property
    def bytes(self) -> int:
        return sum(file.bytes for file in (*self.ours, *self.checkpoints))


class Leftover(msgspec.Struct, frozen=True, kw_only=True):
    """What belongs to no run's directory; `daemons` live and wait for the next run."""

    kind: Literal["daemons", "runtime", "segments", "cgroups", "index", "cache"]
    path: str
    bytes: int = 0
    since: float = 0.0
    alive: str = ""


class Removal(msgspec.Struct, frozen=True, kw_only=True):
    """A decision about one thing: it goes whole, in part (`files`), or is kept; and why."""

    kind: Literal["run", "daemons", "runtime", "segments", "cgroups", "index", "cache"]
    name: str
    path: str
    action: Literal["remove", "part", "keep"]
    reason: str
    bytes: int = 0
    checkpoints: int = 0
    files: list[str] = []


def plan_cleaning(
    runs: Sequence[RunRemains], leftovers: Sequence[Leftover], selection: Selection, now: float
) -> list[Removal]:
    """Return a decision for everything that the selection speaks of, in the order in which to act."""
    daemons = [each for each in leftovers if each.kind == "daemons"]
    others = [each for each in leftovers if each.kind != "daemons"]
    decisions = [_decide_leftover(each, selection, now) for each in daemons]
    decisions += [_decide_run(run, selection, now) for run in runs]
    decisions += [_decide_leftover(each, selection, now) for each in others]
    return [each for each in decisions if each is not None]


def classify(path: str, *, linked: bool) -> Literal["ours", "checkpoint", "stranger"]:
    """Say whose a file below a run's directory is. A link is judged by its name, never by its target."""
    if path == "checkpoints" or path.startswith("checkpoints/") or path.endswith(CHECKPOINT_SUFFIXES):
        return "checkpoint"
    return "ours" if not linked and any(pattern.fullmatch(path) for pattern in _OURS) else "stranger"


def parse_age(text: str) -> float:
    """`90s`, `30min`, `12h`, `7d`, `2w`: seconds.

    Raises:
        ConfigError: not a time.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w)", text.strip().lower())
    if match is None:
        raise ConfigError(f"not a time: {text!r}", hint="write 30min, 12h, 7d or 2w")
    return float(match[1]) * _SECONDS[match[2]]


def parse_size(text: str) -> int:
    """`500M`, `1G`, `1.5GB`, `1GiB`: bytes, in powers of 1024.

    Raises:
        ConfigError: not a size.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?", text.strip().lower())
    if match is None:
        raise ConfigError(f"not a size: {text!r}", hint="write 500M, 1G or 1.5T")
    return int(float(match[1]) * _BYTES[match[2]])


def format_bytes(count: int) -> str:
    """`24 kB`, `12.3 MB`, `1.2 GB`; powers of 1024."""
    if count >= 1 << 30:
        return f"{count / (1 << 30):.1f} GB"
    return f"{count / (1 << 20):.1f} MB" if count >= 1 << 20 else f"{count / 1024:.0f} kB"


def _decide_run(run: RunRemains, selection: Selection, now: float) -> Removal | None:
    if run.directory not in selection.directories and not selection.sweeping:  # C4
        return None
    if run.alive:  # C1
        return _keep(run, run.alive)
    if (limit := _limit(selection, now - run.ended_at, run.bytes)) is not None:
        return _keep(run, limit)
    if run.checkpoints and not selection.checkpoints:  # C2
        return _keep(run, f"{_count(len(run.checkpoints), 'checkpoint file')}: see --checkpoints")
    going = list(run.ours)
    if run.checkpoints and not run.shared:
        # Among a person's own files, only the folder that is named so holds checkpoints for sure (C3).
        certain = [file for file in run.checkpoints if file.path.startswith("checkpoints/")]
        going += certain if run.strangers else run.checkpoints
    staying = run.strangers + len(run.ours) + len(run.checkpoints) - len(going)
    if run.shared:
        action, reason = "part", f"{run.shared}: only Argosy's files go"
    elif staying:
        action, reason = "part", f"{_count(staying, 'file')} not Argosy's: kept"
    else:
        action, reason = "remove", "ended"
    if len(going) > len(run.ours):
        reason += f"; with {_count(len(going) - len(run.ours), 'checkpoint file')}"
    return Removal(
        kind="run",
        name=run.name,
        path=run.directory,
        action=action,
        reason=reason,
        bytes=sum(file.bytes for file in going),
        checkpoints=len(going) - len(run.ours),
        files=[file.path for file in going],
    )


def _decide_leftover(each: Leftover, selection: Selection, now: float) -> Removal | None:
    if each.kind in ("daemons", "index", "cache"):
        if not selection.sweeping or selection.limited:
            return None
    elif not selection.leftovers and not selection.sweeping:
        return None
    reason = {
        "daemons": "idle; stopped",
        "runtime": "its warden is gone",
        "segments": "its daemons are gone",
        "cgroups": "empty; their agents are gone",
        "index": "the run's directory is gone",
        "cache": "can be made again",
    }[each.kind]
    action: Literal["remove", "keep"] = "remove"
    limit = _limit(selection, now - each.since, each.bytes)
    if each.alive:  # C1
        action, reason = "keep", each.alive
    elif each.kind in ("runtime", "segments") and now - each.since < YOUNG_S:
        action, reason = "keep", "used a moment ago: daemons may be starting"
    elif limit is not None:
        action, reason = "keep", limit
    name = each.path if each.kind != "index" else each.path.rpartition("/")[2].rpartition("@")[0]
    return Removal(kind=each.kind, name=name, path=each.path, action=action, reason=reason, bytes=each.bytes)


def _limit(selection: Selection, age_s: float, size: int) -> str | None:
    """Why age or size spare it."""
    if selection.older_than_s is not None and age_s <= selection.older_than_s:
        return "younger than asked for"
    if selection.larger_than is not None and size <= selection.larger_than:
        return "smaller than asked for"
    return None


def _keep(run: RunRemains, reason: str) -> Removal:
    return Removal(kind="run", name=run.name, path=run.directory, action="keep", reason=reason)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
