"""Bring a committed step back: into live modules and optimizers of any layout, or as tensors for whoever asks.

R3  Everything that will be written is verified before the first byte is: on error the destination is unchanged.
R4  All ranks restore the same step, or none does.
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from argosy.checkpoint.files import Files
from argosy.checkpoint.format import CorruptShard, Entry, StepNotFound
from argosy.checkpoint.gathering import as_state, exchanged
from argosy.checkpoint.reading import Chunk, Reader, Step, all_chunks, chunk_copies, covered, find_step, stored_state
from argosy.checkpoint.snapshot import address_of
from argosy.checkpoint.stores import open_files
from argosy.core import ConfigError
from argosy.transfer import Adoption, Box, Copy, Member, Role, State, Unit, full_name, held

Rename = Mapping[str, str] | Callable[[str], str]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a caller of `restore` asks for besides the step."""

    rename: Rename | None = None
    partial: bool = False
    fresh: bool = False
    roles: Collection[Role] | None = None


def restore(
    path: str | Path,
    into: Any = None,
    step: int | None = None,
    *,
    wish: Wish | None = None,
    **wishes: Any,
) -> Restored:
    """Restore `step` (None: the newest that is whole) from a run's directory or a store.

    `into` is a State, a module, or a dict of modules, optimizers and whatever has a state_dict; their tensors are
    written in place, in whatever layout they have. Without it, the tensors are returned whole: no ranks, no process
    group. Keyword arguments are those of `Wish`: `rename` maps stored names to live ones, `partial=True` lets
    names on either side be without a partner, `roles` restores only these, `fresh=True` lets moments be left out.

    Raises:
        StepNotFound: nothing was committed, or not this step.
        CorruptShard: the asked step is damaged. With `step=None` an older one is taken instead, and said.
        ConfigError: names, shapes or dtypes do not fit. In all cases the destination is unchanged.
    """
    asked = wish or Wish(**wishes)
    begun = time.monotonic()
    files, source = open_files(path)
    skipped: list[str] = []
    for found in find_step(files, step):
        try:
            restored = _collect(files, found) if into is None else _write(files, found, as_state(into), asked)
        except CorruptShard as error:
            if step is not None:
                raise
            skipped.append(f"step {found.root.step}: {error}")
            continue
        restored.source, restored.seconds = source, time.monotonic() - begun
        restored.skipped = skipped
        return restored
    raise StepNotFound("no step is whole", hint="; ".join(skipped))


def _collect(files: Files, found: Step) -> Restored:
    """All tensors, whole, in memory of their own."""
    stored = stored_state(found)
    targets = {name: _fresh(member) for name, _, member in stored.members()}
    _check_cover(found.entries, targets)
    _fill(files, _wanted(found.entries, targets, 0), targets, 0)
    tensors = {name: member.local for name, member in targets.items()}
    for unit in stored.units.values():
        for alias in unit.aliases:
            tensors[alias] = tensors[unit.name]
    total = sum(entry.bytes for entry in found.entries)
    options = {unit.name: unit.options for unit in stored.units.values() if unit.options}
    return Restored(found.root.step, "", 0.0, total, tensors, found.values, options)


def _fresh(member: Member) -> Member:
    from argosy.checkpoint.gathering import new_tensor
    from argosy.transfer import replicated

    tensor = new_tensor(member.dtype, member.shape)
    return Member(member.key, member.role, member.dtype, replicated(member.shape), tensor, member.kind)


def _write(files: Files, found: Step, live: State, wish: Wish) -> Restored:
    """Write a step into live tensors, all or nothing."""
    error: CorruptShard | ConfigError | None = None
    adoption, wanted = Adoption({}, lambda: None), list[Chunk]()
    try:
        adoption, entries = _prepare(found, live, wish)
        wanted = _wanted(entries, adoption.targets, live.rank)
        Reader(files).read(wanted)  # R3: a first pass that only verifies.
    except (CorruptShard, ConfigError) as caught:
        error = caught
    answers = exchanged(live.size, (found.name, None if error is None else str(error)))
    if error is not None:
        raise error
    for name, fault in answers:
        if fault or name != found.name:  # R4
            raise CorruptShard(found.name, "another rank", "the same whole step", fault or name)
    _fill(files, wanted, adoption.targets, live.rank)
    adoption.commit()
    total = sum(box.cells * entry.bytes // max(entry.box.cells, 1) for entry, box, _, _ in wanted)
    return Restored(found.root.step, "", 0.0, total, kept=adoption.kept, unused=adoption.unused, values=found.values)


def _prepare(found: Step, live: State, wish: Wish) -> tuple[Adoption, list[Entry]]:
    stored = stored_state(found)
    renamed = _renamed(stored, wish.rename)
    # What other ranks kept for themselves is not ours to want.
    foreign = [name for name, unit in renamed.units.items() if _is_foreign(unit, live)]
    for name in foreign:
        del renamed.units[name]
    if wish.roles is not None:
        for unit in renamed.units.values():
            unit.members = {k: m for k, m in unit.members.items() if m.role in wish.roles}
        renamed.units = {name: unit for name, unit in renamed.units.items() if unit.members}
        if not wish.fresh and "parameter" in wish.roles and "moment" not in wish.roles and _has_moments(stored):
            raise ConfigError(
                "parameters would be restored without their moments", hint="pass fresh=True if that is meant"
            )
    assert live.adopt is not None
    adoption = live.adopt(renamed)
    if not wish.partial and wish.roles is None:
        if adoption.unused:
            raise ConfigError(f"no place for stored {_some(adoption.unused)}", hint="rename them, or pass partial=True")
        if adoption.kept:
            raise ConfigError(f"not stored: {_some(adoption.kept)}", hint="pass partial=True to leave them as they are")
    back = {new.name: old for old, new in zip(stored.units, renamed_units(stored, wish.rename), strict=True)}
    entries = [_rename_entry(entry, back) for entry in found.entries]
    entries = [entry for entry in entries if entry.name in adoption.targets]
    _check_cover(entries, adoption.targets)
    return adoption, entries


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _is_foreign(unit: Unit, live: State) -> bool:
    return any(m.role == "local" for m in unit.members.values()) and not unit.name.startswith(f"rank{live.rank}/")


def _has_moments(stored: State) -> bool:
    return any(member.role == "moment" for _, _, member in stored.members())


def renamed_units(stored: State, rename: Rename | None) -> list[Unit]:
    """The stored units under the names that they have here."""

    def new(name: str) -> str:
        return name if rename is None else rename(name) if callable(rename) else rename.get(name, name)

    return [
        Unit(new(unit.name), dict(unit.members), unit.options, tuple(map(new, unit.aliases)))
        for unit in stored.units.values()
    ]


def _renamed(stored: State, rename: Rename | None) -> State:
    units = renamed_units(stored, rename)
    if len({unit.name for unit in units}) != len(units):
        raise ConfigError("rename= gives two stored tensors the same name")
    return State(units={unit.name: unit for unit in units}, values=stored.values)


def _rename_entry(entry: Entry, back: Mapping[str, str]) -> Entry:
    import msgspec

    names = {old: new for new, old in back.items()}
    new = names.get(entry.unit, entry.unit)
    return entry if new == entry.unit else msgspec.structs.replace(entry, unit=new, name=full_name(new, entry.key))


def _check_cover(entries: Iterable[Entry], targets: Mapping[str, Member]) -> None:
    boxes: dict[str, list[Box]] = {}
    for entry in entries:
        boxes.setdefault(entry.name, []).append(entry.box)
    for name, member in targets.items():
        if name in boxes:
            covered(name, member.shape, boxes[name])


def _wanted(entries: Iterable[Entry], targets: Mapping[str, Member], rank: int) -> list[Chunk]:
    """The chunks that have cells which this rank needs."""
    mine = {name: [piece.box for piece in held(member, rank)] for name, member in targets.items()}
    near = [entry for entry in entries if any(box & entry.box for box in mine.get(entry.name, ()))]
    return [chunk for chunk in all_chunks(near) if any(box & chunk[1] for box in mine[chunk[0].name])]


def _fill(files: Files, wanted: Sequence[Chunk], targets: Mapping[str, Member], rank: int) -> None:
    """Read, verify and write; a tensor that is not plain CPU memory gets its bytes through one that is."""
    from argosy.checkpoint.gathering import landing

    landings = {name: landing(member.local) for name, member in targets.items() if held(member, rank)}

    def sink(entry: Entry, box: Box, address: int) -> list[Copy]:
        to = address_of(landings[entry.name][0])
        return list(chunk_copies(entry, box, address, targets[entry.name], rank, to))

    Reader(files).read(wanted, sink)
    for _, finish in landings.values():
        finish()
