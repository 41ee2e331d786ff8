"""Bring a committed step back: into live modules and optimizers of any layout, or as tensors for whoever asks.

R3  Everything that will be written is verified before the first byte is: on error the destination is unchanged. What
    goes into memory that is nobody's yet (moments that are made for it) is verified as it is written. Ranks of one host
    that read the same files verify and read each chunk once, for all of them (`sharing.py`).
"""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from argosy.checkpoint.asking import checked_step
from argosy.checkpoint.differing import differing, kept_apart, without_equals
from argosy.checkpoint.files import Files
from argosy.checkpoint.fitting import Fit, Wish, fit, some
from argosy.checkpoint.format import CorruptShard, Entry
from argosy.checkpoint.gathering import as_state, is_in_group, landing, new_tensor, place, without_collection
from argosy.checkpoint.jobs import await_saves
from argosy.checkpoint.reading import (
    Candidate,
    Chunk,
    Source,
    Step,
    all_chunks,
    chunk_copies,
    stored_state,
)
from argosy.checkpoint.searching import Kind, Search
from argosy.checkpoint.sharing import Partner, Receivers, Sharing, Table, copies_to, places, reads_of
from argosy.checkpoint.snapshot import address_of
from argosy.checkpoint.stores import located
from argosy.checkpoint.verifying import Ahead, Away, Reading, Sinks, size_of
from argosy.core import ArgosyError, ConfigError
from argosy.transfer import Box, Copy, Member, Piece, State, grown, held, is_plain, replicated, strides_of

T = TypeVar("T")


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
    merged: list[str] = field(default_factory=list[str])
    """Options that were stored of several groups, and of which one counts in a group here."""
    differing: list[str] = field(default_factory=list[str])
    """Values that ranks differed in, where there were more or fewer of them than here."""

    def __str__(self) -> str:
        line = f"step {self.step:,} from {self.source} in {self.seconds:.1f} s, verified"
        lines = [f"passed over {reason}" for reason in self.skipped]
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
    live ones, `remap` also splits, fuses, stacks and transposes them, `partial=True` lets names on either side be
    without a partner, `roles` restores only these, `fresh=True` lets moments be left out, `timeout_s` bounds the wait
    for other ranks.

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


Offered = tuple[str, Table | None]
NOTHING: Offered = ("", None)


class _Opened(NamedTuple):
    """What became of a step: ready to be written, or why not."""

    kind: Kind
    work: "_Collecting | _Writing | None" = None
    error: Exception | None = None


def _restore(search: Search, into: Any, wish: Wish) -> Restored:
    """Try one candidate after the other, each on all ranks."""
    into = _Into(into)
    search.begin(into.size, into.fault)
    while True:
        candidate = search.next()
        opened = _open(search, candidate, into, wish)
        sharing = Sharing(into.rank)
        try:
            if into.size > 1:
                sharing.agree(search.exchange, *(opened.work.offered if opened.work else NOTHING))
            opened = _verified(search, candidate, opened, sharing)
            if search.settle(candidate, opened.kind, opened.error):
                assert opened.work is not None
                return _written(search, opened.work, sharing)
        except BaseException:
            sharing.leave()
            raise
        finally:
            sharing.close()


class _Into:
    """What is restored into, described when that is needed: who is alone has files read meanwhile."""

    def __init__(self, thing: Any) -> None:
        self._thing, self._state = thing, thing if isinstance(thing, State) else None
        self.rank, self.size = 0, 1
        self.fault: ArgosyError | None = None
        if self._state or (thing is not None and is_in_group()):
            try:
                self.rank, self.size = self.state().rank, self.state().size
            except ArgosyError as error:  # Those who fail here still tell the others.
                self.fault, (self.rank, self.size) = error, place()

    @property
    def is_anything(self) -> bool:
        return self._thing is not None

    @property
    def is_all_there(self) -> bool:
        """Whether probably everything has its memory already: no optimizer has yet to make its moments."""
        parts: list[Any] = list(self._thing.values()) if isinstance(self._thing, Mapping) else []  # type: ignore[arg-type]
        return all(part.state for part in parts if hasattr(part, "param_groups"))

    def state(self) -> State:
        if self._state is None:
            self._state = as_state(self._thing)
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
            work = _Writing(files, found, into, wish) if into.is_anything else _Collecting(files, found)
            work.source = source
            if not files.place:
                work.verify(Sharing(work.rank))
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


def _verified(search: Search, candidate: Candidate, opened: _Opened, sharing: Sharing) -> _Opened:
    """Verify what was opened and is not yet, its part of it where ranks share."""
    work = opened.work
    if work is None or work.is_verified:
        return opened
    try:
        work.verify(sharing)
        return opened
    except Exception as error:
        if not is_damage(error):
            return _Opened("unfit", None, error)
        assert work.source is not None
        search.passed_over(candidate, work.source, error)
        return _Opened("damaged", None, error)


def _written(search: Search, work: "_Collecting | _Writing", sharing: Sharing) -> Restored:
    """Write, on all ranks, and tell them how it went: whatever it is, the others must not wait."""
    failure: Exception | None = None
    try:
        work.fill()
    except Exception as caught:
        failure = caught
    if sharing.is_any:  # H2
        search.finish(failure)
    restored: Restored | None = None
    try:
        restored = work.finish() if failure is None else None
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
    offered: Offered = NOTHING

    def __init__(self, files: Files, found: Step) -> None:
        self._files, self._found, self._stored = files, found, stored_state(found)
        self._targets = {name: _fresh(member) for name, _, member in self._stored.members()}

    def verify(self, _: Sharing) -> None:
        locals_ = {name: member.local for name, member in self._targets.items()}
        landing = Landing(Fit(self._found.entries, self._targets, locals_), 0)
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
        return Restored(self._found.root.step, label, 0.0, total, tensors, values, options)


def _fresh(member: Member) -> Member:
    tensor = new_tensor(member.dtype, member.shape)
    return Member(member.key, member.role, member.dtype, replicated(member.shape), tensor, member.kind)


class _Writing:
    """A step on its way into live tensors: fitted when this is made, verified (R3), then written."""

    source: Source | None = None
    is_verified = False

    def __init__(self, files: Files, found: Step, into: _Into, wish: Wish) -> None:
        self._files, self._found, self.rank, self._size = files, found, into.rank, into.size
        # Who restores alone needs all of it, so what is here already is verified while places are found for it.
        is_all = into.size == 1 and bool(files.place) and not wish.partial and wish.roles is None
        early: list[Entry] = []
        if is_all:
            early = found.entries
            if not into.is_all_there:
                early = [entry for entry in found.entries if _is_here(entry, into.state())]
        self._ahead = Ahead(files, early) if early else None
        try:
            self._early = early
            self._fitted = fit(found, into.state(), wish)
            known = (early, self._ahead.chunks if self._ahead else [])
            self._wanted = wanted_chunks(self._fitted.entries, self._fitted.targets, self.rank, known)
            self._fresh = fresh_targets(self._fitted, self.rank)
            self._landing = Landing(self._fitted, self.rank)
        except BaseException:
            if self._ahead is not None:
                self._ahead.stop()
            raise

    @property
    def offered(self) -> Offered:
        """What is read, and where other ranks may put it; nothing if this one has all it needs."""
        if self.is_verified:
            return NOTHING
        apart = kept_apart(self._found.entries)
        targets = {name: member for name, member in self._fitted.targets.items() if name not in apart}
        entries = [entry for entry in self._fitted.entries if entry.name not in apart]
        return reads_of(self._files.place, entries), places(targets, self.rank, self._landing.addresses)

    def verify(self, sharing: Sharing) -> None:
        mine, receivers = sharing.divided(self._wanted)
        away = partial(_sent, sharing.partners, receivers) if receivers else None
        sinks = self._landing.sinks(away)
        at_once, twice = ([], mine) if sharing.is_any else self._parted(mine)
        # Read twice: keeping the bytes instead costs more, as memory that is touched for the first time is slow.
        ready = self._ahead.aimed(twice, sinks) if self._ahead is not None else None
        self._reading = ready or Reading(self._files, twice, sinks)
        if self._ahead is None:
            self._reading.verify()
        else:
            self._reading.plan()
            self._ahead.wait()
            Reading(self._files, [] if ready else self._late(twice)).verify()
        Reading(self._files, at_once, sinks).fill()
        self.is_verified = True

    def _late(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Those that were not verified ahead."""
        early = {_content(entry) for entry in self._early}
        return [chunk for chunk in chunks if _content(chunk[0]) not in early]

    def _parted(self, chunks: Sequence[Chunk]) -> tuple[list[Chunk], Sequence[Chunk]]:
        """Those that go where nothing is lost by it, and the others."""
        at_once = [chunk for chunk in chunks if chunk[0].name in self._fresh] if self._fresh else []
        return at_once, [chunk for chunk in chunks if chunk[0].name not in self._fresh] if at_once else chunks

    def fill(self) -> None:
        self._reading.fill()

    def finish(self) -> Restored:
        adoption = self._fitted.adoption
        self._landing.finish()
        adoption.commit()
        total = sum(size_of(entry, box) for entry, box, _, _ in self._wanted)
        label = self.source.label if self.source else ""
        kept, unused = adoption.kept, adoption.unused
        step = self._found.root.step
        restored = Restored(step, label, 0.0, total, kept=kept, unused=unused, values=self._found.values)
        restored.merged = adoption.merged
        restored.differing = differing(self._found) if self._found.root.size != self._size else []
        return restored


def _content(entry: Entry) -> tuple[str, int, str]:
    """What is verified of an entry, whatever it is called. Those without cells share their place with others."""
    return entry.file, entry.offset, "".join(entry.sums)


def _is_here(entry: Entry, live: State) -> bool:
    unit = live.units.get(entry.unit)
    return unit is not None and entry.key in unit.members


def fresh_targets(fitted: Fit, rank: int) -> set[str]:
    """Stored tensors that go nowhere but into memory that is nobody's yet."""
    fresh = fitted.adoption.fresh
    return (
        {
            name
            for name, member in fitted.targets.items()
            if all((piece.tensor or name) in fresh for piece in held(member, rank))
        }
        if fresh
        else set()
    )


def _sent(
    partners: Mapping[int, Partner], receivers: Receivers, entry: Entry, box: Box, offset: int, at: int
) -> Iterator[tuple[Sequence[int], Copy]]:
    """The copies of a chunk into the memory of partners."""
    for rank in receivers.get((entry.file, offset), ()):
        for copy in copies_to(entry, box, at, partners[rank].table):
            yield partners[rank].way, copy


class _ByLayout(dict[int, T]):
    """What follows from the layout of a member alone: many have the same one."""

    def __init__(self, make: Callable[[Member], T]) -> None:
        self._make = make

    def of(self, member: Member) -> T:
        key = id(member.layout)
        if key not in self:
            self[key] = self._make(member)
        return self[key]


def wanted_chunks(
    entries: Iterable[Entry],
    targets: Mapping[str, Member],
    rank: int,
    known: tuple[list[Entry], list[Chunk]] = ([], []),
) -> list[Chunk]:
    """The chunks that have cells which this rank needs; all those of some entries may be `known` already.

    Raises:
        CorruptShard: some of its cells were saved by nobody.
    """
    boxes_of = _ByLayout(lambda member: [piece.box for piece in held(member, rank)])
    mine = {name: boxes_of.of(member) for name, member in targets.items()}
    missing = dict(mine)
    near: list[Entry] = []
    for entry in entries:
        boxes = mine.get(entry.name, [])
        if boxes == [entry.box]:  # As most are.
            near.append(entry)
            missing[entry.name] = []
        elif any(box & entry.box for box in boxes):
            near.append(entry)
            missing[entry.name] = [part for box in missing[entry.name] for part in box - entry.box]
    for name, boxes in missing.items():
        if boxes:
            raise CorruptShard(name, f"{boxes[0]}", "a saved box", "none")
    chunks = known[1] if near == known[0] else all_chunks(near)
    if all(len(entry.sums) == 1 for entry in near):
        return chunks
    return [c for c in chunks if len(c[0].sums) == 1 or any(box & c[1] for box in mine[c[0].name])]


def _memory(local: Any) -> tuple[int, bool, bool]:
    """Which memory a tensor is in, and how it is seen there."""
    is_torch = hasattr(local, "data_ptr")
    return address_of(local), is_torch and local.is_conj(), is_torch and local.is_neg()


class Landing:
    """Where stored tensors go in memory; one that is not plain CPU memory gets its bytes through memory that is."""

    def __init__(self, fitted: Fit, rank: int) -> None:
        self._targets, self._rank = fitted.targets, rank
        self._landings: dict[tuple[int, bool, bool], tuple[Any, Callable[[], None]]] = {}
        self.addresses: dict[str, int] = {}
        # In the order of targets, which is about that of memory: in another one each look would miss the cache.
        used = [piece.tensor or name for name, member in fitted.targets.items() for piece in held(member, rank)]
        for name in dict.fromkeys(used):
            local = fitted.locals[name]
            if not is_plain(local):
                memory = _memory(local)
                if memory not in self._landings:  # Tensors of one flat buffer land together.
                    self._landings[memory] = landing(local)
                local = self._landings[memory][0]
            self.addresses[name] = address_of(local)

    def sinks(self, away: Away | None = None) -> Sinks:
        """How chunks go there."""
        plain: dict[str, int] = {}
        pieces = _ByLayout(self._plain)
        for name, member in self._targets.items():
            piece = pieces.of(member)
            if piece is not None:
                plain[name] = self.addresses[piece.tensor or name] + piece.offset * member.itemsize
        return Sinks(plain, self._copies, away)

    def _plain(self, member: Member) -> Piece | None:
        """The whole of a tensor in its order, if this rank has it so."""
        pieces = held(member, self._rank)
        is_whole = len(pieces) == 1 and pieces[0].box.shape == member.shape
        return pieces[0] if is_whole and pieces[0].strides == strides_of(member.shape) else None

    def _copies(self, entry: Entry, box: Box, address: int) -> Iterable[Copy]:
        """The copies of a chunk at an address."""
        return chunk_copies(entry, box, address, self._targets[entry.name], self._rank, self.addresses.__getitem__)

    def finish(self) -> None:
        """Make the bytes the tensors'."""
        for _, land in self._landings.values():
            land()
