"""Watch a group that the user made himself, of Gloo or NCCL: name the rank that is missing, abort, re-form.

The ranks also connect to each other directly. Argosy takes no part in its operations.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportPrivateImportUsage=false

import socket
from contextlib import suppress
from types import TracebackType
from typing import Any, cast

import torch.distributed as dist

from argosy.collective._torch import can_reconfigure
from argosy.collective.group import Group
from argosy.collective.peer_links import Links
from argosy.collective.reconfigured import reconfigure
from argosy.collective.rendezvous import Meeting, meet
from argosy.collective.torch_work import Patience
from argosy.core import ConfigError, PeerLost


def guard(group: Any = None, *, view: int = 0, timeout_s: float = 60.0) -> "Guard":
    """Watch `group`, by default the default group, on all its ranks; they call this together.

    A group made with `enable_reconfigure=True` is formed here. A process that replaces a lost rank makes the group, and
    calls this with the view in which the others call `Guard.reform`.

    Raises:
        ConfigError: a group of the backend `argosy`, which names missing ranks itself.
        PeerLost, DeadlinePassed: a rank did not come.
    """
    found = group or dist.group.WORLD
    if isinstance(found, Group):
        raise ConfigError("a group of the backend argosy names missing ranks itself: it needs no guard")
    guarded = Guard(found, timeout_s)
    guarded.form(view, timeout_s)
    return guarded


class Guard:
    """Names who is missing. As a block it turns an error of torch that a lost rank explains into PeerLost."""

    def __init__(self, group: Any, timeout_s: float) -> None:
        self._group, self._timeout_s = group, timeout_s
        self._ranks: list[int] = dist.get_process_group_ranks(group)
        self._store = dist.PrefixStore("argosy/guard", group.get_group_store())
        self._links: Links | None = None
        self.view = -1

    def form(self, view: int, timeout_s: float) -> None:
        """Connect to the other ranks; the group is re-formed by torch if it was made for that."""
        rank, size = self._group.rank(), self._group.size()
        meeting = Meeting(name="guarded", rank=rank, size=size, generation=view, gloo=True)
        members, links = meet(self._store, meeting, timeout_s)
        own = members[rank].host
        near = {r: member.pid for r, member in enumerate(members) if r != rank and member.host == own}
        self._links = Links(cast("dict[int, socket.socket]", links), near, self._ranks)
        self._links.on_loss = self._revoke
        self.view = view
        if can_reconfigure(self._group):
            reconfigure(self._group, self._store, meeting, self._patience("the group to be formed", timeout_s))

    def check(self) -> None:
        """Raise PeerLost if a rank of the group is lost."""
        assert self._links is not None
        self._links.check()

    def wait(self, work: Any, timeout_s: float | None = None) -> None:
        """Wait for an operation of the group; unlike the work's own wait this one ends when any rank is lost.

        Raises:
            PeerLost, DeadlinePassed: the group is of no more use, unless it is re-formed.
        """
        patience = self._patience("an operation of a guarded group", timeout_s or self._timeout_s)
        try:
            patience.call(work.wait)
        except RuntimeError as error:
            patience.explain(error)

    def abort(self, cause: str = "it aborted the group") -> None:
        """Give the group up on all ranks: their guards report it. Operations under way end where torch can end them."""
        assert self._links is not None
        self._links.abort(f"rank {dist.get_rank()}: {cause}")
        self._revoke()

    def reform(self, view: int, *, timeout_s: float = 60.0) -> None:
        """Meet the other ranks, some of them in new processes, in a view higher than all before.

        Raises:
            ConfigError: the group cannot be re-formed, or the view does not grow.
            PeerLost, DeadlinePassed: retry in a higher view.
        """
        if not can_reconfigure(self._group):
            raise ConfigError(
                "torch cannot re-form this group",
                hint="init_process_group(..., enable_reconfigure=True), with the backend gloo or nccl",
            )
        if view <= self.view:
            raise ConfigError(f"the view must grow beyond {self.view}: {view}")
        assert self._links is not None
        self._links.abort(f"view {view} is formed")
        self._links.close()
        self.form(view, timeout_s)

    def close(self) -> None:
        """Watch no longer; the other ranks see no loss."""
        if self._links is not None:
            self._links.close()

    def _patience(self, what: str, timeout_s: float) -> Patience:
        assert self._links is not None
        return Patience(self._links, what, timeout_s)

    def _revoke(self) -> None:
        with suppress(RuntimeError):  # Of Gloo this does nothing.
            self._group.abort()

    def __enter__(self) -> "Guard":
        self.check()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, PeerLost):
            self._patience("an operation of a guarded group", self._timeout_s).explain(error)
