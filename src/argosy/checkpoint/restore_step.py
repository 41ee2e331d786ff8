"""Restore a committed step: into live modules and optimizers of any layout, or as new tensors.

R3  Everything that will be written is verified before the first byte is: on error the destination is unchanged. What
    goes into memory that is nobody's yet (moments that are made for it) is verified as it is written. Ranks of one host
    that read the same files verify each chunk once, for all of them (`shared_verify.py`).
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from argosy.checkpoint.arguments import checked_step
from argosy.checkpoint.chunk_reader import Reading, size_of
from argosy.checkpoint.files import Files, LocalFiles
from argosy.checkpoint.jobs import await_saves
from argosy.checkpoint.per_rank_values import differing, kept_apart, without_equals
from argosy.checkpoint.rank_exchange import is_in_group, place
from argosy.checkpoint.restore_plan import Wish, fit, some
from argosy.checkpoint.restore_targets import Landing, wanted_chunks
from argosy.checkpoint.shared_verify import reads_of, sharing_ranks, verified_by
from argosy.checkpoint.snapshot import address_of
from argosy.checkpoint.state_input import as_state, declared, new_tensor, without_collection
from argosy.checkpoint.step_index import Candidate, Source, Step, stored_state
from argosy.checkpoint.step_search import Kind, Search
from argosy.checkpoint.stores import located
from argosy.core import ArgosyError, ConfigError
from argosy.transfer import (
    Adoption,
    Copy,
    Member,
    State,
    copy_boxes,
    grown,
    held,
    replicated,
    spot,
    spot_in,
    strides_of,
)


@dataclass(slots=True)
class Restored:
    """What was restored, and from where; `str()` of it is the line to print."""

    step: int
    source: str
    seconds: float
    bytes: int
    tensors: dict[str, Any] = field(default_factory=dict[str, Any])
    """Without `into`: every tensor by its name."""
    stored: Step | None = field(default=None, repr=False)
    """Without `into`: what the step says of them."""
    values: dict[str, Any] = field(default_factory=dict[str, Any])
    options: dict[str, dict[str, Any]] = field(default_factory=dict[str, dict[str, Any]])
    kept: list[str] = field(default_factory=list[str])
    unused: list[str] = field(default_factory=list[str])
    skipped: list[str] = field(default_factory=list[str])
    """Newer steps that could not be used, and why."""
    merged: list[str] = field(default_factory=list[str])
    """Options that several stored parameter groups had, and one group has here: the last value counts."""
    differing: list[str] = field(default_factory=list[str])
    """Values that ranks differed in, where there were more or fewer of them than here."""

    def __str__(self) -> str:
        line = f"step {self.step:,} from {self.source} in {self.seconds:.1f} s, verified"
        lines = [f"skipped {reason}" for reason in self.skipped]
        if self.kept:
            lines.append(f"not stored, and left as it was: {some(self.kept)}")
        if self.merged:
            lines.append(f"of several groups that are one here, the last one's count: {some(self.merged)}")
        if self.differing:
            lines.append(f"ranks that saved it have their own, new ones have rank 0's: {some(self.differing)}")
        if self.unused:
            lines.append(f"stored, and without a place here: {some(self.unused)}")
        return "\n  ".join([line, *lines])


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
    live ones. `remap` makes other tensors of them. `partial=True` accepts names that only one side has. `roles`
    restores only these. `own` are the parameters of which each rank has its own. `fresh=True` leaves missing moments
    as they are. `timeout_s` bounds the wait for other ranks.

    Raises:
        StepNotFound: nothing was committed, or not this step.
        CorruptShard: the asked step is damaged. With `step=None` an older one is taken instead, and said.
        ConfigError: names, shapes or dtypes do not fit. In all cases the destination is unchanged.
        DeadlinePassed: another rank did not come.
    """
    known = [each.name for each in fields(Wish)]
    for name in wishes:
        if name not in known:
            raise TypeError(f"restore() has no argument {name!r}; it has into, step, wish, {', '.join(known)}")
    asked = wish or Wish(**wishes)
    begun = time.monotonic()
    await_saves(located(path))
    search = Search(path, None if step is None else checked_step(step), asked.timeout_s)
    try:
        with without_collection():
            restored = _restore(search, into, asked)
    finally:
        search.close()
    restored.seconds, restored.skipped = time.monotonic() - begun, search.skipped
    return restored


class _Opened(NamedTuple):
    """What became of a step: ready to be written, or why not."""

    kind: Kind
    work: "_Collecting | _Writing | _Remapping | None" = None
    error: Exception | None = None


def _restore(search: Search, into: Any, wish: Wish) -> Restored:
    """Try one candidate after the other, each on all ranks."""
    into = _Into(into, wish.own)
    search.begin(into.size, into.fault)
    while True:
        candidate = search.next()
        opened = _open(search, candidate, into, wish)
        ranks = [into.rank]
        if into.size > 1:
            ranks = sharing_ranks(search.exchange, into.rank, opened.work.reads if opened.work else "")
        opened = _verified(search, candidate, opened, ranks)
        if search.settle(candidate, opened.kind, opened.error):
            assert opened.work is not None
            return _written(search, opened.work)


class _Into:
    """What is restored into, described when that is needed: who is alone has files read meanwhile."""

    def __init__(self, thing: Any, own: Sequence[Any]) -> None:
        self._thing, self._state = thing, thing if isinstance(thing, State) else None
        self._own = own
        self.rank, self.size = 0, 1
        self.fault: ArgosyError | None = None
        if self._state or (thing is not None and is_in_group()):
            try:
                self.rank, self.size = self.state().rank, self.state().size
            except ArgosyError as error:  # A rank that fails here still tells the others.
                self.fault, (self.rank, self.size) = error, place()

    @property
    def is_anything(self) -> bool:
        return self._thing is not None

    def state(self) -> State:
        if self._state is None:
            self._state = as_state(self._thing, declared=declared("restore", own=self._own))
        return self._state


def _open(search: Search, candidate: Candidate, into: _Into, wish: Wish) -> _Opened:
    """Open a step at the nearest source that has it. Files are not verified yet: ranks of a host do that together."""
    failure: Exception | None = None
    for source in search.holders(candidate):
        try:
            files, found = source.open(candidate.name)
        except (ArgosyError, OSError) as error:
            failure = error
            search.passed_over(candidate, source, error)
            continue
        try:
            found = without_equals(found)
            if into.is_anything:
                work = (_Writing if wish.remap is None else _Remapping)(files, found, into, wish)
            else:
                work = _Collecting(files, found)
            work.source = source
            if not files.place:
                work.verify([work.rank])
            return _Opened("whole", work)
        except Exception as error:
            if not is_damage(error):
                return _Opened("unfit", None, error)
            failure = error
            search.passed_over(candidate, source, error)
    return _Opened("damaged", None, failure)


def is_damage(error: Exception) -> bool:
    """Whether another copy may do; what does not fit, fits from nowhere."""
    return isinstance(error, ArgosyError | OSError) and not isinstance(error, ConfigError)


def _verified(search: Search, candidate: Candidate, opened: _Opened, ranks: Sequence[int]) -> _Opened:
    """Verify what was opened and is not yet, its part of it where ranks share."""
    work = opened.work
    if work is None or work.is_verified:
        return opened
    try:
        work.verify(ranks)
        return opened
    except Exception as error:
        if not is_damage(error):
            return _Opened("unfit", None, error)
        assert work.source is not None
        search.passed_over(candidate, work.source, error)
        return _Opened("damaged", None, error)


def _written(search: Search, work: "_Collecting | _Writing | _Remapping") -> Restored:
    """Write, on all ranks, and tell them how it went: whatever it is, the others must not wait."""
    failure: Exception | None = None
    restored: Restored | None = None
    try:
        work.fill()
        restored = work.finish()
    except Exception as caught:
        failure = caught
    search.finish(failure)
    assert restored is not None
    return restored


class _Collecting:
    """All tensors, whole, in memory of their own: read and verified in one pass."""

    rank = 0
    source: Source | None = None
    is_verified = False
    reads = ""

    def __init__(self, files: Files, found: Step) -> None:
        self._files, self._found, self._stored = files, found, stored_state(found)
        self._targets = {name: _fresh(member) for name, _, member in self._stored.members()}

    def verify(self, _: Sequence[int]) -> None:
        landing = Landing(self._targets, 0)
        Reading(self._files, wanted_chunks(self._found.entries, self._targets, 0), landing.sinks()).fill()
        landing.finish()
        self.is_verified = True

    def fill(self) -> None: ...

    def finish(self) -> Restored:
        tensors = {name: member.local for name, member in self._targets.items()}
        for unit in self._stored.units.values():
            for alias in unit.aliases:
                tensors[alias] = tensors[unit.name]
        total = sum(entry.bytes for entry in self._found.entries)
        options = {unit.name: unit.options for unit in self._stored.units.values() if unit.options}
        label = self.source.label if self.source else ""
        values = {name: grown(value, tensors.__getitem__) for name, value in self._found.values.items()}
        return Restored(self._found.root.step, label, 0.0, total, tensors, self._found, values, options)


def _fresh(member: Member) -> Member:
    tensor = new_tensor(member.dtype, member.shape)
    return Member(member.key, member.role, member.dtype, replicated(member.shape), tensor, member.kind)


class _Writing:
    """A step on its way into live tensors: fitted when this is made, verified (R3), then written."""

    source: Source | None = None
    is_verified = False

    def __init__(self, files: Files, found: Step, into: _Into, wish: Wish) -> None:
        self._files, self._found, self.rank, self._size = files, found, into.rank, into.size
        self._fitted = fit(found, into.state(), wish)
        self._wanted = wanted_chunks(self._fitted.entries, self._fitted.targets, self.rank)
        self._landing = Landing(self._fitted.targets, self.rank)
        self._apart = kept_apart(found.entries)

    @property
    def reads(self) -> str:
        """What is verified, for ranks that verify the same; nothing if this one has all it needs."""
        entries = [entry for entry in self._fitted.entries if entry.name not in self._apart]
        return "" if self.is_verified else reads_of(self._files.place, entries, self._fitted.targets)

    def verify(self, ranks: Sequence[int]) -> None:
        fresh, sinks = self._fitted.adoption.fresh, self._landing.sinks()
        at_once = [chunk for chunk in self._wanted if chunk[0].name in fresh] if fresh else []
        twice = [chunk for chunk in self._wanted if chunk[0].name not in fresh] if at_once else self._wanted
        # Read twice: keeping the bytes instead costs more, as memory that is touched for the first time is slow.
        self._reading = Reading(self._files, twice, sinks)
        if len(ranks) > 1:
            if isinstance(self._files, LocalFiles):
                self._files.is_direct = False  # H2
            shared = {name: member for name, member in self._fitted.targets.items() if name not in self._apart}
            Reading(self._files, verified_by(self.rank, twice, shared, ranks)).verify()
        else:
            self._reading.verify()
        Reading(self._files, at_once, sinks).fill()
        self.is_verified = True

    def fill(self) -> None:
        self._reading.fill()

    def finish(self) -> Restored:
        self._landing.finish()
        total = sum(size_of(entry, box) for entry, box, _, _ in self._wanted)
        return _committed(self, self._found, self._fitted.adoption, total, self._size)


class _Remapping:
    """A step that a user's function changes on its way into live tensors: it is read whole, changed, and written."""

    source: Source | None = None
    is_verified = False
    reads = ""

    def __init__(self, files: Files, found: Step, into: _Into, wish: Wish) -> None:
        self._found, self._into, self._wish, self.rank = found, into, wish, into.rank
        self._whole = _Collecting(files, found)

    def verify(self, ranks: Sequence[int]) -> None:
        self._whole.verify(ranks)
        self._fitted = fit(self._found, self._into.state(), self._wish, self._whole.finish().tensors)
        self._landing = Landing(self._fitted.targets, self.rank)
        self.is_verified = True

    def fill(self) -> None:
        copies: list[Copy] = []
        for name, member in self._fitted.targets.items():
            size, source = member.itemsize, address_of(self._fitted.sources[name])
            for piece in held(member, self.rank):
                held_at = spot(source, size, strides_of(member.shape), piece.box.start)
                to = spot_in(piece, self._landing.addresses[name], size, piece.box.start)
                copies.append(Copy(piece.box, member.shape, size, held_at, to))
        copy_boxes(copies)

    def finish(self) -> Restored:
        self._landing.finish()
        total = sum(entry.bytes for entry in self._found.entries)
        return _committed(self, self._found, self._fitted.adoption, total, self._into.size)


def _committed(work: "_Writing | _Remapping", found: Step, adoption: Adoption, total: int, size: int) -> Restored:
    """Make what was written the live state."""
    adoption.commit()
    label = work.source.label if work.source else ""
    restored = Restored(found.root.step, label, 0.0, total, kept=adoption.kept, unused=adoption.unused)
    restored.values, restored.merged = found.values, adoption.merged
    restored.differing = differing(found) if found.root.size != size else []
    return restored
