"""A rank's pocket: memory that outlives it, with the last two steps of what no other rank has.

P1  A version counts when it is whole: a rank that dies while it writes leaves the one before.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import mmap
import os
import pickle
import struct
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from argosy.train.tracking import Capsule

_HEAD = struct.Struct("<QQQ")
"""Step + 1 (0: not whole), bytes of the description, bytes of the tensors."""
_ALIGN = 64
Kind = str
"""`full` has all of a rank's state, `local` what is its alone."""


class Place(NamedTuple):
    """Where a tensor lies among the bytes."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int


class Packed(NamedTuple):
    """How a capsule becomes bytes: its description, and where the tensors go."""

    description: bytes
    places: list[Place]
    size: int


def plan(capsule: Capsule) -> Packed:
    """Lay a capsule's tensors out one after the other."""
    places: list[Place] = []
    at = 0
    for name, tensor in capsule.tensors.items():
        places.append(Place(name, tensor.dtype, tuple(tensor.shape), at))
        at += -(-tensor.nbytes // _ALIGN) * _ALIGN
    return Packed(pickle.dumps((places, capsule.values)), places, at)


def write(packed: Packed, capsule: Capsule, into: Tensor) -> None:
    """Copy the tensors into bytes."""
    with torch.no_grad():
        for place, view in _views(packed.places, into):
            view.copy_(capsule.tensors[place.name])


def unpack(description: bytes, content: Tensor) -> Capsule:
    """The capsule whose tensors lie in `content`."""
    places, values = pickle.loads(description)
    return Capsule({place.name: view for place, view in _views(places, content)}, values)


def _views(places: list[Place], content: Tensor) -> "list[tuple[Place, Tensor]]":
    found: list[tuple[Place, Tensor]] = []
    for place in places:
        count = torch.Size(place.shape).numel() * place.dtype.itemsize
        found.append((place, content[place.offset : place.offset + count].view(place.dtype).view(place.shape)))
    return found


class Pocket:
    """The pocket of one rank; `folder` lies in shared memory and lives as long as the run."""

    def __init__(self, folder: Path, rank: int) -> None:
        self._paths = [folder / f"{rank}.pocket{number}" for number in (0, 1)]
        self._maps: dict[int, mmap.mmap] = {}

    def put(self, step: int, kind: Kind, capsule: Capsule) -> None:
        """Keep what the rank has after `step` steps; the version before the last one goes.

        Raises:
            OSError: there is no room; the last version stays.
        """
        description_of = plan(Capsule(capsule.tensors, {"kind": kind, "values": capsule.values}))
        total = _HEAD.size + len(description_of.description) + _ALIGN + description_of.size
        memory = self._room(step % 2, total)
        memory[:8] = bytes(8)  # P1
        at = _HEAD.size + len(description_of.description)
        memory[_HEAD.size : at] = description_of.description
        if description_of.size:
            start = -(-at // _ALIGN) * _ALIGN
            content = torch.frombuffer(memory, dtype=torch.uint8, count=description_of.size, offset=start)
            write(description_of, capsule, content)
            del content
        _HEAD.pack_into(memory, 0, 0, len(description_of.description), description_of.size)
        memory[:8] = struct.pack("<Q", step + 1)

    def steps(self, kind: Kind) -> list[int]:
        """The steps of which a version of this kind is whole."""
        found = (self._read(number) for number in (0, 1))
        return sorted(step for step, what, _ in filter(None, found) if what == kind)

    def get(self, step: int, kind: Kind) -> Capsule | None:
        """The version of a step, in memory of its own."""
        found = self._read(step % 2)
        if found is None or found[:2] != (step, kind):
            return None
        return Capsule({name: tensor.clone() for name, tensor in found[2].tensors.items()}, found[2].values)

    def _read(self, number: int) -> tuple[int, Kind, Capsule] | None:
        try:
            with open(self._paths[number], "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        mark, length, size = _HEAD.unpack_from(memory)
        if not mark:
            return None
        at = _HEAD.size + length
        start = -(-at // _ALIGN) * _ALIGN
        content = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        capsule = unpack(memory[_HEAD.size : at], content)
        values: dict[str, Any] = capsule.values
        return mark - 1, values["kind"], Capsule(capsule.tensors, values["values"])

    def _room(self, number: int, size: int) -> mmap.mmap:
        known = self._maps.get(number)
        if known is not None and len(known) >= size:
            return known
        fd = os.open(self._paths[number], os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size + size // 8)
            self._maps[number] = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        return self._maps[number]
