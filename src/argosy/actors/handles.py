"""Handles of actors: a name on some ranks of a mesh. They can be sent to other processes, which then call directly."""

import builtins
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, overload

import msgspec

from argosy.actors.rank_status import Chronicle, Gone
from argosy.actors.replies import Replies, Reply
from argosy.actors.server import marks, socket_path
from argosy.core import ConfigError, PeerLost
from argosy.fabric import PackedValue, Peer, PendingCall, context, find_peer


class Grid(msgspec.Struct, frozen=True):
    """Where the ranks of a run are, and how they are laid out (row-major, name to extent)."""

    name: str
    folder: str
    directory: str
    dims: tuple[tuple[str, int], ...]

    @property
    def size(self) -> int:
        return prod(extent for _, extent in self.dims)

    def peer(self, index: int) -> Peer:
        """The link of this process to one rank."""
        path = socket_path(Path(self.folder), index)
        chronicle = _chronicle(self.directory, self.folder)
        return find_peer(
            path,
            f"rank {index} of {self.name}",
            lambda: lambda generation: chronicle.fate(index, generation),
        )

    def living(self) -> Path:
        """The private folder of the run.

        Raises:
            PeerLost: the run has ended.
        """
        folder = Path(self.folder)
        if folder.is_dir():
            return folder
        fate = _chronicle(self.directory, self.folder).fate(0, -1)
        cause = fate.cause if isinstance(fate, Gone) else "it has ended"
        raise PeerLost(f"mesh {self.name}", cause, hint="make another one: cluster.mesh(...)")


@cache
def _chronicle(directory: str, folder: str) -> Chronicle:
    return Chronicle(Path(directory), Path(folder))


class Options(msgspec.Struct, frozen=True):
    """How calls through a handle are made."""

    deadline_s: float | None = None
    retry: int = 0
    reply: bool = True


PLAINLY = Options()


def slice_ranks(dims: Mapping[str, int], chosen: Mapping[str, int | slice]) -> tuple[list[int], dict[str, int]]:
    """The ranks at these coordinates, and the dimensions that remain.

    Raises:
        ConfigError: there is no such dimension or coordinate.
    """
    for name, at in chosen.items():
        if name not in dims:
            raise ConfigError(f"no such dimension: {name!r}", hint=f"this mesh has {', '.join(dims)}")
        if isinstance(at, int) and not -dims[name] <= at < dims[name]:
            raise ConfigError(f"{name}={at} is outside of a dimension of {dims[name]}")
    ranks, stride = [0], prod(dims.values())
    left: dict[str, int] = {}
    for name, extent in dims.items():
        stride //= extent
        at = chosen.get(name, slice(None))
        places = [range(extent)[at]] if isinstance(at, int) else list(range(extent)[at])
        if not isinstance(at, int):
            left[name] = len(places)
        ranks = [rank + place * stride for rank in ranks for place in places]
    return ranks, left


class Actors:
    """An actor on some ranks: calling an endpoint calls it on all of them."""

    def __init__(
        self, grid: Grid, name: str, kind: type | None, ranks: Sequence[int], dims: Mapping[str, int], options: Options
    ) -> None:
        self._grid, self._name, self._kind = grid, name, kind
        self._options = PLAINLY if options == PLAINLY else options
        self._ranks, self._dims = tuple(ranks), dict(dims)
        self._peers: list[Peer] | None = None

    def slice(self, **chosen: "int | slice") -> "Actors":
        """The actors at these coordinates: `workers.slice(dp=0)`."""
        places, left = slice_ranks(self._dims, chosen)
        return self._with(ranks=[self._ranks[place] for place in places], dims=left)

    def options(self, *, deadline_s: float | None = None, retry: int = 0, reply: bool = True) -> "Actors":
        """The same actors, called otherwise.

        `deadline_s`: each call ends until then, and its callee is told to stop. `retry`: made again so many times
        when a rank is lost, for endpoints marked idempotent. `reply=False`: nobody waits for the outcome.
        """
        return self._with(options=Options(deadline_s, retry, reply))

    @overload
    def __getitem__(self, place: int) -> "Actor": ...
    @overload
    def __getitem__(self, place: builtins.slice) -> "Actors": ...
    def __getitem__(self, place: int | builtins.slice) -> "Actor | Actors":
        if isinstance(place, builtins.slice):
            ranks = self._ranks[place]
            return Actors(self._grid, self._name, self._kind, ranks, {"ranks": len(ranks)}, self._options)
        try:
            rank = self._ranks[place]
        except IndexError:
            raise IndexError(f"there are {len(self._ranks)} actors, none at {place}") from None
        return Actor(self._grid, self._name, self._kind, [rank], {}, self._options)

    def __len__(self) -> int:
        return len(self._ranks)

    def __iter__(self) -> "Iterator[Actor]":
        return (self[place] for place in range(len(self._ranks)))

    def __getattr__(self, method: str) -> "Callable[..., Any]":
        if method.startswith("__"):
            raise AttributeError(method)
        kind = self._kind
        if kind is not None and not callable(getattr(kind, method, None)):
            raise AttributeError(f"{kind.__name__} has no endpoint {method!r}")

        def call(*args: Any, **kwargs: Any) -> Any:
            return self._call(method, args, kwargs)

        self.__dict__[method] = call  # The next time it is found without coming here.
        return call

    def __reduce__(self) -> Any:
        return type(self), (self._grid, self._name, self._kind, self._ranks, self._dims, self._options)

    def __repr__(self) -> str:
        kind = self._kind.__name__ if self._kind is not None else self._name
        dims = ", ".join(f"{name}={extent}" for name, extent in self._dims.items())
        return f"<{kind} on {len(self._ranks)} ranks of {self._grid.name}{f' ({dims})' if dims else ''}>"

    def _with(
        self,
        ranks: Sequence[int] | None = None,
        dims: Mapping[str, int] | None = None,
        options: Options | None = None,
    ) -> "Actors":
        chosen, left = self._ranks if ranks is None else ranks, self._dims if dims is None else dims
        kind = Actor if not left and len(chosen) == 1 else Actors
        return kind(self._grid, self._name, self._kind, chosen, left, options or self._options)

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return Replies(self._begin(method, args, kwargs))

    def _begin(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Reply[Any]]:
        """Send the call to every rank."""
        options = self._options
        if options.retry and not (self._kind is not None and marks(self._kind, method).idempotent):
            raise ConfigError(
                f"only idempotent endpoints are called again: {method}",
                hint="mark it with @argosy.endpoint(idempotent=True)",
            )
        deadline = time.monotonic() + options.deadline_s if options.deadline_s is not None else 0.0
        outer = context.call.deadline
        if outer and (not deadline or outer < deadline):
            deadline = outer  # What is done for a call must not outlast it.
        packed = _packed(self._name, method, args, kwargs, len(self._ranks))

        def send(rank: int) -> PendingCall:
            again = packed if packed.segment is None else PackedValue((args, kwargs))
            return self._grid.peer(rank).call(again, self._name, method, deadline, options.reply)

        if self._peers is None:
            self._peers = [self._grid.peer(rank) for rank in self._ranks]
        pendings = [peer.call(packed, self._name, method, deadline, options.reply) for peer in self._peers]
        return [
            Reply(rank, pending, deadline, send, options.retry)
            for rank, pending in zip(self._ranks, pendings, strict=True)
        ]


class Actor(Actors):
    """An actor on one rank: calling an endpoint gives one reply."""

    def _call(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self._peers is None or self._options is not PLAINLY or context.call.deadline:
            return self._begin(method, args, kwargs)[0]
        # The common case, with as little between the caller and the socket as there can be.
        pending = self._peers[0].call(_packed(self._name, method, args, kwargs, 1), self._name, method, 0.0, True)
        reply: Reply[Any] = Reply(self._ranks[0], pending, 0.0)
        return reply


def check_endpoints(kind: object) -> None:
    """Refuse what is no class, and one with endpoints that a handle hides, because it has such a method itself.

    Raises:
        ConfigError: it is so.
    """
    if not isinstance(kind, type):
        raise ConfigError(f"actors are built from a class: {kind!r}")
    own = [name for name in dir(Actors) if not name.startswith("_")]
    if hidden := [name for name in own if callable(getattr(kind, name, None))]:
        raise ConfigError(
            f"handles have a method of this name themselves: {kind.__name__}.{hidden[0]}",
            hint=f"rename it; taken are {', '.join(own)}",
        )


def _packed(name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], receivers: int) -> PackedValue:
    try:
        return PackedValue((args, kwargs), receivers)
    except ConfigError as error:
        error.add_note(f"calling {name or 'a function'}.{method}")
        raise
