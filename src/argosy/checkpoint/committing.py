"""Perform the commit of one rank: its segment and index, then on rank 0 the root when all ranks are there."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

import argosy
from argosy.checkpoint.arranging import Share, entry, segment_header
from argosy.checkpoint.files import Files
from argosy.checkpoint.format import ROOT, Entry, Index, Root, UnitInfo, unseal
from argosy.checkpoint.operations import (
    Operation,
    Rmdir,
    index_name,
    make_root,
    plan_deletions,
    plan_rank,
    plan_root,
    plan_small,
    segment_name,
)
from argosy.checkpoint.owner import Owner, release, take
from argosy.checkpoint.owner import read as read_owner
from argosy.checkpoint.reading import roots
from argosy.checkpoint.retention import Keep, choose_kept
from argosy.checkpoint.snapshot import Snapshot
from argosy.checkpoint.stores import Store, open_store
from argosy.core import ArgosyError, DeadlinePassed, PeerLost
from argosy.transfer import State

RETRY_AFTER_S = (0.2, 1.0, 5.0)
RANKS_TIMEOUT_S = 600.0
PINS = "pins.json"


class Job(msgspec.Struct, kw_only=True):
    """One save, as all ranks know it."""

    step: int
    name: str
    border: int
    """Where in the arena the tensors begin that seldom change."""
    size: int
    room: int
    state: State
    tags: list[str] = []
    metrics: dict[str, float] = {}


class Committer:
    """Commits the saves of one rank, in their order."""

    owner: Owner | None = None
    retry_after_s: Sequence[float] = RETRY_AFTER_S
    ranks_timeout_s: float = RANKS_TIMEOUT_S
    before: Callable[[Operation], None] | None = None
    """Called before each operation; whatever it raises is what the disk would."""

    def __init__(self, store: Store, rank: int, size: int, keep: tuple[Keep, ...], say: Callable[[str], None]) -> None:
        self.store, self.rank, self.size, self.keep, self.say = store, rank, size, keep, say
        self._previous: dict[tuple[str, str], Entry] = {}
        self._quiet: set[str] | None = None

    def quiet(self, found: Collection[Share]) -> set[str]:
        """The tensors that will probably not have changed: they come last in the arena."""
        if self._quiet is not None:
            return self._quiet
        return {share.name for share in found if share.member.role in ("parameter", "buffer") and not share.has_moments}

    def commit(self, job: Job, snapshot: Snapshot) -> None:
        """Make a snapshot durable.

        Raises:
            OSError: the disk refused again and again.
            PeerLost: another rank could not write its part.
            DeadlinePassed: another rank did not come.
        """
        sums = snapshot.sums()
        entries, size = self._entries(job, snapshot, sums)
        for attempt in range(len(self.retry_after_s) + 1):
            try:
                self._write_rank(job, snapshot, entries, size, attempt)
                break
            except OSError as error:
                if attempt == len(self.retry_after_s):
                    self.give_up(job, str(error))
                    raise
                self.say(f"step {job.step}: {error}; trying again in {self.retry_after_s[attempt]:g} s")
                time.sleep(self.retry_after_s[attempt])
        if self.rank == 0:
            try:
                self._write_root(job)
            except BaseException as error:
                self.give_up(job, str(error))
                raise
        else:
            self._await_root(job)
        self._remember(entries)
        if self.rank == 0:
            with suppress(OSError):  # What could not be deleted now is deleted next time.
                self.prune()

    def _entries(self, job: Job, snapshot: Snapshot, sums: list[list[str]]) -> tuple[list[tuple[Share, Entry]], int]:
        """The entries of the index, and how much of the arena is to be written."""
        made = [(share, entry(share, "", texts)) for share, texts in zip(snapshot.shares, sums, strict=True)]
        tail = [(share, each) for share, each in made if share.offset >= job.border and each.bytes]
        old = [self._previous.get((each.name, str(each.box))) for _, each in tail]
        same = [
            before is not None and (before.sums, before.dtype, before.shape) == (each.sums, each.dtype, each.shape)
            for before, (_, each) in zip(old, tail, strict=True)
        ]
        if not tail or not all(same):
            return made, job.size if any(each.bytes for _, each in made) else 0
        known = {id(share): before for (share, _), before in zip(tail, old, strict=True) if before}
        head = sorted((share for share, _ in made if id(share) not in known), key=lambda share: share.offset)
        text = segment_header(head, job.room)
        snapshot.arena.map[: len(text)] = text
        result = [(share, known.get(id(share), each)) for share, each in made]
        return result, job.border if any(share.bytes for share in head) else 0

    def _write_rank(
        self, job: Job, snapshot: Snapshot, entries: list[tuple[Share, Entry]], size: int, attempt: int
    ) -> None:
        file = f"{job.name}/{segment_name(self.rank, attempt)}"
        for position, (share, each) in enumerate(entries):
            if not each.file or each.file.startswith(f"{job.name}/"):
                entries[position] = (share, msgspec.structs.replace(each, file=file))
        state = job.state
        local = {name: value for name, value in state.values.items() if name.startswith(f"rank{self.rank}/")}
        units = {name: UnitInfo(unit.options, unit.aliases) for name, unit in state.units.items()}
        index = Index(
            rank=self.rank,
            step=job.step,
            entries=[each for _, each in entries],
            values=state.values if self.rank == 0 else local,
            units=units if self.rank == 0 else {},
        )
        operations = plan_rank(job.name, self.rank, size, msgspec.json.encode(index), attempt)
        self.store.perform(operations, snapshot.arena.view, self.before)

    def _write_root(self, job: Job) -> None:
        paths = [f"{job.name}/{index_name(rank)}" for rank in range(self.size)]
        indexes = [(path, self._await(job, path)) for path in paths]
        if self.owner is not None and read_owner(self.store) != self.owner:
            raise PeerLost("this run's hold on the directory", f"another run took {self.store.name}")
        root = Root(
            step=job.step,
            session=job.name.rpartition("-")[2],
            saved_at=time.time(),
            size=self.size,
            parts=[],
            tags=job.tags,
            metrics=job.metrics,
            argosy=argosy.__version__,
        )
        self.store.perform(plan_root(job.name, make_root(root, indexes)), None, self.before)

    def _await_root(self, job: Job) -> None:
        path = f"{job.name}/{ROOT}"
        unseal(self._await(job, path), path)

    def _await(self, job: Job, path: str) -> bytes:
        """Wait for a file that another rank makes."""
        deadline = time.monotonic() + self.ranks_timeout_s
        pause = 0.001
        while True:
            with suppress(FileNotFoundError):
                return self.store.files.read(path)
            for name in self.store.files.listdir(job.name):
                if name.endswith(".failed"):
                    reason = self.store.files.read(f"{job.name}/{name}").decode()
                    raise PeerLost(name.removesuffix(".failed").replace("-", " "), reason)
            if time.monotonic() > deadline:
                raise DeadlinePassed(f"waiting for {path}", self.ranks_timeout_s)
            time.sleep(pause)
            pause = min(pause * 1.5, 0.05)

    def give_up(self, job: Job, reason: str) -> None:
        """Tell the other ranks not to wait."""
        with suppress(OSError):
            self.store.put(f"{job.name}/rank-{self.rank:05d}.failed", reason.encode())

    def _remember(self, entries: list[tuple[Share, Entry]]) -> None:
        now = {(each.name, str(each.box)): each for _, each in entries}
        if self._previous:
            before = self._previous
            self._quiet = {
                each.name for key, each in now.items() if key in before and before[key].sums == each.sums and each.bytes
            } - {each.name for key, each in now.items() if key not in before or before[key].sums != each.sums}
        self._previous = now

    def pin(self, step: int, *, keep: bool) -> None:
        """Remember durably that a step is kept, or no longer."""
        if self.rank != 0:
            return
        pins = read_pins(self.store.files)
        pins = pins | {step} if keep else pins - {step}
        self.store.perform(plan_small(PINS, msgspec.json.encode(sorted(pins))))

    def prune(self) -> list[Operation]:
        """Delete what no policy keeps."""
        operations, _ = plan_prune(self.store.files, self.keep)
        self.store.perform(operations, None, self.before)
        return operations


def read_pins(files: Files) -> set[int]:
    """The steps that are pinned."""
    try:
        return set(msgspec.json.decode(files.read(PINS), type=list[int]))
    except FileNotFoundError:
        return set()


def plan_prune(files: Files, keep: Sequence[Keep]) -> tuple[list[Operation], Mapping[str, str]]:
    """What would be deleted, and what is kept with its reason. A root that cannot be read is left alone."""
    valid: dict[str, Root] = {}
    unreadable: set[str] = set()
    for name, root in roots(files):
        if isinstance(root, ArgosyError):
            unreadable.add(name)
        else:
            valid[name] = root
    kept = choose_kept(valid, keep, read_pins(files))
    present = {name: files.listdir(name) for name in files.listdir(".") if name not in unreadable}
    return plan_deletions(present, valid, kept), kept


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
