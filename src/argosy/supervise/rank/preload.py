"""Import packages into a zygote, and see that each leaves the process fit to be forked.

Runs in a process with one thread, whose descriptors 0, 1 and 2 are open. It forks nothing itself.

P1  A module cannot be un-imported: one that breaks a rule spoils the process, and a fresh one leaves it out.
P2  What plain python would show or do at an import happens in the rank: such an import is left out.
P3  An import that raises is passed over: the rank raises the same error, at the right place.
"""

import ctypes
import os
import sys
from collections.abc import Callable, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, cast

from argosy.control import DYNAMO, OF_TORCH, TORCH
from argosy.supervise.imports.zygote_key import ALL
from argosy.supervise.rank.fork_safety import changes, compare, look

# Set before the interpreter starts: these libraries would start threads at import.
PRELOAD_ENV = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

# What tells ranks apart: a module that reads one of these at import must be imported by each rank.
RANK_VARIABLES = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"}
    | {"MASTER_ADDR", "MASTER_PORT", "SLURM_PROCID", "SLURM_LOCALID", "OMPI_COMM_WORLD_RANK"}
)


@dataclass(frozen=True)
class Preloaded:
    """What preloading did. `spoiled` says why this process must not fork ranks; empty if it may."""

    loaded: tuple[str, ...]
    failed: Mapping[str, str]
    spoiled: tuple[tuple[str, str], ...]
    environ: Mapping[str, str | None]
    read: tuple[str, ...] = ()
    """Variables that the imports read; `ALL` if one went through the whole environment."""


def preload(entries: Sequence[str], report: Callable[[str], None]) -> Preloaded:
    """Import `entries` in order; `report` hears each before it is begun, so that a crash has a name.

    Goes on after an entry that spoils the process, to find all such entries in one pass. Variables that
    the script itself sets (`$NAME=value`) have that value meanwhile; where it is not known, a package
    that reads the variable is spoiled.
    """
    original = dict(os.environ)
    for setting in entries:
        name, is_literal, value = setting.removeprefix("$").partition("=")
        if not setting.startswith("$") or not is_literal:
            continue
        if name.endswith("?"):
            os.environ.setdefault(name[:-1], value)
        else:
            os.environ[name] = value
    try:
        return _preload(entries, report)
    finally:
        for name in {setting[1:].partition("=")[0].removesuffix("?") for setting in entries if setting[0] == "$"}:
            _put(name, original.get(name))


def _put(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
    else:
        os.environ[name] = value


def _preload(entries: Sequence[str], report: Callable[[str], None]) -> Preloaded:
    loaded: list[str] = []
    failed: dict[str, str] = {}
    spoiled: dict[str, str] = {}
    environ: dict[str, str | None] = {}
    todo = [entry for entry in entries if not entry.startswith("$")]
    watched = RANK_VARIABLES | {entry[1:] for entry in entries if entry.startswith("$") and "=" not in entry}
    read: set[str] = set()
    before = look()
    if len(before.threads) != 1:
        raise RuntimeError(f"preload needs a process with one thread, this one has {len(before.threads)}")
    for entry in todo:
        report(entry)
        with _recording(watched, read) as reasons:
            error = _import(entry)
        after = look(threads_before=before.threads)
        reasons += compare(before, after)
        if reasons:
            spoiled[entry] = "; ".join(dict.fromkeys(reasons))
        if error is not None:
            failed[entry] = error
        elif not reasons:
            loaded.append(entry)
        if entry not in OF_TORCH:  # What torch sets, it derives again where it is missing.
            environ |= changes(before.environ, after.environ)
        if "torch" in sys.modules and "torch" not in todo:
            # A package brought torch in: every rank would import the companions for itself.
            todo += [*TORCH, DYNAMO]
        before = after
    return Preloaded(tuple(loaded), failed, tuple(spoiled.items()), environ, tuple(sorted(read)))


def _import(entry: str) -> str | None:
    """Import one entry as `__main__` would; return the error, if any, as python's last line of it."""
    module, _, name = entry.partition(":")
    statement = f"from {module} import {name}" if name else f"import {module}"
    # A warning that points at the importer is shown by default only if that is __main__: so it is here.
    scope = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        exec(compile(statement, "<preload>", "exec"), scope)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


@contextmanager
def _recording(watched: Collection[str], read: set[str]) -> Generator[list[str]]:
    """Note what an import reads of the rank's identity and what it writes, as reasons against it.

    All variables that it reads are added to `read`.
    """
    reasons: list[str] = []
    plain, argv = type(os.environ), sys.argv

    class Environ(plain):
        def __getitem__(self, key: str) -> str:
            read.add(str(key))  # Some ask with bytes, in vain.
            if key in watched:
                reasons.append(f"{_caller()} reads {key}")
            return super().__getitem__(key)

        def __iter__(self) -> Iterator[str]:
            read.add(ALL)
            return super().__iter__()

        def copy(self) -> dict[str, str]:
            # Copying the whole is no interest in any variable: children inherit it so.
            return {key: plain.__getitem__(self, key) for key in plain.__iter__(self)}

    class Argv(list[str]):
        def __getitem__(self, index: Any) -> Any:
            reasons.append(f"{_caller()} reads sys.argv")
            return cast(Any, super().__getitem__(index))

        def __iter__(self) -> Iterator[str]:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__iter__()

        def __len__(self) -> int:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__len__()

        def __contains__(self, item: object) -> bool:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__contains__(item)

    recorder = Argv(argv)
    with _captured() as output:
        os.environ.__class__ = Environ
        sys.argv = recorder
        try:
            yield reasons
        finally:
            os.environ.__class__ = plain
            if sys.argv is recorder:
                sys.argv = argv
    if output:
        reasons.append(f"writes {output[0]!r}")


@contextmanager
def _captured() -> Generator[list[str]]:
    """Catch what is written to descriptors 1 and 2; yield a list that then holds its first line."""
    output: list[str] = []
    with open(os.memfd_create("preload"), "rb") as caught:
        _flush()
        saved = [(descriptor, os.dup(descriptor)) for descriptor in (1, 2)]
        try:
            for descriptor, _ in saved:
                os.dup2(caught.fileno(), descriptor)
            yield output
        finally:
            _flush()
            for descriptor, copy in saved:
                os.dup2(copy, descriptor)
                os.close(copy)
        caught.seek(0)
        text = caught.read(4096).decode(errors="replace")
    if text:
        output.append(text.strip().partition("\n")[0][:120])


def _flush() -> None:
    """Empty Python's and C's buffers: what stays in one is written again by every rank."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # pyright: ignore[reportUnnecessaryComparison]  # None without a descriptor.
            stream.flush()
    ctypes.CDLL(None).fflush(None)


def _caller() -> str:
    """Name the module that asked, past the standard library's own layers."""
    frame = sys._getframe(2)  # pyright: ignore[reportPrivateUsage]
    while frame.f_back is not None and frame.f_globals.get("__name__") in {
        "os",
        "_collections_abc",
        "collections.abc",
    }:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))
