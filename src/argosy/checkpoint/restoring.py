"""Bring a committed step back: into live modules and optimizers of any layout, or as tensors for whoever asks.

R3  Everything that will be written is verified before the first byte is: on error the destination is unchanged.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.checkpoint.asking import checked_step
from argosy.checkpoint.files import Files
from argosy.checkpoint.fitting import Fit, Wish, fit
from argosy.checkpoint.format import CorruptShard, Entry
from argosy.checkpoint.gathering import as_state, landing, new_tensor, place, without_collection
from argosy.checkpoint.reading import (
    Candidate,
    Chunk,
    Step,
    all_chunks,
    chunk_copies,
    stored_state,
)
from argosy.checkpoint.searching import Kind, Search
from argosy.checkpoint.snapshot import address_of
from argosy.checkpoint.verifying import Reading
from argosy.core import ArgosyError, ConfigError
from argosy.transfer import Box, Copy, Member, State, held, replicated


@dataclass(slots=True)
class Restored:
    """What was restored, and from where; `str()` of it is the line to print."""

    step: int
    source: str
    seconds: float
    bytes: int
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])
    """Without `into`: every tensor by its name."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    kept: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    """Newer steps that could not be used, and why."""

    def __str__(self) -> str:
        line = f"step {self.step:,} from {self.source} in {self.seconds:.1f} s, verified"
        return line + "".join(f"\n  passed over {reason}" for reason in self.skipped)


def restore(
    path: str | Path,
    into: Any = None,
    step: int | None = None,
    *,
    wish: Wish | None = None,
    **wishes: Any,
) -> Restored:
    """Restore `step` (None: the newest that is whole) from the nearest good copy: a keeper, disk, or a store.

    `into` is a State, a module, or a dict of modules, optimizers, values and whatever has a state_dict; their tensors
    are written in place, in whatever layout they have, and values are put back into the dict. Without it, the tensors
    are returned whole: no ranks, no process group. Keyword arguments are those of `Wish`: `rename` maps stored names to
    live ones, `remap` also splits, fuses, stacks and transposes them, `partial=True` lets names on either side be
    without a partner, `roles` restores only these, `fresh=True` lets moments be left out, `timeout_s` bounds the wait
    for other ranks.

    Raises:
        StepNotFound: nothing was committed, or not this step.
        CorruptShard: the asked step is damaged. With `step=None` an older one is taken instead, and said.
        ConfigError: names, shapes or dtypes do not fit. In all cases the destination is unchanged.
        DeadlinePassed: another rank did not come.
    """
    asked = wish or Wish(**wishes)
    begun = time.monotonic()
    search = Search(path, None if step is None else checked_step(step), asked.timeout_s)
    try:
        with without_collection():
            restored = _restore(search, into, asked)
    finally:
        search.close()
    restored.seconds, restored.skipped = time.monotonic() - begun, search.skipped
    return restored


def _restore(search: Search, into: Any, wish: Wish) -> Restored:
    """Try one candidate after the other, each on all ranks."""
    live: State | None = None
    fault: ArgosyError | None = None
    try:
        live = None if into is None else as_state(into)
    except ArgosyError as error:
        fault = error
    # Those who fail here still tell the others.
    search.begin(1 if into is None else live.size if live else place()[1], fault)
    while True:
        candidate = search.next()
        kind, work, error = _open(search, candidate, live, wish)
        if not search.settle(candidate, kind, error):
            continue
        assert work is not None
        failure: Exception | None = None
        restored: Restored | None = None
        try:
            restored = work.finish()
        except Exception as caught:  # Whatever it is, the other ranks must not wait.
            failure = caught
        search.finish(failure)
        assert restored is not None
        return restored


def _open(
    search: Search, candidate: Candidate, live: State | None, wish: Wish
) -> "tuple[Kind, _Collecting | _Writing | None, Exception | None]":
    """Open and verify a step, from the nearest source where it is whole."""
    failure: Exception | None = None
    for source in search.holders(candidate):
        try:
            files, found = source.open(candidate.name)
        except (ArgosyError, OSError) as error:
            failure = error
            search.passed_over(candidate, source, error)
            continue
        try:
            chosen = _Collecting(files, found) if live is None else _Writing(files, found, live, wish)
            chosen.source = source.label
            return "whole", chosen, None
        except ConfigError as error:
            return "unfit", None, error
        except (ArgosyError, OSError) as error:
            failure = error
            search.passed_over(candidate, source, error)
        except Exception as error:
            return "unfit", None, error
    return "damaged", None, failure


class _Collecting:
    """All tensors, whole, in memory of their own: read and verified when this is made."""

    source = ""

    def __init__(self, files: Files, found: Step) -> None:
        self._found, self._stored = found, stored_state(found)
        self._targets = {name: _fresh(member) for name, _, member in self._stored.members()}
        locals_ = {name: member.local for name, member in self._targets.items()}
        wanted = wanted_chunks(found.entries, self._targets, 0)
        reading, finish = _reading(files, wanted, Fit(found.entries, self._targets, locals_), 0)
        reading.fill()
        finish()

    def finish(self) -> Restored:
        tensors = {name: member.local for name, member in self._targets.items()}
        for unit in self._stored.units.values():
            for alias in unit.aliases:
                tensors[alias] = tensors[unit.name]
        total = sum(entry.bytes for entry in self._found.entries)
        options = {unit.name: unit.options for unit in self._stored.units.values() if unit.options}
        return Restored(self._found.root.step, self.source, 0.0, total, tensors, self._found.values, options)


def _fresh(member: Member) -> Member:
    tensor = new_tensor(member.dtype, member.shape)
    return Member(member.key, member.role, member.dtype, replicated(member.shape), tensor, member.kind)


class _Writing:
    """A step on its way into live tensors: verified when this is made (R3), written by `finish`."""

    source = ""

    def __init__(self, files: Files, found: Step, live: State, wish: Wish) -> None:
        self._found = found
        fitted = fit(found, live, wish)
        self._adoption = fitted.adoption
        self._wanted = wanted_chunks(fitted.entries, fitted.targets, live.rank)
        self._reading, self._finish = _reading(files, self._wanted, fitted, live.rank)
        # Read twice: keeping the bytes instead costs more, as memory that is touched for the first time is slow.
        self._reading.verify()

    def finish(self) -> Restored:
        adoption = self._adoption
        self._reading.fill()
        self._finish()
        adoption.commit()
        total = sum(box.cells * entry.bytes // max(entry.box.cells, 1) for entry, box, _, _ in self._wanted)
        kept, unused = adoption.kept, adoption.unused
        step = self._found.root.step
        return Restored(step, self.source, 0.0, total, kept=kept, unused=unused, values=self._found.values)


def wanted_chunks(entries: Iterable[Entry], targets: Mapping[str, Member], rank: int) -> list[Chunk]:
    """The chunks that have cells which this rank needs.

    Raises:
        CorruptShard: some of its cells were saved by nobody.
    """
    mine = {name: [piece.box for piece in held(member, rank)] for name, member in targets.items()}
    missing = {name: list(boxes) for name, boxes in mine.items()}
    near: list[Entry] = []
    for entry in entries:
        if any(box & entry.box for box in mine.get(entry.name, ())):
            near.append(entry)
            missing[entry.name] = [part for box in missing[entry.name] for part in box - entry.box]
    for name, boxes in missing.items():
        if boxes:
            raise CorruptShard(name, f"{boxes[0]}", "a saved box", "none")
    chunks = all_chunks(near)
    return [c for c in chunks if len(c[0].sums) == 1 or any(box & c[1] for box in mine[c[0].name])]


def _memory(local: Any) -> tuple[int, bool, bool]:
    """Which memory a tensor is in, and how it is seen there."""
    is_torch = hasattr(local, "data_ptr")
    return address_of(local), is_torch and local.is_conj(), is_torch and local.is_neg()


def _reading(files: Files, wanted: Sequence[Chunk], fitted: Fit, rank: int) -> tuple[Reading, Callable[[], None]]:
    """How chunks are read into their tensors, and what is to be done then: a tensor that is not plain CPU memory gets
    its bytes through one that is."""
    used = {piece.tensor or name for name, member in fitted.targets.items() for piece in held(member, rank)}
    own = {name: _memory(fitted.locals[name]) for name in used}
    # Tensors of one flat buffer land together.
    landings = {memory: landing(fitted.locals[name]) for name, memory in own.items()}
    addresses = {name: address_of(landings[memory][0]) for name, memory in own.items()}

    def sink(entry: Entry, box: Box, address: int) -> list[Copy]:
        return list(chunk_copies(entry, box, address, fitted.targets[entry.name], rank, addresses.__getitem__))

    def finish() -> None:
        for _, land in landings.values():
            land()

    return Reading(files, wanted, sink), finish
