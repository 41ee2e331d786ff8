"""Tensors that have other names or shapes on the other side: renamed, split, fused, stacked, transposed. Pure.

Each rule is a set of boxes: which part of which source tensor is which part of which destination tensor, with its axes.
M1  A source tensor that no rule names keeps its name; a name is in at most one rule on each side.
M2  A mapped tensor is the same memory seen in another index space: nothing is copied to map it.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import msgspec

from argosy.core import ConfigError
from argosy.transfer.boxes import Box, whole
from argosy.transfer.layout import Layout, Piece

Shapes = Mapping[str, tuple[int, ...]]


class Part(msgspec.Struct, frozen=True):
    """`box` of a source tensor is what begins at `start` of the destination."""

    source: str
    box: Box
    start: tuple[int, ...]
    axes: tuple[int | None, ...]
    """Per dimension of the destination: which one of the source it is, or None where it is new and has one cell."""

    @property
    def target(self) -> Box:
        """The box in the destination."""
        return Box(self.start, tuple(1 if axis is None else self.box.shape[axis] for axis in self.axes))


class Made(msgspec.Struct, frozen=True):
    """A destination tensor and what it is made of."""

    shape: tuple[int, ...]
    parts: tuple[Part, ...]


class Renamed(msgspec.Struct, frozen=True):
    """One tensor under another name."""

    old: str
    new: str

    @property
    def olds(self) -> tuple[str, ...]:
        return (self.old,)

    def made(self, shapes: Shapes) -> dict[str, Made]:
        shape = _known(shapes, self.old)
        return {self.new: Made(shape, (Part(self.old, whole(shape), (0,) * len(shape), tuple(range(len(shape)))),))}


class SplitUp(msgspec.Struct, frozen=True):
    """One tensor cut along `dim` into several: `sizes` cells each."""

    old: str
    news: tuple[str, ...]
    sizes: tuple[int, ...]
    dim: int = 0

    @property
    def olds(self) -> tuple[str, ...]:
        return (self.old,)

    def made(self, shapes: Shapes) -> dict[str, Made]:
        shape = _known(shapes, self.old)
        if len(self.news) != len(self.sizes) or sum(self.sizes) != shape[self.dim]:
            raise ConfigError(f"{self.old} has {shape[self.dim]} cells along {self.dim}, not {list(self.sizes)}")
        found: dict[str, Made] = {}
        for name, size, end in zip(self.news, self.sizes, accumulate(self.sizes), strict=True):
            box = _along(shape, self.dim, end - size, size)
            found[name] = Made(box.shape, (Part(self.old, box, (0,) * len(shape), tuple(range(len(shape)))),))
        return found


class Fused(msgspec.Struct, frozen=True):
    """Several tensors one behind the other along `dim`."""

    olds: tuple[str, ...]
    new: str
    dim: int = 0

    def made(self, shapes: Shapes) -> dict[str, Made]:
        parts: list[Part] = []
        at = 0
        first = _known(shapes, self.olds[0])
        for name in self.olds:
            shape = _known(shapes, name)
            if _without(shape, self.dim) != _without(first, self.dim):
                raise ConfigError(f"{name} is {list(shape)}, which does not go behind {list(first)} along {self.dim}")
            start = tuple(at if d == self.dim else 0 for d in range(len(shape)))
            parts.append(Part(name, whole(shape), start, tuple(range(len(shape)))))
            at += shape[self.dim]
        return {self.new: Made((*first[: self.dim], at, *first[self.dim + 1 :]), tuple(parts))}


class Stacked(msgspec.Struct, frozen=True):
    """Several tensors of one shape (experts) along a new dimension `dim`."""

    olds: tuple[str, ...]
    new: str
    dim: int = 0

    def made(self, shapes: Shapes) -> dict[str, Made]:
        first = _known(shapes, self.olds[0])
        parts: list[Part] = []
        axes = (*range(self.dim), None, *range(self.dim, len(first)))
        for number, name in enumerate(self.olds):
            if _known(shapes, name) != first:
                raise ConfigError(f"{name} is {list(shapes[name])}, {self.olds[0]} is {list(first)}")
            start = tuple(number if axis is None else 0 for axis in axes)
            parts.append(Part(name, whole(first), start, axes))
        return {self.new: Made((*first[: self.dim], len(self.olds), *first[self.dim :]), tuple(parts))}


class Transposed(msgspec.Struct, frozen=True):
    """One tensor with its dimensions in another order: dimension d of the new one is `axes[d]` of the old one."""

    old: str
    new: str
    axes: tuple[int, ...]

    @property
    def olds(self) -> tuple[str, ...]:
        return (self.old,)

    def made(self, shapes: Shapes) -> dict[str, Made]:
        shape = _known(shapes, self.old)
        if sorted(self.axes) != list(range(len(shape))):
            raise ConfigError(f"{list(self.axes)} is no order of the {len(shape)} dimensions of {self.old}")
        part = Part(self.old, whole(shape), (0,) * len(shape), self.axes)
        return {self.new: Made(tuple(shape[axis] for axis in self.axes), (part,))}


Rule = Renamed | SplitUp | Fused | Stacked | Transposed


def _known(shapes: Shapes, name: str) -> tuple[int, ...]:
    if name not in shapes:
        raise ConfigError(f"a rule names a tensor that the source does not have: {name}")
    return shapes[name]


def _along(shape: tuple[int, ...], dim: int, first: int, size: int) -> Box:
    start = tuple(first if d == dim else 0 for d in range(len(shape)))
    return Box(start, (*shape[:dim], size, *shape[dim + 1 :]))


def _without(shape: tuple[int, ...], dim: int) -> tuple[int, ...]:
    return shape[:dim] + shape[dim + 1 :]


class Remap(msgspec.Struct, frozen=True):
    """Rules by which source tensors become destination tensors."""

    rules: tuple[Rule, ...]

    def made(self, shapes: Shapes) -> dict[str, Made]:
        """Every destination tensor, and what it is made of.

        Raises:
            ConfigError: a rule does not fit the source, or two make the same tensor.
        """
        used = [name for rule in self.rules for name in rule.olds]
        found: dict[str, Made] = {}
        rest = [Renamed(name, name) for name in shapes if name not in set(used)]
        for rule in (*self.rules, *rest):
            for name, made in rule.made(shapes).items():
                if name in found:
                    raise ConfigError(f"two rules make the same tensor: {name}")
                found[name] = made
        twice = sorted({name for name in used if used.count(name) > 1})
        if twice:
            raise ConfigError(f"two rules use the same tensor: {twice[0]}")
        return found


def parts_by_source(made: Mapping[str, Made]) -> dict[str, list[tuple[str, Part]]]:
    """For each source tensor, the destinations that it is part of."""
    found: dict[str, list[tuple[str, Part]]] = {}
    for target, each in made.items():
        for part in each.parts:
            found.setdefault(part.source, []).append((target, part))
    return found


def seen_from_source(
    shape: tuple[int, ...], parts: Sequence[tuple[str, Part]], layouts: Mapping[str, Layout]
) -> Layout:
    """Where the destinations' memory lies in the index space of a source tensor that they are made of by `parts`."""
    pieces: list[Piece] = []
    for target, part in parts:
        back = [part.axes.index(axis) for axis in range(len(shape))]
        for piece in layouts[target].pieces if target in layouts else ():
            common = piece.box & part.target
            if common is None:
                continue
            origin = tuple(part.box.start[axis] + common.start[d] - part.start[d] for axis, d in enumerate(back))
            size = tuple(common.shape[d] for d in back)
            strides = tuple(piece.strides[d] for d in back)
            pieces.append(Piece(piece.rank, Box(origin, size), _offset(piece, common), strides, target))
    return Layout(shape, tuple(pieces))


def _offset(piece: Piece, common: Box) -> int:
    inside = [a - b for a, b in zip(common.start, piece.box.start, strict=True)]
    return piece.offset + sum(i * s for i, s in zip(inside, piece.strides, strict=True))
