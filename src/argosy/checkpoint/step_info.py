"""Look at committed steps without restoring them: list, verify, compare."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np

from argosy.checkpoint.chunk_reader import Reading
from argosy.checkpoint.commit_step import read_pins
from argosy.checkpoint.files import Files, aligned
from argosy.checkpoint.format import NO_JSON, CorruptShard, Entry, StepNotFound, step_of, text_sums
from argosy.checkpoint.per_rank_values import without_equals
from argosy.checkpoint.restore_step import restore
from argosy.checkpoint.step_index import ELSEWHERE, Step, all_chunks, find_step, open_step, roots
from argosy.checkpoint.stores import open_files
from argosy.checkpoint.write_plan import segment_header
from argosy.core import ArgosyError
from argosy.transfer import Value, add, finish, holds_values


class StepInfo(msgspec.Struct, kw_only=True):
    """A committed step in a listing."""

    step: int
    era: int = 0
    """How often the run had gone back to an older step."""
    directory: str
    saved_at: float = 0.0
    ranks: int = 0
    bytes: int = 0
    tags: list[str] = []
    metrics: dict[str, float] = {}
    pinned: bool = False
    fault: str = ""


def list_steps(path: str | Path) -> list[StepInfo]:
    """The committed steps, newest first; a damaged root is listed with its fault."""
    files, _ = open_files(path)
    pins = read_pins(files)
    found: list[StepInfo] = []
    for name, root in roots(files):
        number = step_of(name) or 0
        if isinstance(root, ArgosyError):
            found.append(StepInfo(step=number, directory=name, fault=str(root)))
            continue
        found.append(
            StepInfo(
                step=number,
                era=root.era,
                directory=name,
                saved_at=root.saved_at,
                ranks=root.size,
                bytes=root.bytes,
                tags=root.tags,
                metrics=root.metrics,
                pinned=number in pins,
            )
        )
    return found


class TensorInfo(msgspec.Struct, kw_only=True):
    """A tensor of a step."""

    name: str
    role: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int
    pieces: int
    digest: str


def opened(path: str | Path, step: int | None) -> Step:
    """A step, by its number or the newest that can be opened."""
    return without_equals(next(find_step(open_files(path)[0], step, str(path))))


def tensors(step: Step) -> dict[str, TensorInfo]:
    """The tensors of a step, with digests that do not depend on how it was cut."""
    grouped: dict[str, list[Entry]] = {}
    for entry in step.entries:
        grouped.setdefault(entry.name, []).append(entry)
    found: dict[str, TensorInfo] = {}
    for name in sorted(grouped):
        entries = grouped[name]
        first = entries[0]
        sums = add(text_sums(text) for entry in entries for text in entry.sums)
        found[name] = TensorInfo(
            name=name,
            role=first.role,
            dtype=first.dtype,
            shape=first.shape,
            bytes=sum(entry.bytes for entry in entries),
            pieces=len(entries),
            digest=finish(name, first.dtype, first.shape, sums),
        )
    return found


def plain_values(step: Step) -> dict[str, Value]:
    """What a step has besides tensors, as it is stored."""
    return {name: value for name, value in step.values.items() if holds_values(value)}


def verify(path: str | Path, step: int | None, progress: Callable[[int], None] = lambda _: None) -> Iterator[str]:
    """Read every byte of a step (None: of all steps), and yield what is wrong; `progress` is told bytes done."""
    files, _ = open_files(path)
    seen = False
    for name, root in roots(files):
        if step is not None and step_of(name) != step:
            continue
        seen = True
        try:
            if isinstance(root, ArgosyError):
                raise root
            chosen = open_step(files, name, root)
        except ArgosyError as error:
            yield str(error)
            continue
        yield from _verify_step(files, chosen, progress)
    if not seen:
        what = "no step was committed" if step is None else f"step {step} was not committed"
        raise StepNotFound(f"{what} in {path}", hint=ELSEWHERE if step is None else "`argosy ckpt ls` lists them")


def _verify_step(files: Files, step: Step, progress: Callable[[int], None]) -> Iterator[str]:
    for file, fault in _header_faults(files, step):
        yield str(CorruptShard(file, "the header, which restoring does not use", "that of its index", fault))
    batch = 32
    chunks = all_chunks(step.entries)
    for at in range(0, len(chunks), batch):
        part = chunks[at : at + batch]
        try:
            Reading(files, part).verify()
        except CorruptShard:
            for chunk in part:  # One by one, so that each fault is named.
                try:
                    Reading(files, [chunk]).verify()
                except CorruptShard as error:
                    yield str(error)
        progress(sum(box.cells * entry.bytes // max(1, entry.box.cells) for entry, box, _, _ in part))


def _header_faults(files: Files, step: Step) -> Iterator[tuple[str, str]]:
    """The segments of this step whose header is not what its index says: others would read them wrongly."""
    written: dict[str, list[Entry]] = {}
    for entry in step.entries:
        if entry.file.startswith(f"{step.name}/"):
            written.setdefault(entry.file, []).append(entry)
    for file, entries in written.items():
        if not any(entry.bytes for entry in entries):
            continue  # It has none, as nothing was to be written.
        entries.sort(key=lambda entry: entry.offset)
        wanted = segment_header(entries, entries[0].offset)
        buffer = aligned(len(wanted))
        count = files.read_into(file, 0, memoryview(buffer)[: len(wanted)])
        found = buffer[: min(count, len(wanted))]
        try:
            same = found[:8] == wanted[:8] and msgspec.json.decode(found[8:]) == msgspec.json.decode(wanted[8:])
        except NO_JSON as error:
            yield file, str(error)
            continue
        if not same:
            yield file, "another one"


class Difference(msgspec.Struct, kw_only=True):
    """How a tensor differs between two steps."""

    name: str
    kind: str
    """changed, only in the first, only in the second, or another shape or dtype."""
    max_abs: float | None = None
    relative: float | None = None
    """The norm of the change by the norm of the first."""


def diff(path: str | Path, first: int, second: int, other: str | Path | None = None) -> list[Difference]:
    """Which tensors differ between two steps, and by how much; equal ones are told by their digests alone."""
    old, new = tensors(opened(path, first)), tensors(opened(other or path, second))
    found: list[Difference] = []
    changed: list[str] = []
    for name in sorted(set(old) | set(new)):
        if name not in new or name not in old:
            found.append(Difference(name=name, kind="only in the first" if name in old else "only in the second"))
        elif (old[name].dtype, old[name].shape) != (new[name].dtype, new[name].shape):
            found.append(Difference(name=name, kind="another shape or dtype"))
        elif old[name].digest != new[name].digest:
            changed.append(name)
    if changed:
        left, right = restore(path, step=first).tensors, restore(other or path, step=second).tensors
        for name in changed:
            a, b = _numbers(left[name]), _numbers(right[name])
            norm = float(np.linalg.norm(a))
            relative = float(np.linalg.norm(b - a)) / norm if norm else None
            found.append(Difference(name=name, kind="changed", max_abs=float(np.abs(b - a).max()), relative=relative))
    return sorted(found, key=lambda each: each.name)


def _numbers(tensor: object) -> "np.ndarray[tuple[int], np.dtype[np.complex128]]":
    if hasattr(tensor, "data_ptr"):
        import torch

        assert isinstance(tensor, torch.Tensor)
        tensor = (tensor if tensor.is_complex() else tensor.double()).numpy()
    return np.asarray(tensor).astype(np.complex128).ravel()
