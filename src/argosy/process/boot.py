"""A forked rank's life: from the fork to user code as `__main__`, and to an end like the interpreter's own.

B1  What the user's code can see (stdio, argv, path, environment, signals, seeds) is as `python -u script` shows it.
B2  No frame of Argosy's stands in a traceback.
B3  Never Py_Finalize: it would touch every page that is shared with the zygote.
"""

import atexit
import contextlib
import gc
import importlib
import os
import random
import signal
import sys
import threading
import types
from collections.abc import Callable, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any, cast

import setproctitle

from argosy.observe import Flag, Page, Phase, install_when_imported
from argosy.process.child import settle
from argosy.process.launch import Launch
from argosy.process.messages import RankSpec
from argosy.process.stacks import arm


def run_rank(runtime: Path, run: str, launch: Launch, spec: RankSpec, fds: Sequence[int]) -> int:
    """Be the rank until it ends; returns the exit code, or dies by the signal that ended the script."""
    known = set(sys.modules)
    variables = settle(runtime, run, spec, fds)
    _take_environment(variables)
    os.umask(launch.umask)
    page = _open_page(spec.page)
    with contextlib.suppress(OSError):
        arm(spec.stacks)
        if page is not None:
            page.set_flag(Flag.STACKS)
    _reseed()
    _set_threads(variables)
    setproctitle.setproctitle(
        f"argosy: rank {spec.rank.index} of {launch.name}: {' '.join([launch.target, *launch.args])}"
    )
    try:
        os.chdir(launch.cwd)
    except OSError as error:
        print(f"argosy: cannot enter the working directory: {error.strerror}: {launch.cwd}", file=sys.stderr)
        return 1
    if page is not None:
        install_when_imported(page)
        page.set_phase(Phase.USER)
    code = _run_user_code(launch)
    if page is not None:
        page.set_phase(Phase.END)
    return _end(code, known)


def _run_user_code(launch: Launch) -> int:
    """Run the script or module as `__main__`; negative is the signal that the interpreter would die of."""
    importlib.invalidate_caches()  # Files may have come since the zygote looked.
    sys.argv = [launch.target, *launch.args]
    sys.orig_argv = [
        *launch.python,
        *(["-m"] if launch.kind == "module" else []),
        launch.target,
        *launch.args,
    ]
    if launch.kind == "module":
        sys.path[0] = launch.cwd
        sys.argv[0] = "-m"
        return _guarded(lambda: _run_module(launch.target))
    path = os.path.join(launch.cwd, launch.target)
    sys.path[0] = os.path.dirname(os.path.realpath(path))
    return _guarded(lambda: _run_script(path))


def _run_script(path: str) -> None:
    loader = SourceFileLoader("__main__", path)
    main = types.ModuleType("__main__")
    vars(main).update(
        __file__=path,
        __loader__=loader,
        __spec__=None,
        __package__=None,
        __cached__=None,
        __builtins__=sys.modules["builtins"],
        __annotations__={},
    )
    sys.modules["__main__"] = main
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _run_module(name: str) -> None:
    import runpy

    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    sys.modules["__main__"] = main
    cast(Any, runpy)._run_module_as_main(name)


def _guarded(body: Callable[[], None]) -> int:
    """Run user code and turn however it ends into an exit code, as the interpreter does."""
    try:
        body()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:
        # B2: our own frames are the outermost ones.
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        _show(error.with_traceback(trace))
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _show(error: BaseException) -> None:
    sys.stdout.flush()
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    try:
        sys.excepthook(type(error), error, error.__traceback__)
    except SystemExit:
        raise
    except BaseException as broken:
        print("Error in sys.excepthook:", file=sys.stderr)
        sys.__excepthook__(type(broken), broken, broken.__traceback__)
        print("\nOriginal exception was:", file=sys.stderr)
        sys.__excepthook__(type(error), error, error.__traceback__)


def _exit_code(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(code: int, known: set[str]) -> int:
    """Do what the interpreter does at its end, without touching what is shared (B3)."""
    with contextlib.suppress(BaseException):
        cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    _flush()
    for name in [name for name in sys.modules if name not in known]:
        module: object = sys.modules.pop(name)
        if isinstance(module, types.ModuleType):  # Anything may stand in sys.modules.
            _clear(module)
    main = sys.modules.get("__main__")
    if main is not None:
        _clear(main)
    gc.collect()
    flushed = _flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if flushed or code else 120


def _clear(module: types.ModuleType) -> None:
    """Drop a module's globals, private names first, as the interpreter does."""
    names = vars(module)
    for private in (True, False):
        for name in list(names):
            if name != "__builtins__" and (name.startswith("_") and not name.startswith("__")) == private:
                names[name] = None


def _flush() -> bool:
    good = True
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            good = False
    return good


def _take_environment(variables: Mapping[str, str]) -> None:
    """Make `variables` the environment, for Python and for C."""
    for name in list(os.environ):
        if name not in variables:
            del os.environ[name]
    os.environ.update(variables)


def _open_page(path: str) -> Page | None:
    try:
        page = Page.create(path)
    except OSError as error:
        print(f"argosy: no progress page, so no hang detection for this rank: {error}", file=sys.stderr)
        return None
    page.claim()
    return page


def _reseed() -> None:
    """Give each rank its own random numbers where nobody seeds; forked generators are all alike."""
    random.seed()
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def _set_threads(variables: Mapping[str, str]) -> None:
    """Let torch use as many threads as if it had been imported under this environment."""
    count = variables.get("OMP_NUM_THREADS", "")
    if "torch" in sys.modules and count.isdecimal() and int(count) > 0:
        sys.modules["torch"].set_num_threads(int(count))
