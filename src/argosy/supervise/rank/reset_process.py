"""Make a forked process look freshly started: what an interpreter and its packages decide when they start.

The zygote decided it for itself, in another directory, with another environment.
"""

import contextlib
import errno
import io
import logging
import os
import random
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, cast

import argosy.observe
from argosy.supervise.imports.finder import is_site
from argosy.supervise.rank.threads import blas_threads

_HOOKS = os.path.dirname(argosy.observe.__file__) + os.sep


def take_environment(variables: Mapping[str, str]) -> None:
    """Make `variables` the environment, for Python and for C."""
    for name in list(os.environ):
        if name not in variables:
            del os.environ[name]
    for name, value in variables.items():
        if os.environ.get(name) != value:
            os.environ[name] = value


def become_fresh(cwd: str, variables: Mapping[str, str], blas: Sequence[Callable[[int], object]]) -> None:
    """Decide again what depends on the rank's own environment, directory, identity and time."""
    _hide_hooks()
    _reseed()
    _set_threads(variables, blas)
    cast(Any, threading.main_thread())._set_native_id()
    cast(Any, logging)._startTime = time.time()
    if (processes := cast(Any, sys.modules.get("multiprocessing.process"))) is not None:
        processes.ORIGINAL_DIR = cwd  # What spawned children resolve a relative script against.
        processes.current_process().authkey = os.urandom(32)
    if (dynamo := cast(Any, sys.modules.get("torch._dynamo.config"))) is not None:
        dynamo.debug_dir_root = os.path.join(cwd, "torch_compile_debug")
    # Files of the user may have come since the zygote looked; site-packages are part of its key.
    for path in sys.path:
        if not _is_installed(path):
            sys.path_importer_cache.pop(path, None)


def leave_finalizers() -> None:
    """In the zygote: what packages want finalised at their exit is the zygote's, not each rank's.

    A rank that ran them would remove a temporary directory that all share, and take the dispatcher of torch apart
    on 8,000 shared pages, half of the CPU time of a short rank.
    """
    for finalizer in list(cast(Any, weakref.finalize)._registry):
        finalizer.atexit = False


def _hide_hooks() -> None:
    """Keep the frames of our hooks in torch out of every traceback that is formatted."""
    private = cast(Any, traceback)
    walk = getattr(private, "_walk_tb_with_full_positions", None)
    if walk is None:
        return

    def without_hooks(trace: TracebackType | None) -> Iterator[Any]:
        for frame, positions in walk(trace):
            if not frame.f_code.co_filename.startswith(_HOOKS):
                yield frame, positions

    private._walk_tb_with_full_positions = without_hooks


def shadow(directory: str, fresh: Collection[str]) -> None:
    """Forget loaded modules that a file of the script's directory would win over in a fresh interpreter."""
    with contextlib.suppress(OSError):
        for entry in os.scandir(directory):
            name = entry.name.removesuffix(".py")
            if name not in sys.modules or name in fresh or name == "argosy":
                continue
            if entry.name.endswith(".py") or entry.is_dir():
                for module in [each for each in sys.modules if each == name or each.startswith(f"{name}.")]:
                    del sys.modules[module]


def _is_installed(path: str) -> bool:
    return is_site(path) or path.startswith((sys.prefix + os.sep, sys.base_prefix + os.sep))


def _reseed() -> None:
    """Give each rank its own random numbers where nobody seeds; forked generators are all alike."""
    random.seed()
    if (numpy_random := cast(Any, sys.modules.get("numpy.random"))) is not None:
        numpy_random.seed()
    if (torch := cast(Any, sys.modules.get("torch"))) is not None:
        torch.default_generator.seed()


def _set_threads(variables: Mapping[str, str], blas: Sequence[Callable[[int], object]]) -> None:
    """Let torch and OpenBLAS use as many threads as if they had been imported under this environment."""
    cores = len(os.sched_getaffinity(0))
    for setter in blas:
        setter(blas_threads(variables, cores))
    asked = variables.get("OMP_NUM_THREADS", "").partition(",")[0]
    if (torch := cast(Any, sys.modules.get("torch"))) is not None:
        wanted = min(int(asked), cores) if asked.isdecimal() and int(asked) > 0 else torch.get_num_threads()
        # Always: torch replaces a forked thread pool at the next call, and aborts if two threads race for that.
        torch.set_num_threads(wanted)


class _Tolerant(io.FileIO):
    """A log file whose disk may be full: the training goes on, the output is lost, and the agent says so."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return len(memoryview(data).cast("B"))


def tolerate_full_disk() -> None:
    """Replace stdout and stderr by equals that survive a full disk. In the zygote, before any package keeps them."""
    for fd, name in ((1, "stdout"), (2, "stderr")):
        old = cast(io.TextIOWrapper, getattr(sys, name))
        raw = _Tolerant(fd, "wb", closefd=False)
        cast(Any, raw).name = f"<{name}>"
        buffer = cast(Any, raw)  # Without a buffer between, as `python -u` has it.
        new = io.TextIOWrapper(buffer, old.encoding, old.errors, newline="\n", write_through=True)
        cast(Any, new).mode = "w"
        setattr(sys, name, new)
        setattr(sys, f"__{name}__", new)
