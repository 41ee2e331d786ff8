"""Meshes: grids of ranks that serve calls, owned by the process that made them."""

import itertools
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from argosy.actors.events import Events, MeshEvent
from argosy.actors.handles import PLAINLY, Actors, Grid, check_endpoints, slice_ranks
from argosy.actors.launching import GRACE_S, Wanted
from argosy.actors.lease import Watcher
from argosy.actors.programs import Found, Program, Service, check_name, find, program_of, publish
from argosy.actors.readiness import Readiness
from argosy.actors.replies import Replies
from argosy.actors.server import PLAIN, write_spec
from argosy.control import Restart
from argosy.core import ConfigError, PeerLost
from argosy.fabric import dump, forget_peers

OWNER = "its owner, by `stop` or the end of its `with` block"
_counter = itertools.count()


class Mesh:
    """A grid of ranks, or a part of one. Handles of it may be sent to other processes; its owner alone stops it."""

    def __init__(self, grid: Grid, watcher: Watcher | None, ranks: Sequence[int], dims: Mapping[str, int]) -> None:
        self._grid, self._watcher = grid, watcher
        self._ranks, self.dims = tuple(ranks), dict(dims)
        self._programs: list[Program | Service] = []

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
        return self._owned("hears its events").events

    def slice(self, **chosen: "int | slice") -> "Mesh":
        """The part at these coordinates: `mesh.slice(dp=0)`."""
        places, left = slice_ranks(self.dims, chosen)
        part = Mesh(self._grid, self._watcher, [self._ranks[place] for place in places], left)
        part._programs = self._programs  # They belong to the whole.
        return part

    # --- actors and functions

    def spawn(self, kind: type, *args: Any, **kwargs: Any) -> Actors:
        """Build an actor on every rank; returns when all constructors have.

        A rank that is replaced builds it again from the same arguments, by `kind.restore(...)` if it has one.
        """
        check_endpoints(kind)
        name = f"{kind.__name__}-{os.getpid():x}-{next(_counter)}"
        pickled, _ = dump((kind, args, kwargs), in_band=True)
        try:
            write_spec(self._grid.living(), name, pickled, self._ranks)
        except FileNotFoundError:  # It ends just now.
            raise PeerLost(f"mesh {self.name}", "it has ended") from None
        self._plain().build(name).gather()
        return Actors(self._grid, name, kind, self._ranks, self.dims, PLAINLY)

    def run(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Replies[Any]:
        """Call a plain function on every rank."""
        return self._plain().run(function, args, kwargs)

    def actors(self, name: str) -> Actors:
        """What the ranks serve under a name (see `argosy.serve`)."""
        return Actors(self._grid, name, None, self._ranks, self.dims, PLAINLY)

    # --- programs and services

    def exec(self, argv: Sequence[str], *, name: str | None = None, restart: Restart | None = None) -> Program:
        """Execute a program once per rank, with the variables that torchrun would give it."""
        self._grid.living()
        name = f"{self.name}-{name or f'exec{next(_counter)}'}"
        wanted = Wanted(dims=self.dims or {"rank": 1}, restart=restart or Restart.never())
        program = program_of(name, argv, wanted, show=True)
        self._programs.append(program)
        return program

    def service(
        self,
        name: str,
        argv: Sequence[str],
        *,
        ready: Readiness,
        restart: Restart | None = None,
        health_s: float | None = None,
        timeout_s: float = 60.0,
    ) -> Service:
        """Start a program that others use, and wait until it is ready; they `find` it by its name.

        It is restarted when it fails, and with `health_s` also when its readiness is not met three times in a row.
        """
        self._grid.living()
        wanted = Wanted(dims={"rank": 1}, restart=restart or Restart.rank())
        program = program_of(f"{self.name}-{check_name(name)}", argv, wanted, show=False)
        service = Service(name, program, ready, health_s)
        self._programs.append(service)
        service.wait_ready(timeout_s)
        publish(Path(self._grid.folder), service.found())
        return service

    def find(self, name: str, timeout_s: float = 60.0) -> Found:
        """A service of this mesh by its name, from any process; waits until it is ready."""
        return find(self._grid.living(), name, timeout_s)

    # --- supervision

    def link(self, other: "Mesh") -> None:
        """Let two meshes end together: when one has, the other is stopped."""
        for first, second in ((self, other), (other, self)):

            def follow(event: MeshEvent, second: "Mesh" = second) -> None:
                if event.what == "ended":
                    threading.Thread(target=second.stop, name="argosy link", daemon=True).start()

            first.events.subscribe(follow)

    def stop(self) -> None:
        """End all ranks, programs and services, and wait until they are gone."""
        watcher = self._owned("can stop it so")
        while self._programs:
            self._programs.pop().stop()
        watcher.stop(OWNER, GRACE_S)
        forget_peers(Path(self._grid.folder), f"stopped by {OWNER}")

    def _owned(self, what: str) -> Watcher:
        if self._watcher is None:
            raise ConfigError(f"only the owner of a mesh {what}: {self.name}", hint="`argosy stop` and `logs` can")
        return self._watcher

    def _plain(self) -> Actors:
        return Actors(self._grid, PLAIN, None, self._ranks, self.dims, PLAINLY)

    def __len__(self) -> int:
        return len(self._ranks)

    def __reduce__(self) -> Any:
        return Mesh, (self._grid, None, self._ranks, self.dims)

    def __repr__(self) -> str:
        dims = ", ".join(f"{name}={extent}" for name, extent in self.dims.items())
        return f"<mesh {self.name}: {dims or 'one rank'}>"
