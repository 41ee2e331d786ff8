"""Perform the commit of one rank: its segment and index, then on rank 0 the root when all ranks are there."""

import errno
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec

import argosy
from argosy.checkpoint.files import Files
from argosy.checkpoint.format import (
    NO_JSON,
    ROOT,
    CorruptShard,
    Draft,
    Entry,
    Root,
    StepNotFound,
    Unreadable,
    root_of,
    seal,
    step_of,
    unseal,
)
from argosy.checkpoint.operations import (
    Operation,
    Rmdir,
    Segment,
    Slice,
    Write,
    index_name,
    is_under_way,
    make_root,
    plan_deletions,
    plan_rest,
    plan_root,
    plan_small,
    plan_start,
    segment_name,
)
from argosy.checkpoint.owner import Owner, release, take
from argosy.checkpoint.owner import read as read_owner
from argosy.checkpoint.retention import Keep, choose_kept, needed_by
from argosy.checkpoint.step_index import roots
from argosy.checkpoint.stores import Store, open_store
from argosy.checkpoint.write_plan import make_index, segment_header
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.transfer import Box

RETRY_AFTER_S = (0.2, 1.0, 5.0)
RANKS_TIMEOUT_S = 600.0
SAY_S = 20.0
"""After waiting so long for another rank, rank 0 reports it."""
CROSSING_S = 2.0
"""How often a waiting rank checks whether another rank saves a different step."""
PINS = "pins.json"


class Filling(Protocol):
    """A snapshot that is being made."""

    def until(self, end: int) -> None:
        """Return when the first `end` bytes of its arena are copied; raises what went wrong, if it did."""
        ...

    def entries(self) -> list[Entry]:
        """All its boxes with their sums, when it is whole; raises what went wrong, if it did."""
        ...


class Chosen(NamedTuple):
    """What is written of a snapshot."""

    entries: list[Entry]
    """All boxes of the rank, some of them in older files."""
    size: int
    """So many bytes of the arena."""

    def named(self, directory: str, path: str) -> list[Entry]:
        """The entries, those of this step in the file that this attempt writes."""
        own = f"{directory}/"
        return [
            msgspec.structs.replace(each, file=path) if each.file != path and each.file.startswith(own) else each
            for each in self.entries
        ]


class Committer:
    """Commits the saves of one rank, in their order."""

    owner: Owner | None = None
    retry_after_s: Sequence[float] = RETRY_AFTER_S
    ranks_timeout_s: float = RANKS_TIMEOUT_S
    say_after_s: float = SAY_S
    before: Callable[[Operation], None] | None = None
    """Called before each operation; whatever it raises is what the disk would."""

    def __init__(self, store: Store, rank: int, size: int, keep: tuple[Keep, ...], say: Callable[[str], None]) -> None:
        self.store, self.rank, self.size, self.keep, self.say = store, rank, size, keep, say
        self._previous: dict[tuple[str, Box], Entry] = {}
        self._pending = self._committed = self._untidy = ""

    def commit(self, draft: Draft, arena: memoryview, filling: Filling | None = None) -> None:
        """Make a snapshot durable; its writing begins while it is still being copied, if it is (`filling`).

        Raises:
            TornSnapshot: it did not become whole.
            OSError: the disk refused again and again.
            PeerLost: another rank could not write its part.
            DeadlinePassed: another rank did not come.
        """
        written = self.write_part(draft, arena, filling)
        if self.rank == 0:
            try:
                self._write_root(draft)
            except BaseException as error:
                self.give_up(draft.name, str(error))
                raise
        else:
            self._await_root(draft)
        self._pending, self._committed = "", draft.name
        self._previous = {(each.name, each.box): each for each in written}

    def write_part(self, draft: Draft, arena: memoryview, filling: Filling | None = None) -> list[Entry]:
        """Write this rank's segment and index; returns what the index names. Raises as `commit` does."""
        self._pending = draft.name
        chosen: list[Chosen] = []
        path = ""
        for attempt in range(len(self.retry_after_s) + 1):
            path = f"{draft.name}/{segment_name(self.rank, attempt)}"
            try:
                self.store.perform(self._operations(path, draft, arena, filling, chosen), arena, self.before)
                break
            except BaseException as error:
                self._remove(path)
                if not isinstance(error, OSError) or attempt == len(self.retry_after_s):
                    self.give_up(draft.name, str(error))
                    raise
                again_s = self.retry_after_s[attempt]
                self.say(f"step {draft.step} in {self.store.name}: {error}; retrying in {again_s:g} s")
                time.sleep(again_s)
        return chosen[0].named(draft.name, path)

    def _operations(
        self, path: str, draft: Draft, arena: memoryview, filling: Filling | None, chosen: "list[Chosen]"
    ) -> Iterator[Operation]:
        """The plan of this rank, as far as it is known: each write when its bytes are there.

        What is written is `chosen` once, for all attempts: the header in the arena is made for it.
        """
        segment = Segment(path, self._sure(draft) if filling else 0)
        for operation in plan_start(segment):
            if filling and isinstance(operation, Write) and isinstance(operation.data, Slice):
                filling.until(operation.data.start + operation.data.length)
            yield operation
        if not chosen:
            entries = filling.entries() if filling else draft.entries
            chosen.append(self._changed(msgspec.structs.replace(draft, entries=entries), arena))
        index = msgspec.json.encode(make_index(draft, chosen[0].named(draft.name, path)))
        yield from plan_rest(segment, chosen[0].size, f"{draft.name}/{index_name(self.rank)}", index)

    def _remove(self, path: str) -> None:
        """Delete a failed attempt, unless its index is there already: then somebody may rely on it."""
        with suppress(OSError):
            directory = path.partition("/")[0]
            if index_name(self.rank) not in self.store.files.listdir(directory):
                self.store.delete(path)

    def _sure(self, draft: Draft) -> int:
        """How much of the arena is written whatever it will hold: the tail may turn out to be known already."""
        return draft.border if self._previous else draft.bytes

    def _changed(self, draft: Draft, arena: memoryview) -> "Chosen":
        """What to write: without the tail, if all of it is in older files that are still there."""
        tail = [each for each in draft.entries if each.offset >= draft.border and each.bytes]
        known: dict[int, Entry] = {}
        for each in tail:
            old = self._previous.get((each.name, each.box))
            if old is None or (old.sums, old.dtype, old.shape) != (each.sums, each.dtype, each.shape):
                break
            known[id(each)] = old
        if not tail or len(known) < len(tail) or not self._are_there(known.values()):
            return Chosen(draft.entries, draft.bytes if any(entry.bytes for entry in draft.entries) else 0)
        head = sorted((each for each in draft.entries if id(each) not in known), key=lambda each: each.offset)
        text = segment_header(head, draft.room)
        arena[: len(text)] = text
        entries = [known.get(id(each), each) for each in draft.entries]
        return Chosen(entries, draft.border if any(each.bytes for each in head) else 0)

    def _are_there(self, older: Iterable[Entry]) -> bool:
        """Whether nobody removed or shortened the files that would be referred to."""
        ends: dict[str, int] = {}
        for each in older:
            ends[each.file] = max(ends.get(each.file, 0), each.offset + each.bytes)
        try:
            return all(self.store.files.size(file) >= end for file, end in ends.items())
        except OSError:
            return False

    def _write_root(self, draft: Draft) -> None:
        paths = [f"{draft.name}/{index_name(rank)}" for rank in range(self.size)]
        indexes = [(path, self._await_sound(draft, path)) for path in paths]
        self._hold()
        root = make_root(root_of(draft, time.time(), argosy.__version__), indexes)
        self.store.perform(plan_root(draft.name, root), None, self.before)

    def _hold(self) -> None:
        """Check that the directory still belongs to this run; take it again if it was removed and made again."""
        if self.owner is None:
            return
        other = read_owner(self.store)
        if other is None:
            take(self.store, self.owner.session)
        elif other != self.owner:
            raise PeerLost("this run's hold on the directory", f"another run took {self.store.name}")

    def _await_root(self, draft: Draft) -> None:
        path = f"{draft.name}/{ROOT}"
        unseal(self._await(draft, path), path)

    def _await_sound(self, draft: Draft, path: str) -> bytes:
        """Wait for an index. From a store it is read until two readings agree: the root will vouch for it."""
        data = self._await(draft, path)
        while not hasattr(self.store.files, "descriptor") and data != (again := self._await(draft, path)):
            data = again
        return data

    def _await(self, draft: Draft, path: str) -> bytes:
        """Wait for a file that another rank makes."""
        begun = time.monotonic()
        deadline, look_at, say_at = begun + self.ranks_timeout_s, begun + CROSSING_S, begun + self.say_after_s
        pause = 0.001
        while True:
            with suppress(FileNotFoundError):
                return self.store.files.read(path)
            names = self.store.files.listdir(draft.name)
            for name in names:
                if name.endswith(".failed"):
                    reason = self.store.files.read(f"{draft.name}/{name}").decode()
                    rank = int(name.removeprefix("rank-").removesuffix(".failed"))
                    raise PeerLost(f"the part of rank {rank}", reason)
            if index_name(self.rank) not in names:  # What this rank wrote itself is gone: nobody waits for the rest.
                where = f"{self.store.name}/{draft.name}"
                raise FileNotFoundError(errno.ENOENT, "removed while it was written", where)
            if time.monotonic() > look_at:
                self._check_crossing(draft)
                look_at += CROSSING_S
            if time.monotonic() > say_at and self.rank == 0:
                self.say(f"step {draft.step} waits for {path}, up to {self.ranks_timeout_s:g} s")
                say_at = math.inf
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"waiting for {path}", self.ranks_timeout_s)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def _check_crossing(self, draft: Draft) -> None:
        """See to it that no rank saves another step as its save of the same number."""
        number = draft.name.rpartition("-")[2]
        for name in self.store.files.listdir("."):
            if name != draft.name and step_of(name) is not None and name.endswith(f"-{number}"):
                raise ConfigError(
                    f"ranks save different steps: step {draft.step} here, step {step_of(name)} on another rank",
                    hint="every rank saves the same steps, in the same order",
                )

    def let_go(self) -> None:
        """A rank was replaced: nobody waits for its part of what is being committed."""
        if self._pending:
            self.give_up(self._pending, "a rank was replaced meanwhile")

    def give_up(self, name: str, reason: str) -> None:
        """Tell the other ranks not to wait."""
        with suppress(OSError):
            self.store.put(f"{name}/rank-{self.rank:05d}.failed", reason.encode())

    def pin(self, step: int, *, keep: bool, is_coming: bool = False) -> None:
        """Remember durably that a step is kept, or no longer.

        Raises:
            StepNotFound: it shall be kept, and is neither there nor coming.
        """
        if self.rank != 0:
            return
        if keep and not is_coming and step not in (known := [step_of(name) for name, _ in roots(self.store.files)]):
            there = ", ".join(map(str, known[:8]))
            raise StepNotFound(f"step {step} was not committed in {self.store.name}", hint=f"there are {there}")
        pins = read_pins(self.store.files)
        pins = pins | {step} if keep else pins - {step}
        self.store.perform(plan_small(PINS, msgspec.json.encode(sorted(pins)), replaces=True))

    def untag(self, tag: str) -> None:
        """Take a tag from the steps that have it: their roots are replaced by such without it."""
        if self.rank != 0:
            return
        tagged = [(name, root) for name, root in roots(self.store.files) if isinstance(root, Root) and tag in root.tags]
        if not tagged:
            raise StepNotFound(f"no step is tagged {tag!r} in {self.store.name}")
        for name, root in tagged:
            without = msgspec.structs.replace(root, tags=[each for each in root.tags if each != tag])
            self.store.perform(plan_small(f"{name}/{ROOT}", seal(without), replaces=True))

    def tidy(self) -> None:
        """Delete what no policy keeps, behind a commit: that a step is durable need not wait for it."""
        if self.rank != 0:
            return
        try:
            operations, _ = plan_prune(self.store.files, self.keep, self._committed)
            self.store.perform(operations, None, self.before)
        except (OSError, Unreadable) as error:
            if str(error) != self._untidy:  # What could not be deleted now is deleted next time.
                self.say(f"old steps of {self.store.name} could not be deleted: {error}")
            self._untidy = str(error)
        except CorruptShard as error:
            self.say(f"nothing is deleted: {error}; write the steps to keep into it, or remove it")


def read_pins(files: Files) -> set[int]:
    """The steps that are pinned.

    Raises:
        CorruptShard: the file is altered; nothing may be deleted on a guess.
    """
    try:
        return set(msgspec.json.decode(files.read(PINS), type=list[int]))
    except FileNotFoundError:
        return set()
    except NO_JSON as error:
        raise CorruptShard(PINS, "the pinned steps", "a list of numbers", str(error)) from error


def plan_prune(files: Files, keep: Sequence[Keep], committed: str = "") -> tuple[list[Operation], Mapping[str, str]]:
    """What would be deleted, and what stays with its reason. A root that is damaged is left alone.

    `committed` is the directory that was committed last: later ones of its session are under way.

    Raises:
        Unreadable: one cannot be read just now, so nobody knows what it needs.
    """
    valid: dict[str, Root] = {}
    unreadable: set[str] = set()
    for name, root in roots(files):
        if isinstance(root, Unreadable):
            raise root
        if isinstance(root, ArgosyError):
            unreadable.add(name)
        else:
            valid[name] = root
    kept = choose_kept(valid, keep, read_pins(files))
    present = {name: files.listdir(name) for name in files.listdir(".") if name not in unreadable}
    present = {name: found for name, found in present.items() if not is_under_way(name, valid, committed)}
    damaged = dict.fromkeys(unreadable, "its manifest cannot be read")
    return plan_deletions(present, valid, kept), {**needed_by(valid, kept), **kept, **damaged}


def prune_steps(
    path: str | Path, keep: Sequence[Keep], *, dry_run: bool = False
) -> tuple[list[str], Mapping[str, str]]:
    """Delete what `keep`, tags and pins do not hold; returns the directories gone, and those kept with the reason.

    Raises:
        DirectoryInUse: a run writes there; it prunes by its own policies.
    """
    store = open_store(path)
    operations, kept = plan_prune(store.files, keep)
    if not dry_run and operations:
        me = take(store, "prune")
        try:
            store.perform(operations)
        finally:
            release(store, me)
    return sorted({operation.path for operation in operations if isinstance(operation, Rmdir)}), kept
