"""Carry a plan out between living ranks: pack, send, unpack, in the plan's order, within its staging budget.

E1  Every rank goes through the same order and waits only for its oldest message, so no two wait for each other.
E2  What is staged on a rank, to be sent or received, is never more than the plan's staging budget.
E3  Sender and receiver sum the same cells: what arrived is what was sent, or it is an error that all ranks see.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from argosy.core import ArgosyError, ConfigError
from argosy.transfer.boxes import Box, strides_of
from argosy.transfer.copying import ZERO, Copy, Spot, Sums, add, copy_boxes, spot
from argosy.transfer.layout import Piece
from argosy.transfer.planning import Anew, Plan, Transfer
from argosy.transfer.requantising import Requantise

TIMEOUT_S = 600.0


class CorruptTransfer(ArgosyError):
    """What a rank received is not what was sent to it."""


@dataclass(slots=True)
class Moved:
    """What carrying out a plan took, on this rank."""

    bytes_sent: int = 0
    bytes_received: int = 0
    bytes_local: int = 0
    staging_bytes: int = 0
    """The most that was staged at any time."""


def move(
    plan: Plan,
    source: Mapping[str, Any],
    destination: Mapping[str, Any],
    *,
    group: Any = None,
    timeout_s: float = TIMEOUT_S,
) -> Moved:
    """Carry out a plan on every rank of the process group: `source` and `destination` are this rank's local tensors.

    They are contiguous CPU tensors by name, as the plan's layouts describe them; a destination's memory is written in
    place and shares none with the source. A rank without a part of a tensor leaves its name out.

    Raises:
        ConfigError: a tensor is missing, or not as the layout says.
        CorruptTransfer: sums of sender and receiver differ; destinations must not be used.
    """
    rank = dist.get_rank(group)
    scales = {
        name: _old_scales(destination[name], anew) for name, anew in plan.requantised.items() if name in destination
    }
    moved = _Mover(plan, source, {**destination, **scales}, group, timeout_s).run()
    for name, old in scales.items():
        anew = plan.requantised[name]
        named = anew.new.blocks.book
        Requantise(
            codes=destination[anew.codes],
            scales=destination[name],
            old_scales=old,
            book=destination[anew.book] if anew.book else (named if isinstance(named, tuple) else None),
            old=anew.old,
            new=anew.new,
            layout=anew.layout,
            rank=rank,
        ).run()
    return moved


def _old_scales(scales: torch.Tensor, anew: Anew) -> torch.Tensor:
    return torch.empty(anew.old.count, dtype=scales.dtype, device="cpu")


@dataclass(slots=True)
class _Message:
    size: int
    work: Any
    buffer: torch.Tensor
    finish: Callable[[], None]


@dataclass(slots=True)
class _Mover:
    plan: Plan
    source: Mapping[str, Any]
    destination: Mapping[str, Any]
    group: Any
    timeout_s: float
    moved: Moved = field(default_factory=Moved)
    sums: dict[str, Sums] = field(default_factory=dict[str, Sums])
    """By `from>to`: the sums of all that went that way, as this rank saw it."""
    under_way: deque[_Message] = field(default_factory=deque[_Message])
    staged: int = 0

    def run(self) -> Moved:
        rank = dist.get_rank(self.group)
        for transfer in self.plan.transfers(rank):
            a, b = transfer.move.source.rank, transfer.move.destination.rank
            if a == b:
                self._copy(transfer, self._from(transfer), self._to(transfer))
                self.moved.bytes_local += transfer.bytes
                continue
            while self.under_way and self.staged + transfer.bytes > self.plan.staging_bytes:
                self._wait()
            self._begin(transfer, is_sender=a == rank)
        while self.under_way:
            self._wait()
        self._compare(rank)
        return self.moved

    def _begin(self, transfer: Transfer, *, is_sender: bool) -> None:
        buffer = torch.empty(transfer.bytes, dtype=torch.uint8, device="cpu")
        here = Spot(buffer.data_ptr(), strides_of(transfer.move.box.shape))
        way = f"{transfer.move.source.rank}>{transfer.move.destination.rank}"
        self.staged += transfer.bytes
        self.moved.staging_bytes = max(self.moved.staging_bytes, self.staged)
        if is_sender:
            self._note(way, self._copy(transfer, self._from(transfer), here))
            work = dist.isend(buffer, group=self.group, group_dst=transfer.move.destination.rank)
            self.moved.bytes_sent += transfer.bytes
            self.under_way.append(_Message(transfer.bytes, work, buffer, lambda: None))
            return
        to = self._to(transfer)
        work = dist.irecv(buffer, group=self.group, group_src=transfer.move.source.rank)
        self.moved.bytes_received += transfer.bytes
        finish = lambda: self._note(way, self._copy(transfer, here, to))  # noqa: E731
        self.under_way.append(_Message(transfer.bytes, work, buffer, finish))

    def _wait(self) -> None:
        message = self.under_way.popleft()
        message.work.wait(timedelta(seconds=self.timeout_s))
        message.finish()
        self.staged -= message.size

    def _note(self, way: str, sums: Sums) -> None:
        self.sums[way] = add((self.sums.get(way, ZERO), sums))

    def _copy(self, transfer: Transfer, from_: Spot, to: Spot) -> Sums:
        shape = self.plan.shapes[transfer.name]
        return copy_boxes([Copy(transfer.move.box, shape, transfer.itemsize, from_, to)])[0]

    def _from(self, transfer: Transfer) -> Spot:
        return self._spot(self.source, transfer, transfer.move.source)

    def _to(self, transfer: Transfer) -> Spot:
        return self._spot(self.destination, transfer, transfer.move.destination)

    def _spot(self, side: Mapping[str, Any], transfer: Transfer, piece: Piece) -> Spot:
        name, box = piece.tensor or transfer.name, transfer.move.box
        tensor = side.get(name)
        if tensor is None or not tensor.is_contiguous() or tensor.element_size() != transfer.itemsize:
            raise ConfigError(f"no contiguous local tensor of {transfer.itemsize} bytes per cell for {name}")
        return _place(tensor, piece, box, transfer.itemsize)

    def _compare(self, rank: int) -> None:
        """E3, on all ranks at once."""
        everyone: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(everyone, self.sums, group=self.group)
        for way in sorted({way for each in everyone for way in each}):
            sender, receiver = map(int, way.split(">"))
            if everyone[sender].get(way) != everyone[receiver].get(way):
                raise CorruptTransfer(f"rank {receiver} did not receive what rank {sender} sent")


def _place(tensor: torch.Tensor, piece: Piece, box: Box, size: int) -> Spot:
    inside = [a - b for a, b in zip(box.start, piece.box.start, strict=True)]
    found = spot(tensor.data_ptr() + piece.offset * size, size, piece.strides, inside)
    last = sum((n - 1) * s for n, s in zip(box.shape, piece.strides, strict=True)) * size
    if found.address < tensor.data_ptr() or found.address + last + size > tensor.data_ptr() + tensor.nbytes:
        raise ConfigError(f"a local tensor of {tensor.nbytes} bytes is smaller than its layout says")
    return found
