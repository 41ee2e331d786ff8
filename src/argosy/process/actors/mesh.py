"""Meshes: grids of ranks that serve calls, owned by the process that made them."""

import atexit
import contextlib
import itertools
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.core import ArgosyError, ConfigError
from argosy.fabric import dump, forget_peers, here, runtime_dir
from argosy.process.actors.events import Events
from argosy.process.actors.handles import Actor, Actors, Grid, Options, plain, slice_ranks
from argosy.process.actors.host import write_spec
from argosy.process.actors.launching import GRACE_S, Wanted, make_launch, submit
from argosy.process.actors.replies import Replies
from argosy.process.actors.watching import Watcher
from argosy.process.run.restart import Restart

_counter = itertools.count()
_living: "weakref.WeakSet[Watcher]" = weakref.WeakSet()


class Mesh:
    """A grid of ranks, or a part of one."""

    def __init__(
        self,
        grid: Grid,
        watcher: Watcher | None,
        ranks: Sequence[int] | None = None,
        dims: Mapping[str, int] | None = None,
    ) -> None:
        self._grid, self._watcher = grid, watcher
        self._ranks = tuple(range(grid.size) if ranks is None else ranks)
        self.dims = dict(grid.dims if dims is None else dims)

    @property
    def name(self) -> str:
        """The run's name: what `argosy ps`, `logs` and `why` know it by."""
        return self._grid.name

    @property
    def size(self) -> int:
        return len(self._ranks)

    @property
    def events(self) -> Events:
        """What happens to the mesh, for its owner."""
        if self._watcher is None:
            raise ConfigError(f"only the owner of a mesh hears its events: {self.name}")
        return self._watcher.events

    def slice(self, **chosen: "int | slice") -> "Mesh":
        """The part at these coordinates: `mesh.slice(dp=0)`."""
        places, left = slice_ranks(self.dims, chosen)
        return Mesh(self._grid, self._watcher, [self._ranks[place] for place in places], left or {"rank": 1})

    def spawn(self, kind: type, *args: Any, **kwargs: Any) -> Actors:
        """Build an actor on every rank; returns when all constructors have.

        A rank that is replaced builds it again from the same arguments, by `kind.restore(...)` if it has one.
        """
        name = f"{kind.__name__}-{os.getpid():x}-{next(_counter)}"
        pickled, buffers = dump((kind, args, kwargs))
        if buffers:  # A spec is read by generations to come: all of it is in one file.
            pickled = _in_band((kind, args, kwargs))
        write_spec(Path(self._grid.folder), name, pickled)
        handle = Actors(self._grid, name, kind, self._ranks, self.dims, Options())
        self._plain().build(name).gather()
        return handle

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Replies[Any]:
        """Call a plain function on every rank."""
        return self._plain().run(function, args, kwargs)

    def actors(self, name: str) -> Actors:
        """The actors that were served or spawned under a name."""
        return Actors(self._grid, name, None, self._ranks, self.dims, Options())

    def stop(self) -> None:
        """End all ranks and wait until they are gone."""
        if self._watcher is None:
            raise ConfigError(f"only the owner of a mesh can stop it so: {self.name}", hint="use `argosy stop`")
        self._watcher.stop("its owner", GRACE_S)
        forget_peers(Path(self._grid.folder))

    def _plain(self) -> Actors:
        every = plain(self._grid)
        return Actors(self._grid, "", None, self._ranks, self.dims, Options()) if self._ranks != every else every

    def __reduce__(self) -> Any:
        return Mesh, (self._grid, None, self._ranks, self.dims)

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={extent}" for name, extent in self.dims.items())
        return f"<mesh {self.name}: {dims}>"


class Cluster:
    """This host, as a place for meshes. Leaving the block, or the end of this process, ends all of them."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._meshes: list[Mesh] = []

    def mesh(
        self,
        ranks: int | None = None,
        *,
        name: str | None = None,
        preload: Sequence[str] | None = None,
        restart: Restart | None = None,
        **dims: int,
    ) -> Mesh:
        """Start a grid of ranks: `mesh(ranks=4)` or `mesh(dp=2, tp=2)`.

        `preload`: what the ranks import before they are forked; without it what the calling script imports.
        """
        if (ranks is None) == (not dims):
            raise ConfigError("a mesh needs either ranks=N or named dimensions such as dp=2, tp=2")
        shape = dims if ranks is None else {"rank": ranks}
        return self._start(Wanted(name=name, dims=shape, restart=restart or Restart.never(), preload=preload))

    def _start(self, wanted: Wanted) -> Mesh:
        link, welcome = submit(*make_launch(wanted))
        watcher = Watcher(link, welcome, self._show)
        _living.add(watcher)
        folder = str(runtime_dir() / "runs" / welcome.run)
        grid = Grid(Path(welcome.directory).name, folder, welcome.directory, tuple(wanted.dims.items()))
        mesh = Mesh(grid, watcher)
        self._meshes.append(mesh)
        return mesh

    def close(self) -> None:
        """End all meshes and wait until they are gone."""
        meshes, self._meshes = self._meshes, []
        for mesh in reversed(meshes):
            mesh.stop()

    def __enter__(self) -> "Cluster":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def local(*, show: bool = True) -> Cluster:
    """This host as a place for meshes; `show` prints what their ranks print."""
    return Cluster(show)


def connect(run: str = "") -> Mesh:
    """The mesh of a living run, by its name; without one, of the run that this rank belongs to.

    Raises:
        ConfigError: there is no such run, or it is not alive.
    """
    from argosy.process.terminal.client import list_runs

    place = here()
    if not run and place.launcher != "argosy":
        raise ConfigError("this process is no rank of a run", hint="name one: argosy.connect('run')")
    found = [r for r in list_runs().runs if (r.name == run if run else r.run == place.run)]
    if not found:
        raise ConfigError(f"no such living run: {run or place.run}", hint="`argosy ps` lists them")
    info = found[-1]
    folder = str(runtime_dir() / "runs" / info.run)
    return Mesh(Grid(info.name, folder, info.directory, (("rank", info.size),)), None)


def _in_band(value: object) -> bytes:
    import cloudpickle

    return cloudpickle.dumps(value)


@atexit.register
def _stop_all() -> None:
    for watcher in list(_living):
        with contextlib.suppress(ArgosyError, OSError):
            watcher.stop("the end of its owner", GRACE_S, timeout_s=10.0)


def _forget_in_child() -> None:
    for watcher in list(_living):
        watcher.forget()
    _living.clear()


os.register_at_fork(after_in_child=_forget_in_child)
__all__ = ["Actor", "Actors", "Cluster", "Mesh", "connect", "local"]
