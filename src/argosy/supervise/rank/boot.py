"""A forked rank's life: from the fork to user code as `__main__`, and to an end like the interpreter's own.

B1  What the user's code can see (stdio, argv, path, environment, signals, seeds) is as `python -u script` shows it.
B2  No frame of Argosy's stands in a traceback, except at its end where Argosy itself broke.
B3  Never Py_Finalize: it would touch every page that is shared with the zygote.
B4  A rank whose zygote died before it could be found by its cgroup or page ends: another may have its place.
"""

import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib.machinery import SourceFileLoader
from itertools import takewhile
from pathlib import Path
from typing import Any, NamedTuple, cast

import setproctitle

from argosy.control import Launch, arguments
from argosy.core import ArgosyError
from argosy.observe import Flag, Page, Phase, Ring, install_when_imported, record_spans
from argosy.supervise.cgroup import TITLE
from argosy.supervise.evidence.stacks import arm
from argosy.supervise.messages import RankSpec
from argosy.supervise.rank.breakpoints import take_breakpoints
from argosy.supervise.rank.hard_exit import exit_after
from argosy.supervise.rank.prepare_child import settle
from argosy.supervise.rank.reset_process import become_fresh, shadow, take_environment
from argosy.transfer import is_device_error

END_S = 10.0
"""How long destructors may take after the last line of the script, its threads and its atexit functions."""
_kept: list[object] = []
_PACKAGE = str(Path(__file__).parents[2]) + os.sep
_HOOKS = f"{_PACKAGE}observe{os.sep}"


class Inherited(NamedTuple):
    """What a rank has from its zygote besides memory."""

    runtime: Path
    changed: Mapping[str, str]
    """Variables that packages set while they were imported."""
    blas: Sequence[Callable[[int], object]]
    fresh: Collection[str]
    """Modules that every interpreter has loaded when it starts."""
    zygote: int
    """Its pid."""
    born: int = -1
    """A descriptor to close when this rank can be found by its cgroup or page: then the agent is told of it."""


def run_rank(inherited: Inherited, run: str, launch: Launch, spec: RankSpec, fds: Sequence[int]) -> int:
    """Be the rank until it ends; returns the exit code, or dies by the signal that ended the script."""
    variables = {**settle(inherited.runtime, run, spec, fds, keep=max(2, inherited.born)), **inherited.changed}
    take_environment(variables)
    os.umask(launch.umask)
    page = _open_page(spec.page)
    setproctitle.setproctitle(f"{TITLE}{spec.rank.index} of {launch.name}: {' '.join([launch.target, *launch.args])}")
    if os.getppid() != inherited.zygote:  # B4
        os.kill(os.getpid(), signal.SIGKILL)
    if inherited.born >= 0:
        os.close(inherited.born)
    with contextlib.suppress(OSError):
        arm(spec.stacks)
        if page is not None:
            page.set_flag(Flag.STACKS)
    become_fresh(launch.cwd, variables, inherited.blas)
    try:
        os.chdir(launch.cwd)
    except OSError as error:
        print(f"argosy: cannot enter the working directory: {error.strerror}: {launch.cwd}", file=sys.stderr)
        return 1
    if page is not None:
        install_when_imported(page)
        take_breakpoints(f"{spec.stacks.removesuffix('.stacks')}.debug", f"rank {spec.rank.index}", page)
        page.set_phase(Phase.USER)
    body = _prepare(launch, spec.rank.index % launch.ranks_per_host, inherited.fresh)
    newest = next(reversed(sys.modules))
    code = _guarded(body, page)
    if page is not None:
        page.set_phase(Phase.END)
    return _end(code, newest)


def _prepare(launch: Launch, local_rank: int, fresh: Collection[str]) -> Callable[[], None]:
    """Set what the script sees of its command line and path; returns what runs it as `__main__`."""
    path = prepare_path(launch, fresh)
    args = arguments(launch, local_rank)
    sys.argv[:] = ["-m" if launch.kind == "module" else launch.target, *args]
    sys.orig_argv = [*launch.python, *(["-m"] if launch.kind == "module" else []), launch.target, *args]
    if launch.kind == "module":
        return lambda: _run_module(launch.target)
    return lambda: _run_script(path)


def prepare_path(launch: Launch, fresh: Collection[str]) -> str:
    """Let the script's directory come first, as an interpreter that runs it does; returns the script's path."""
    path = os.path.join(launch.cwd, launch.target)
    sys.path[0] = launch.cwd if launch.kind == "module" else os.path.dirname(os.path.realpath(path))
    shadow(sys.path[0], fresh)
    return path


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
    _install_main(main)
    source = Path(path).read_bytes()
    exec(compile(source, path, "exec", dont_inherit=True), vars(main))


def _install_main(main: types.ModuleType) -> None:
    sys.modules["__main__"] = main
    if "__mp_main__" in sys.modules:  # multiprocessing was imported in the zygote, and took its main for ours.
        sys.modules["__mp_main__"] = main


def _run_module(name: str) -> None:
    import runpy

    main = types.ModuleType("__main__")
    vars(main).update(__builtins__=sys.modules["builtins"], __annotations__={})
    _install_main(main)
    cast(Any, runpy)._run_module_as_main(name)


def _guarded(body: Callable[[], None], page: Page | None = None) -> int:
    """Run user code and turn however it ends into an exit code, as the interpreter does."""
    try:
        body()
    except SystemExit as error:
        return _exit_code(error.code)
    except BaseException as error:
        if page is not None and is_device_error(error):
            page.set_flag(Flag.DEVICE_FAILED)
        _hide_frames(error)
        _show(error)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0


def _hide_frames(error: BaseException) -> None:
    """Take Argosy's frames (boot, hooks) out of the traceback and of those that it is chained to (B2)."""
    seen: set[int] = set()
    chain: list[BaseException | None] = [error]
    while chain:
        each = chain.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        frames, tail = list[types.TracebackType](), list[types.TracebackType]()
        trace = each.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename.startswith(_PACKAGE):
                tail.append(trace)
            else:
                frames, tail = [*frames, trace], []
            trace = trace.tb_next
        if frames and not isinstance(each, ArgosyError) and isinstance(each, Exception):
            frames += [trace for trace in tail if not trace.tb_frame.f_code.co_filename.startswith(_HOOKS)]
        kept: types.TracebackType | None = None
        for frame in reversed(frames):
            kept = types.TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
        each.__traceback__ = kept
        chain += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            chain += cast("BaseExceptionGroup[BaseException]", each).exceptions


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
        return code & 0xFF if -(1 << 63) <= code < 1 << 63 else 0xFF
    print(code, file=sys.stderr)
    return 1


def _end(code: int, newest: str) -> int:
    """Do what the interpreter does at its end, without touching what is shared (B3).

    `newest` is the module that was imported last before the user's code ran.
    """
    with contextlib.suppress(BaseException):
        cast(Any, threading)._shutdown()
    cast(Any, atexit)._run_exitfuncs()
    _flush()
    exit_after(END_S, code & 0xFF)
    _keep_groups()
    _forget_modules(newest)
    flushed = _flush()
    if code < 0:
        signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    return code if flushed or code else 120


def _keep_groups() -> None:
    """Never destroy what may hold a process group of torch's.

    Its destructor joins threads that may want the GIL, which we hold: only an interpreter that is being finalised
    lets such threads go. Nothing that a user could see is lost.
    """
    module = getattr(getattr(sys.modules.get("torch"), "nn", None), "Module", None)
    if not isinstance(module, type):  # No torch, or something else of that name.
        return
    values = cast("list[object]", [*gc.get_objects(), *vars(sys.modules["__main__"]).values()])
    for value in values:
        kind = type(value)
        if issubclass(kind, module) or str(kind.__module__).startswith("torch."):
            _kept.append(value)


def _forget_modules(newest: str) -> None:
    """Let go of what was imported since the fork, in the interpreter's order: destructors first see globals.

    Only the newest entries of sys.modules are looked at: a reference counted is a shared page copied (B3).
    """
    sys.last_type = sys.last_value = sys.last_traceback = None
    names = list(takewhile(lambda name: name != newest, reversed(sys.modules)))
    modules = [sys.modules.pop(name, None) for name in [*reversed(names), "__main__", "__mp_main__"]]
    remaining = [weakref.ref(module) for module in modules if type(module) is types.ModuleType]
    del modules
    files = _open_files()
    gc.collect()
    for module in [ref() for ref in remaining]:
        if module is not None:
            _clear(module)
    gc.collect()
    for file in files:
        with contextlib.suppress(OSError, ValueError):
            file.flush()


def _open_files() -> list[Any]:
    """Files that nobody closed, text before buffers: collected together, a buffer may go before its text is in it."""
    objects = cast("list[object]", gc.get_objects())
    texts: list[Any] = [each for each in objects if issubclass(type(each), io.TextIOWrapper)]
    return texts + [each for each in objects if issubclass(type(each), (io.BufferedWriter, io.BufferedRandom))]


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
            if not stream.closed:
                stream.flush()
        except (OSError, ValueError, AttributeError):
            good = False
    return good


def _open_page(path: str) -> Page | None:
    try:
        page = Page.create(path)
    except OSError as error:
        print(f"argosy: no progress page, so no hang detection for this rank: {error}", file=sys.stderr)
        return None
    page.claim()
    with contextlib.suppress(OSError):  # No room: no spans.
        record_spans(Ring.create(f"{path}.spans"))
    return page
