"""Import packages into a zygote, and see that each leaves the process fit to be forked.

Runs in a process with one thread, whose descriptors 0, 1 and 2 are open. It forks nothing itself.

P1  A module cannot be un-imported: one that breaks a rule spoils the process, and a fresh one leaves it out.
P2  What plain python would show or do at an import happens in the rank: such an import is left out.
P3  An import that raises is passed over: the rank raises the same error, at the right place.
"""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from argosy.process.imports import TORCH

# Set before the interpreter starts: pools that a library would start at import. `restore_env` takes them back.
PRELOAD_ENV = {"OPENBLAS_NUM_THREADS": "1", "JE_ARROW_MALLOC_CONF": "background_thread:false"}

# What tells ranks apart: a module that reads one of these at import must be imported by each rank.
RANK_VARIABLES = frozenset(
    "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE GROUP_RANK NODE_RANK MASTER_ADDR MASTER_PORT "
    "SLURM_PROCID SLURM_LOCALID OMPI_COMM_WORLD_RANK".split()
)
_ACCELERATORS = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/infiniband", "/dev/hl", "/dev/davinci")
_THREAD_END_S = 0.1


@dataclass(frozen=True)
class Preloaded:
    """What preloading did. `spoiled` says why this process must not fork ranks; empty if it may."""

    loaded: tuple[str, ...]
    failed: Mapping[str, str]
    spoiled: tuple[tuple[str, str], ...]
    seconds: Mapping[str, float]
    environ: Mapping[str, str | None]
    has_torch: bool

    @property
    def torch_spoiled(self) -> str | None:
        """Why torch itself cannot be preloaded, so that ranks must be exec'd; None if it can."""
        return next((reason for entry, reason in self.spoiled if entry in TORCH), None)

    def left(self, entries: Sequence[str]) -> list[str]:
        """Return what a fresh zygote should preload of `entries`: what spoiled is gone, torch stays."""
        kept = without(entries, [entry for entry, _ in self.spoiled])
        if not self.has_torch or self.torch_spoiled is not None:
            return kept
        return [*TORCH, *(entry for entry in kept if entry not in TORCH)]


def without(entries: Sequence[str], leave_out: Collection[str]) -> list[str]:
    """Return `entries` without those left out, their submodules and their names."""
    gone = tuple(f"{entry}{mark}" for entry in leave_out for mark in (".", ":"))
    return [entry for entry in entries if entry not in leave_out and not entry.startswith(gone)]


def lacking(entries: Sequence[str]) -> list[str]:
    """Return the entries that this process has not loaded: a rank forked from it imports them itself."""

    def is_loaded(entry: str) -> bool:
        module, _, name = entry.partition(":")
        return module in sys.modules and (not name or name in vars(sys.modules[module]))

    return [entry for entry in entries if not is_loaded(entry)]


def preload(entries: Sequence[str], report: Callable[[str], None]) -> Preloaded:
    """Import `entries` in order; `report` hears each before it is begun, so that a crash has a name.

    Goes on after an entry that spoils the process, to find all such entries in one pass.
    """
    loaded: list[str] = []
    failed: dict[str, str] = {}
    spoiled: dict[str, str] = {}
    seconds: dict[str, float] = {}
    environ: dict[str, str | None] = {}
    todo = list(entries)
    before = _look()
    if len(before.threads) != 1:
        raise RuntimeError(f"preload needs a process with one thread, this one has {len(before.threads)}")
    for entry in todo:
        report(entry)
        began = time.perf_counter()
        with _recording() as reasons:
            error = _import(entry)
        seconds[entry] = time.perf_counter() - began
        after = _look(threads_before=before.threads)
        reasons += _compare(before, after)
        if reasons:
            spoiled[entry] = "; ".join(dict.fromkeys(reasons))
        if error is not None:
            failed[entry] = error
        elif not reasons:
            loaded.append(entry)
        if entry not in TORCH:  # What torch sets, it derives again where it is missing.
            environ |= _changes(before.environ, after.environ)
        if "torch" in sys.modules:
            # A package brought torch in: every rank would import the companions for itself.
            todo += [companion for companion in TORCH if companion not in todo]
        before = after
    return Preloaded(tuple(loaded), failed, tuple(spoiled.items()), seconds, environ, "torch" in sys.modules)


def restore_env(original: Mapping[str, str]) -> None:
    """Undo `PRELOAD_ENV`: give its variables the values they have in the run's environment, or none."""
    for name in PRELOAD_ENV:
        if name in original:
            os.environ[name] = original[name]
        else:
            os.environ.pop(name, None)


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
def _recording() -> Iterator[list[str]]:
    """Note what an import reads of the rank's identity and what it writes, as reasons against it."""
    reasons: list[str] = []

    class Environ(type(os.environ)):
        def __getitem__(self, key: str) -> str:
            if key in RANK_VARIABLES:
                reasons.append(f"{_caller()} reads {key}")
            return super().__getitem__(key)

        def copy(self) -> dict[str, str]:
            # Copying the whole is no interest in the rank: children inherit it so.
            return _values(self)

    class Argv(list[str]):
        def __getitem__(self, index: Any) -> Any:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__getitem__(index)

        def __iter__(self) -> Iterator[str]:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__iter__()

        def __len__(self) -> int:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__len__()

        def __contains__(self, item: object) -> bool:
            reasons.append(f"{_caller()} reads sys.argv")
            return super().__contains__(item)

    plain, argv = type(os.environ), sys.argv
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
def _captured() -> Iterator[list[str]]:
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
    while frame.f_back is not None and frame.f_globals.get("__name__") in {"os", "_collections_abc"}:
        frame = frame.f_back
    return str(frame.f_globals.get("__name__"))


def _values(environ: "os._Environ[str]") -> dict[str, str]:  # pyright: ignore[reportPrivateUsage]
    return {os.fsdecode(name): os.fsdecode(value) for name, value in environ._data.items()}  # pyright: ignore


@dataclass(frozen=True)
class _Look:
    """What a fork passes on, or loses, of a process."""

    threads: Mapping[int, str]
    descriptors: Mapping[int, str]
    signals: Mapping[str, object]
    has_child: bool
    has_cuda: bool
    cwd: str
    streams: tuple[object, ...]
    random: Mapping[str, object]
    environ: Mapping[str, str]


def _look(threads_before: Collection[int] | None = None) -> _Look:
    threads = _threads()
    give_up_at = time.monotonic() + _THREAD_END_S
    while threads_before is not None and len(threads) > len(threads_before) and time.monotonic() < give_up_at:
        time.sleep(0.005)  # A thread that was joined is gone from /proc a little later.
        threads = _threads()
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return _Look(
        threads=threads,
        descriptors=_descriptors(),
        signals=_signals(),
        has_child=_has_child(),
        has_cuda=cuda is not None and bool(cuda.is_initialized()),
        cwd=os.getcwd(),
        streams=(sys.stdin, sys.stdout, sys.stderr),
        random=_random(),
        environ=_values(os.environ),
    )


def _compare(before: _Look, after: _Look) -> list[str]:
    """Return the reasons why what happened between two looks forbids forking ranks."""
    reasons = [f"starts a thread ({name})" for tid, name in after.threads.items() if tid not in before.threads]
    for descriptor, target in after.descriptors.items():
        if before.descriptors.get(descriptor) != target:
            reasons.append(f"opens {'an accelerator' if target.startswith(_ACCELERATORS) else 'a descriptor'} ({target})")
    changed = [name for name, value in after.signals.items() if before.signals.get(name) != value]
    if changed:
        reasons.append(f"changes signals ({', '.join(changed)})")
    if after.has_child and not before.has_child:
        reasons.append("starts a process")
    if after.has_cuda and not before.has_cuda:
        reasons.append("initialises CUDA")
    if after.cwd != before.cwd:
        reasons.append(f"changes the working directory to {after.cwd}")
    if any(new is not old for new, old in zip(after.streams, before.streams, strict=True)):
        reasons.append("replaces sys.stdin, sys.stdout or sys.stderr")
    used = [name for name, state in before.random.items() if after.random.get(name) != state]
    return reasons + [f"uses the random numbers of {name}" for name in used]


def _changes(before: Mapping[str, str], after: Mapping[str, str]) -> dict[str, str | None]:
    names = sorted(before.keys() | after.keys())
    return {name: after.get(name) for name in names if before.get(name) != after.get(name)}


def _threads() -> dict[int, str]:
    threads: dict[int, str] = {}
    for tid in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{tid}/comm") as comm:
                threads[int(tid)] = comm.read().strip()
        except OSError:
            continue
    return threads


def _descriptors() -> dict[int, str]:
    targets: dict[int, str] = {}
    for descriptor in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")
        except OSError:
            continue  # The one that listed the directory.
        targets[int(descriptor)] = target
    return targets


def _signals() -> dict[str, object]:
    """Return Python's handlers and the kernel's masks, which also show handlers set by C code."""
    with open("/proc/self/status") as status:
        masks = dict(line.split(":", 1) for line in status if line.startswith(("SigBlk", "SigIgn", "SigCgt")))
    return {**masks, **{str(number): signal.getsignal(number) for number in signal.valid_signals()}}


def _has_child() -> bool:
    try:
        os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


def _random() -> dict[str, object]:
    """Return the states of the global generators that are loaded: ranks are reseeded, a seed would be lost."""
    states: dict[str, object] = {}
    if "random" in sys.modules:
        states["random"] = sys.modules["random"].getstate()
    numpy_random = getattr(sys.modules.get("numpy.random"), "mtrand", None)
    if numpy_random is not None:
        kind, keys, *rest = numpy_random.get_state()
        states["numpy"] = (kind, keys.tobytes(), *rest)
    seed = getattr(sys.modules.get("torch"), "initial_seed", None)
    if seed is not None:
        states["torch"] = seed()
    return states
