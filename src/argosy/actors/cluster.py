"""Where meshes come from: this host, a living run by its name, and the ranks of a script that serve each other."""

import threading
from collections.abc import Sequence
from pathlib import Path

from argosy.actors.handles import Grid, check_endpoints
from argosy.actors.launching import Wanted, start
from argosy.actors.lease import Watcher
from argosy.actors.mesh import Mesh
from argosy.actors.server import Housed, housed_here, run_folder, socket_path
from argosy.control import Restart
from argosy.core import ConfigError, DeadlinePassed
from argosy.fabric import Server, here, runtime_dir
from argosy.supervise import list_runs


class Cluster:
    """This host, as a place for meshes. Leaving the block, or the end of this process, ends all of them."""

    def __init__(self, show: bool) -> None:
        self._show = show
        self._meshes: list[Mesh] = []
        self._closed = False

    def mesh(
        self,
        ranks: int | None = None,
        *,
        name: str | None = None,
        preload: Sequence[str] | None = None,
        restart: Restart | None = None,
        spares: int = 0,
        hang_after_s: float = 30.0,
        **dims: int,
    ) -> Mesh:
        """Start a grid of ranks: `mesh(ranks=4)` or `mesh(dp=2, tp=2)`.

        `preload`: what the ranks import before they are forked; without it, what the calling script imports.
        Without `restart`, the first rank that fails ends the mesh. `spares`: so many processes are kept forked, to
        become the ranks that are replaced next. `hang_after_s`: after so long without progress a rank that had made
        steps or collectives is reported as hung.
        """
        if self._closed:
            raise ConfigError("the cluster's block has ended", hint="make meshes inside of it, or open argosy.local()")
        if (ranks is None) == (not dims):
            raise ConfigError("a mesh needs either ranks=N or named dimensions such as dp=2, tp=2")
        shape = dims if ranks is None else {"rank": ranks}
        wanted = Wanted(
            name=name,
            dims=shape,
            restart=restart or Restart.never(),
            preload=preload,
            spares=spares,
            hang_after_s=hang_after_s,
        )
        link, welcome = start(wanted)
        folder = str(runtime_dir() / "runs" / welcome.run)
        grid = Grid(Path(welcome.directory).name, folder, welcome.directory, tuple(shape.items()))
        mesh = Mesh(grid, Watcher(link, welcome, self._show), range(grid.size), shape)
        self._meshes.append(mesh)
        return mesh

    def close(self) -> None:
        """End all meshes and wait until they are gone."""
        meshes, self._meshes, self._closed = self._meshes, [], True
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
    """The ranks of a living run, by its name; without one, of the run that this rank belongs to.

    Raises:
        ConfigError: there is no such run, or it is not alive.
    """
    place = here()
    if not run and place.launcher != "argosy":
        raise ConfigError("this process is no rank of a run", hint="name one: argosy.connect('run')")
    found = [info for info in list_runs().runs if (info.name == run if run else info.run == place.run)]
    if not found:
        raise ConfigError(f"no such living run: {run or place.run}", hint="`argosy ps` lists them")
    info = found[-1]
    dims = info.dims or {"rank": info.size}
    grid = Grid(info.name, str(runtime_dir() / "runs" / info.run), info.directory, tuple(dims.items()))
    return Mesh(grid, None, range(grid.size), dims)


def serve(name: str, actor: object) -> None:
    """Let the other ranks of this run call `actor`: `argosy.connect().actors(name)`.

    In a rank of `argosy run` its endpoints run one after another on a thread of their own.

    Raises:
        ConfigError: this process is no rank of a run.
    """
    place = here()
    if place.socket is None:
        raise ConfigError("only ranks of a run can serve", hint="start this script with `argosy run`")
    check_endpoints(type(actor))
    with _serving:
        housed = housed_here()
        if housed is None:
            folder = run_folder(place.socket, place.run)
            housed = housed_here(Housed(folder, place.rank.generation))
            assert housed is not None
            _serve_beside(housed, socket_path(folder, place.rank.index), place.rank.generation)
        housed.adopt(name, actor)


def _serve_beside(housed: Housed, path: Path, generation: int) -> None:
    ready = threading.Event()

    def loop() -> None:
        housed.server = Server(path, generation, housed)
        ready.set()
        housed.server.loop()

    threading.Thread(target=loop, name="argosy calls", daemon=True).start()
    if not ready.wait(30.0):
        raise DeadlinePassed(f"a socket for calls at {path}", 30.0)


_serving = threading.Lock()
