"""The id of a rank, and the `0-3,7` notation for sets of ranks."""

from collections.abc import Iterable

import msgspec

from argosy.core.errors import ConfigError


class RankId(msgspec.Struct, frozen=True, order=True):
    """One process of a mesh. A replaced rank keeps mesh and index and gets the next generation."""

    mesh: str
    index: int
    generation: int = 0

    def __str__(self) -> str:
        return f"{self.mesh}/{self.index}.{self.generation}"


class ProcessId(msgspec.Struct, frozen=True):
    """A process: its pid, and its start time in clock ticks, which tells it from a later one of that pid."""

    pid: int
    start: int


def format_ranks(indices: Iterable[int]) -> str:
    """Write a set of indices as `0-3,7`."""
    parts: list[str] = []
    ordered = sorted(set(indices))
    start = 0
    for position, index in enumerate(ordered):
        if position + 1 < len(ordered) and ordered[position + 1] == index + 1:
            continue
        first = ordered[start]
        parts.append(str(first) if first == index else f"{first}-{index}")
        start = position + 1
    return ",".join(parts)


def parse_ranks(text: str, size: int) -> list[int]:
    """Read `0-3,7` as sorted indices below `size`.

    Raises:
        ConfigError: the text is malformed, or names a rank that does not exist.
    """
    indices: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise ConfigError(f"ranks must look like 0-3,7: {text!r}")
        span = range(int(first), int(last if dash else first) + 1)
        if not span:
            raise ConfigError(f"a range of ranks must ascend: {part.strip()!r}")
        if span[-1] >= size:
            raise ConfigError(f"rank does not exist among {size} (0-{size - 1}): {span[-1]}")
        indices.update(span)
    return sorted(indices)


def host_label(name: str) -> str:
    """What users call a host; the name among the nodes of a head has its run behind an `@`."""
    return name.rpartition("@")[0] or name
