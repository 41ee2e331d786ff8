"""Quantise values anew where they get other blocks than they were stored with."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from dataclasses import dataclass

import torch
from torch import Tensor

from argosy.core import ConfigError
from argosy.transfer.blocks import Blocking, cells_of
from argosy.transfer.layout import Layout

CELLS = 1 << 20
"""Cells of which values are made at a time."""


class Book:
    """The value of each code; without values codes are numbers themselves, as those of float8 are."""

    def __init__(self, values: Tensor | tuple[float, ...] | None, codes: Tensor) -> None:
        self._dtype = codes.dtype
        if values is None:
            if not codes.is_floating_point():
                raise ConfigError(
                    f"nobody says what the codes mean, which are {codes.dtype}", hint="Blocks(..., book=)"
                )
            self.largest = torch.finfo(codes.dtype).max
            return
        count, first = (1 << 8 * codes.element_size()), torch.iinfo(codes.dtype).min
        self._values = torch.as_tensor(values, dtype=torch.float32, device=codes.device).reshape(-1)
        if len(self._values) > count:
            raise ConfigError(f"a book of {len(self._values)} values for {codes.dtype}")
        self._first = first
        ordered, self._codes = self._values.sort()
        self._borders = (ordered[1:] + ordered[:-1]) / 2
        least, most = float(ordered[0]), float(ordered[-1])
        self.largest = min(-least, most) if least < 0 < most else max(-least, most)  # What it has of either sign.

    def values(self, codes: Tensor) -> Tensor:
        """What codes mean, for a scale of 1."""
        return codes.float() if codes.is_floating_point() else self._values[codes.long() - self._first]

    def codes(self, values: Tensor) -> Tensor:
        """The nearest ones."""
        if self._dtype.is_floating_point:
            return values.to(self._dtype)
        return (self._codes[torch.bucketize(values, self._borders)] + self._first).to(self._dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class Requantise:
    """A rank's part of a tensor, whose codes still go with old scales: all of these, as they were stored."""

    codes: Tensor
    scales: Tensor
    old_scales: Tensor
    book: Tensor | tuple[float, ...] | None
    old: Blocking
    new: Blocking
    layout: Layout
    rank: int

    def run(self) -> None:
        """Make codes and scales those of the new blocks, in place. Takes 8 bytes per cell."""
        cells, book = cells_of(self.layout, self.rank), Book(self.book, self.codes)
        codes, size = self.codes.view(-1), self.new.size
        old_scales = self.old_scales.to(codes.device, torch.float32)
        at_once = max(1, CELLS // size) * size
        for first in range(0, len(cells), at_once):
            part = codes[first : first + at_once]
            numbers = torch.from_numpy(self.old.numbers(cells[first : first + at_once])).to(codes.device)
            values = book.values(part) * old_scales[numbers]
            blocks = torch.nn.functional.pad(values, (0, -len(values) % size)).view(-1, size)
            scales = blocks.abs().amax(1) / book.largest
            self.scales[first // size : first // size + len(scales)] = scales
            scaled = blocks / scales.where(scales > 0, 1.0)[:, None]
            part.copy_(book.codes(scaled.view(-1)[: len(values)]))
