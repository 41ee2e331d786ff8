"""A rank of a mesh: builds actors from what was asked for, and serves calls until it is told to end."""

import inspect
import os
import pickle
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import AsyncGeneratorType, CoroutineType, GeneratorType
from typing import Any, cast

import msgspec

from argosy.core import ConfigError
from argosy.fabric import Call, CallFrame, Server, here, load
from argosy.observe import Flag, attached

SPECS = "actors"
"""The folder with what each actor is built from: written before it is built, read again by later generations."""
PATH = "ARGOSY_ACTORS_PATH"
"""The variable with the import path of the mesh's owner."""
PLAIN = ""
"""The actor that every rank has: it builds others and runs plain functions."""


_GENERATORS = frozenset({GeneratorType, AsyncGeneratorType})


class Endpoint(msgspec.Struct, frozen=True):
    """How an endpoint wants to be run."""

    concurrent: bool = False
    idempotent: bool = False


def endpoint(*, concurrent: bool = False, idempotent: bool = False) -> Callable[[Any], Any]:
    """Mark a method of an actor.

    `concurrent`: it may run beside other endpoints of its actor, on a thread of its own; `async def` methods do
    anyway. `idempotent`: running it twice does no harm, so a call with `retry` is made again when a rank is lost.
    """

    def mark(function: Any) -> Any:
        function.__argosy__ = Endpoint(concurrent, idempotent)
        return function

    return mark


def marks(kind: type, name: str) -> Endpoint:
    """What a method of a class was marked with."""
    function = getattr(kind, name, None)
    found = cast(Any, function).__argosy__ if hasattr(function, "__argosy__") else Endpoint()
    if inspect.iscoroutinefunction(function):
        return Endpoint(concurrent=True, idempotent=found.idempotent)
    return found


class Housed:
    """The actors of this rank."""

    def __init__(self, folder: Path, generation: int) -> None:
        self.folder, self.generation = folder / SPECS, generation
        self.actors: dict[str, Any] = {PLAIN: self}
        self.server: Server | None = None
        self._beside: set[tuple[str, str]] = set()
        self._coroutines: Any = None
        self._served = False

    # --- what every rank can be asked for

    def build(self, name: str) -> None:
        """Build an actor from its spec: by its constructor, or in a replaced rank by `restore` if it has one."""
        spec = pickle.loads((self.folder / name).read_bytes())
        if here().rank.index not in spec["ranks"]:
            return
        kind, args, kwargs = load(spec["pickled"])
        make = getattr(kind, "restore", kind) if self.generation else kind
        self.adopt(name, make(*args, **kwargs))

    def run(self, function: Callable[..., object], args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        """Call a plain function."""
        return function(*args, **kwargs)

    def drop(self, name: str) -> None:
        """Let an actor go."""
        self.actors.pop(name, None)

    # --- for the server

    def adopt(self, name: str, actor: object) -> None:
        """Serve an object under a name."""
        self.actors[name] = actor
        for method in dir(type(actor)):
            if not method.startswith("_") and marks(type(actor), method).concurrent:
                self._beside.add((name, method))
        if self._beside and self.server is not None:
            self.server.want_threads()

    def is_concurrent(self, call: Call) -> bool:
        return (call.actor, call.method) in self._beside

    def perform(self, call: Call, frame: CallFrame) -> object:
        """Run an endpoint; what it raises goes to the caller."""
        args, kwargs = frame.take()
        actor = self.actors.get(call.actor)
        if actor is None:
            raise ConfigError(f"no such actor in rank {here().rank.index}: {call.actor!r}")
        method = None if call.method.startswith("_") else getattr(actor, call.method, None)
        if method is None:
            raise ConfigError(f"no such endpoint of {type(actor).__name__}: {call.method!r}")
        result = method(*args, **kwargs)
        if type(result) is CoroutineType:
            result = self._await(result)
        if type(result) in _GENERATORS:
            raise ConfigError(
                f"{type(actor).__name__}.{call.method} returns a generator, which cannot be sent",
                hint="return a list, or one item per call",
            )
        if not self._served:
            self._served = True
            attached().set_flag(Flag.SERVED)
        return result

    def _await(self, coroutine: Any) -> object:
        """Run a coroutine on the rank's event loop, which all of them share."""
        import asyncio

        if self._coroutines is None:
            self._coroutines = asyncio.new_event_loop()
            threading.Thread(target=self._coroutines.run_forever, name="argosy coroutines", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(coroutine, self._coroutines)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise


def socket_path(folder: Path, index: int) -> Path:
    """Where a rank of a run listens, through all of its generations."""
    return folder / f"{index}.calls"


def write_spec(folder: Path, name: str, pickled: bytes, ranks: Sequence[int]) -> None:
    """Keep what an actor is built from, for this generation of the ranks and those to come."""
    spec = pickle.dumps({"ranks": list(ranks), "pickled": pickled})
    (folder / SPECS).mkdir(exist_ok=True)
    temporary = folder / SPECS / f".{name}.{os.getpid()}"
    temporary.write_bytes(spec)
    temporary.replace(folder / SPECS / name)


def run_folder(agent: Path, run: str) -> Path:
    """The private folder of a run: sockets and specs."""
    return agent.parent / "runs" / run


_housed: list[Housed] = []


def housed_here(new: Housed | None = None) -> Housed | None:
    """The actors of this process, if it has any; `new` become them."""
    if new is not None:
        _housed[:] = [new]
    return _housed[0] if _housed else None


def main() -> None:
    """Be a rank of a mesh."""
    place = here()
    assert place.socket is not None, "ranks of a mesh are started by Argosy"
    sys.path[:] = os.environ.pop(PATH).split(os.pathsep)
    folder = run_folder(place.socket, place.run)
    housed = Housed(folder, place.rank.generation)
    housed_here(housed)
    # What is there belongs to generations before this one; it is rebuilt before anybody can call.
    specs = sorted(housed.folder.glob("[!.]*"), key=lambda path: path.stat().st_mtime_ns)
    for spec in specs if place.rank.generation else []:
        housed.build(spec.name)
    server = housed.server = Server(socket_path(folder, place.rank.index), place.rank.generation, housed)
    for name, actor in list(housed.actors.items()):
        if actor is not housed:
            housed.adopt(name, actor)
    server.loop()
