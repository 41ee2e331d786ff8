"""A rank's pocket: memory that outlives it, with the last two steps of what no other rank has.

P1  A version counts when it is whole: a rank that dies while it writes leaves the one before.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import mmap
import os
import pickle
import struct
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from argosy.train.tracking import Capsule

_HEAD = struct.Struct("<QQQQ")
"""The last step that it is of, plus one (0: not whole), the first one, bytes of the description and the tensors."""
_ALIGN = 64
Kind = Literal["full", "local", "final"]
"""All of a rank's state; what is its alone, as of the vote; and the same after the block, where that differs."""


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
        self._folder, self._rank = folder, rank
        self._maps: dict[Path, mmap.mmap] = {}
        self._newest: dict[Kind, Path] = {}

    def put(self, step: int, kind: Kind, capsule: Capsule) -> None:
        """Keep what the rank has after `step` steps; the version before the last one goes.

        Raises:
            OSError: there is no room; the last version stays.
        """
        packed = plan(capsule)
        at = _HEAD.size + len(packed.description)
        path = self._place_for(step, kind)
        memory = self._room(path, at + _ALIGN + packed.size)
        memory[:8] = bytes(8)  # P1
        memory[_HEAD.size : at] = packed.description
        if packed.size:
            start = -(-at // _ALIGN) * _ALIGN
            write(packed, capsule, torch.frombuffer(memory, dtype=torch.uint8, count=packed.size, offset=start))
        _HEAD.pack_into(memory, 0, 0, step, len(packed.description), packed.size)
        memory[:8] = struct.pack("<Q", step + 1)
        self._newest[kind] = path

    def extend(self, step: int, kind: Kind) -> bool:
        """Say that what was put last is also what the rank has after `step`; False if it is not of the step before."""
        path = self._newest.get(kind)
        if path is None:
            return False
        mark, first, _, _ = _HEAD.unpack_from(self._maps[path])
        if mark < step or first >= step:
            return False
        self._maps[path][:8] = struct.pack("<Q", step + 1)
        return True

    def steps(self, kind: Kind) -> list[int]:
        """The last steps of the versions of this kind that are whole."""
        return sorted(last for _, last, _ in self._versions(kind))

    def get(self, step: int, kind: Kind) -> Capsule | None:
        """The version of a step, where it lies."""
        return next((capsule for first, last, capsule in self._versions(kind) if first <= step <= last), None)

    def own_of(self, step: int) -> Capsule | None:
        """What a replica has for itself: as it was after the block, or else what the forward pass had changed."""
        if (final := self.get(step, "final")) is not None:
            return Capsule(final.tensors, {})
        voted = self.get(step, "local")
        return None if voted is None else Capsule({name: voted.tensors[name] for name in voted.values["changed"]}, {})

    def clear(self) -> None:
        """Forget all versions."""
        for path in self._folder.glob(f"{self._rank}.*[01]"):
            self._room(path, _HEAD.size)[:8] = bytes(8)

    def _paths(self, kind: Kind) -> list[Path]:
        return [self._folder / f"{self._rank}.{kind}{number}" for number in (0, 1)]

    def _place_for(self, step: int, kind: Kind) -> Path:
        """Where a version goes: not where that of the step before is."""
        paths = self._paths(kind)
        if kind not in self._newest:
            found = [self._read(path) for path in paths]
            return min(zip(found, paths, strict=True), key=lambda each: -1 if each[0] is None else each[0][1])[1]
        newest = self._newest[kind]
        mark, first, _, _ = _HEAD.unpack_from(self._maps[newest])
        if mark and first >= step:
            return newest
        if mark > step:
            self._maps[newest][:8] = struct.pack("<Q", step)
        return paths[1 - paths.index(newest)]

    def _versions(self, kind: Kind) -> list[tuple[int, int, Capsule]]:
        return [found for path in self._paths(kind) if (found := self._read(path)) is not None]

    def _read(self, path: Path) -> tuple[int, int, Capsule] | None:
        try:
            with open(path, "r+b") as file:
                memory = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        mark, first, length, size = _HEAD.unpack_from(memory)
        if not mark:
            return None
        at = _HEAD.size + length
        start = -(-at // _ALIGN) * _ALIGN
        content = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=start)
            if size
            else torch.empty(0, dtype=torch.uint8)
        )
        return first, mark - 1, unpack(memory[_HEAD.size : at], content)

    def _room(self, path: Path, size: int) -> mmap.mmap:
        known = self._maps.get(path)
        if known is not None and len(known) >= size:
            return known
        fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
        try:
            os.posix_fallocate(fd, 0, size + size // 8)
            self._maps[path] = mmap.mmap(fd, 0)
        finally:
            os.close(fd)
        return self._maps[path]
