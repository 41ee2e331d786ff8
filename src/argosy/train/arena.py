"""A rank's arena: memory that outlives it, with the last two versions of what no other rank has.

A1  A version counts when it is sealed: a rank that dies while it writes leaves the one before.
A2  The version that a rank continues from is never overwritten by the next one.
A3  Where shared memory is too small, a version is kept in a file on disk.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import mmap
import os
import pickle
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from argosy.fabric import here
from argosy.train.heal_decision import Version
from argosy.transfer import Kind as Shape
from argosy.transfer import Layout, Member, Role, State, Unit

_HEAD = struct.Struct("<QQQQQ")
"""The seal (last step that it is of, plus one; 0: not whole), first step, view, bytes of description and tensors."""
_ALIGN = 64
_SPARE_BYTES = 16 << 20
"""Shared memory that is left to others: pages and rings of ranks that are started later."""
Kind = Literal["full", "local", "final"]
"""All of a rank's state; what is its alone, as of the vote; and the same after the block, where that differs."""


class Place(NamedTuple):
    """What a tensor is, and where it lies among the bytes."""

    unit: str
    key: str
    role: Role
    name: str
    layout: Layout
    kind: Shape
    dtype: torch.dtype
    shape: torch.Size
    offset: int


class Packed(NamedTuple):
    """How a state becomes bytes: its description, where the tensors go, and the tensors."""

    description: bytes
    places: list[Place]
    size: int
    tensors: list[Tensor]


class Stored(NamedTuple):
    """A sealed version: where it lies, the steps that it is of, the view in which it was made, its bytes."""

    path: Path
    first: int
    last: int
    view: int
    length: int
    size: int


def arena_folders() -> list[Path]:
    """Where arenas are: in shared memory, and if that is too small on the local disk. Both are removed with the run."""
    place = here()
    if place.memory is None or place.socket is None:
        return []
    return [place.memory, place.socket.parent / "runs" / place.run]


class Packing:
    """Lays states out; remembers how, as the next one is mostly like the last."""

    def __init__(self) -> None:
        self._places: list[Place] = []
        self._said = b""

    def plan(self, state: State) -> Packed:
        """Lay a state's tensors out one after the other."""
        places: list[Place] = []
        tensors: list[Tensor] = []
        at = 0
        for unit in state.units.values():
            for key, member in unit.members.items():
                if (tensor := member.local) is not None:
                    what = (unit.name, key, member.role, member.dtype, member.layout, member.kind)
                    places.append(Place(*what, tensor.dtype, tensor.shape, at))
                    tensors.append(tensor)
                    at += -(-tensor.nbytes // _ALIGN) * _ALIGN
        if places != self._places or not self._said:  # Layouts say something of each rank.
            self._places, self._said = places, pickle.dumps(places)
        units = [(unit.name, unit.options, unit.aliases) for unit in state.units.values()]
        return Packed(pickle.dumps((self._said, state.rank, state.size, units, state.values)), places, at, tensors)


def write(packed: Packed, into: Tensor) -> None:
    """Copy the tensors into bytes."""
    with torch.no_grad():
        for place, tensor in zip(packed.places, packed.tensors, strict=True):
            _view(place, into).copy_(tensor)


def unpack(description: bytes, content: Tensor) -> State:
    """The state whose tensors lie in `content`."""
    said, rank, size, units, values = pickle.loads(description)
    state = State(rank, size, {name: Unit(name, {}, options, aliases) for name, options, aliases in units}, values)
    for place in pickle.loads(said):
        member = Member(place.key, place.role, place.name, place.layout, _view(place, content), place.kind)
        state.units[place.unit].members[place.key] = member
    return state


def _view(place: Place, content: Tensor) -> Tensor:
    size = place.shape.numel() * place.dtype.itemsize
    return content[place.offset : place.offset + size].view(place.dtype).view(place.shape)


class Arena:
    """The arena of one rank. The `folders` live as long as the run: the first in shared memory, others on disk."""

    def __init__(self, folders: Sequence[Path], rank: int, tell: Callable[[str], None] = lambda _: None) -> None:
        self._folders, self._rank, self._tell = folders, rank, tell
        self._maps: dict[Path, mmap.mmap] = {}
        self._newest: dict[Kind, Path] = {}
        self._said = False
        self._packing: dict[Kind, Packing] = {}

    def put(self, kind: Kind, version: Version, state: State, *, base: Version | None = None) -> None:
        """Keep what the rank has as of `version`; `base`, which it continues from, stays (A2).

        Raises:
            OSError: there is no room; what was kept before stays.
        """
        packed = self._packing.setdefault(kind, Packing()).plan(state)
        at = _HEAD.size + len(packed.description)
        path = self._room(self._free(kind, version.step, base), at + _ALIGN + packed.size)
        memory = self._maps[path]
        memory[:8] = bytes(8)  # A1
        memory[_HEAD.size : at] = packed.description
        if packed.size:
            start = -(-at // _ALIGN) * _ALIGN
            write(packed, torch.frombuffer(memory, dtype=torch.uint8, count=packed.size, offset=start))
        _HEAD.pack_into(memory, 0, 0, version.step, version.view, len(packed.description), packed.size)
        memory[:8] = struct.pack("<Q", version.step + 1)
        self._newest[kind] = path

    def extend(self, step: int, kind: Kind) -> bool:
        """Say that what was put last is also what the rank has after `step`; False if it is not of the step before."""
        path = self._newest.get(kind)
        if path is None:
            return False
        seal, first, *_ = _HEAD.unpack_from(self._maps[path])
        if seal < step or first >= step:
            return False
        self._maps[path][:8] = struct.pack("<Q", step + 1)
        return True

    def held(self) -> list[Version]:
        """The versions of all of the rank's state."""
        return [Version(each.last, each.view) for each in self._stored("full")]

    def full(self, version: Version) -> State | None:
        """All of the rank's state, where it lies."""
        return next((self._state(each) for each in self._stored("full") if _is(each, version)), None)

    def get(self, step: int, kind: Kind) -> State | None:
        """What was kept of a step, where it lies."""
        return next((self._state(each) for each in self._stored(kind) if each.first <= step <= each.last), None)

    def own_of(self, step: int) -> State | None:
        """What a replica has for itself: as it was after the block, or else what the forward pass had changed."""
        if (final := self.get(step, "final")) is not None:
            return final
        if (voted := self.get(step, "local")) is None:
            return None
        return State(voted.rank, voted.size, {name: voted.units[name] for name in voted.values["changed"]})

    def clear(self) -> None:
        """Forget all versions."""
        for folder in self._folders:
            for path in folder.glob(f"{self._rank}.*[01]"):
                with open(path, "r+b") as file:
                    file.write(bytes(8))

    def _paths(self, kind: Kind) -> list[Path]:
        return [folder / f"{self._rank}.{kind}{number}" for folder in self._folders for number in (0, 1)]

    def _free(self, kind: Kind, step: int, base: Version | None) -> list[Path]:
        """Where a version may go: not where its base, or else that of the step before, is."""
        stored = self._stored(kind)
        for each in stored:  # What was put for this step before is replaced: it must not be found again.
            if each.first < step <= each.last and base is None:
                self._maps[each.path][:8] = struct.pack("<Q", step)
        keep = [each.path for each in stored if (base is None and each.first < step) or _is(each, base)][-1:]
        return [path for path in self._paths(kind) if path not in keep]

    def _stored(self, kind: Kind) -> list[Stored]:
        found = [self._read(path) for path in self._paths(kind)]
        return sorted((each for each in found if each is not None), key=lambda each: each.last)

    def _read(self, path: Path) -> Stored | None:
        try:
            if path not in self._maps or os.stat(path).st_size != len(self._maps[path]):
                with open(path, "r+b") as file:
                    self._maps[path] = mmap.mmap(file.fileno(), 0)
        except (OSError, ValueError):
            return None
        seal, *rest = _HEAD.unpack_from(self._maps[path])
        return Stored(path, rest[0], seal - 1, *rest[1:]) if seal else None

    def _state(self, stored: Stored) -> State:
        memory, at = self._maps[stored.path], _HEAD.size + stored.length
        content = torch.empty(0, dtype=torch.uint8)
        if stored.size:
            start = -(-at // _ALIGN) * _ALIGN
            content = torch.frombuffer(memory, dtype=torch.uint8, count=stored.size, offset=start)
        return unpack(memory[_HEAD.size : at], content)

    def _room(self, paths: Sequence[Path], size: int) -> Path:
        """The first of the places that has room for so many bytes, or gets it."""
        for path in paths:
            known = self._maps.get(path)
            if known is not None and len(known) >= size:
                return path
            if path is not paths[-1] and _spare(path.parent) < size + size // 8 + _SPARE_BYTES:
                continue
            if path.parent != self._folders[0]:
                self._say_where(path.parent)
            fd = os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                os.posix_fallocate(fd, 0, size + size // 8)
                self._maps[path] = mmap.mmap(fd, 0)
            finally:
                os.close(fd)
            return path
        raise AssertionError("no place for a version")

    def _say_where(self, folder: Path) -> None:
        if not self._said:
            self._said = True
            small = self._folders[0]
            self._tell(f"rank {self._rank} keeps its state in {folder}: {small} has no space")


def _is(stored: Stored, version: Version | None) -> bool:
    return version is not None and (stored.last, stored.view) == (version.step, version.view)


def _spare(folder: Path) -> int:
    """Bytes that are free there; none if somebody has removed it."""
    try:
        found = os.statvfs(folder)
    except OSError:
        return 0
    return found.f_bavail * found.f_frsize
