"""Replace the ranks that share the failed rank's index along one dimension, such as a data-parallel replica."""

from collections.abc import Mapping, Sequence
from math import prod

from argosy.core import ConfigError


def affected(failed: int, dims: Mapping[str, int], along: str) -> Sequence[int]:
    """The slice of the mesh at the failed rank's index along `along`."""
    if along not in dims:
        raise ConfigError(f"no such mesh dimension: {along!r}", hint=f"this mesh has {', '.join(dims)}")
    names = list(dims)
    inner = prod(dims[name] for name in names[names.index(along) + 1 :])

    def coordinate(index: int) -> int:
        return index // inner % dims[along]

    return [index for index in range(prod(dims.values())) if coordinate(index) == coordinate(failed)]
