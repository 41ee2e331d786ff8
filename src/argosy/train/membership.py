"""The ranks of a run, as one of them sees them: alone, under a foreign launcher, or replaceable.

W1  Ranks meet in views, which grow: whoever replaces a lost rank opens the next one, and all leave for the newest.
W2  Until a rank has met the others its groups answer locally, so that constructors and rehearsals need nobody.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal, cast

import torch
import torch.distributed as dist

from argosy.collective import Group, Latch, Superseded, joining, open_agent_store
from argosy.core import ConfigError, DeadlinePassed
from argosy.fabric import here

Kind = Literal["alone", "foreign", "replaceable"]
_VIEWS = "argosy/views"
_POLL_S = 0.002
FORM_S = 60.0


class NobodyCame(DeadlinePassed):
    """A lost rank was not replaced."""


class Crew:
    """This rank's link to the others.

    Raises:
        ConfigError: a process group exists already where the run must make it.
    """

    def __init__(self, patience_s: float) -> None:
        place = here()
        self.rank, self.size, self.generation = place.rank.index, place.size, place.rank.generation
        self._patience_s = patience_s
        self._store: Any = None
        self._joining = ExitStack()
        self._tried = 0
        self._announced = False
        self.group: Any = None
        self.board: Any = None
        """What all ranks can write on and read; None where nobody could be told to stop waiting."""
        self.joined = False
        self.kind: Kind = self._open(place.launcher == "argosy" and place.memory is not None and not place.alone)
        if isinstance(self.group, Group):
            # torchrun keeps one store over its restarts: what an earlier attempt wrote must not be read.
            attempt = f"argosy/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            default = cast(Any, dist.distributed_c10d)._get_default_store
            self.board = self._store or dist.PrefixStore(attempt, default())

    def _open(self, launched: bool) -> Kind:
        if self.size == 1 and not launched:
            return "alone"
        if dist.is_initialized():
            if launched and self.generation:
                raise ConfigError(
                    "a process group exists before argosy.Run, so a replaced rank cannot join it",
                    hint="create argosy.Run first and drop init_process_group: the run makes the group",
                )
            self.group = dist.group.WORLD
            self.rank, self.size = dist.get_rank(), dist.get_world_size()
            return "foreign"
        if torch.accelerator.is_available() or not launched:
            dist.init_process_group(None if torch.accelerator.is_available() else "argosy")
            self.group = dist.group.WORLD
            return "foreign"
        # Not torch's rendezvous: it would give each generation names of its own, and its store can be killed.
        self._agent_store = open_agent_store()
        self._store = dist.PrefixStore("argosy/run", self._agent_store)
        self._joining.enter_context(joining())
        dist.init_process_group("argosy", store=self._store, rank=self.rank, world_size=self.size)
        self.group = dist.group.WORLD
        return "replaceable"

    # -- steps -------------------------------------------------------------------------------------

    def latched(self) -> Latch | None:
        """Begin an attempt in which no loss raises, if the group can do that."""
        return self.group.latched() if isinstance(self.group, Group) else None

    def ask(self, words: Sequence[int], latch: Latch | None) -> list[int] | None:
        """The smallest of each word over all ranks; None if a rank is lost."""
        if latch is not None:
            return latch.ask(words)
        if self.group is None:
            return list(words)
        found = torch.tensor(words, dtype=torch.int64)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return [int(word) for word in found]

    def is_lost(self, wait_s: float = 0.0) -> bool:
        """Whether the group has lost a rank, or loses one within `wait_s`."""
        deadline = time.monotonic() + wait_s
        while isinstance(self.group, Group) and self.group.state == "live":
            self.group.check_loss()
            if self.group.state != "live" or time.monotonic() >= deadline:
                break
            time.sleep(_POLL_S)
        return isinstance(self.group, Group) and self.group.state == "lost"

    def gather(self, mine: Any) -> list[Any]:
        """What each rank says."""
        if self.size == 1:
            return [mine]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        return found

    # -- meeting -----------------------------------------------------------------------------------

    @property
    def view(self) -> int:
        """The newest view that somebody has opened."""
        return 1 if self._store is None else 1 + int(self._store.add(_VIEWS, 0))

    @property
    def must_be_settled(self) -> bool:
        """Whether the next meeting is with ranks that may have settled their buckets: only the first is not."""
        return self.generation > 0 or self._tried > 0 or self.view > 1

    def meet(self, give_up: Callable[[], bool], *, settled: bool = True) -> int:
        """Meet the others in the newest view, or if this rank is not `settled` in the first; returns its number.

        Raises:
            NobodyCame: there is no use in waiting any more.
            PeerLost, DeadlinePassed, Superseded: it failed; meet again.
        """
        view = self._next_view(give_up)
        if view > 1 and not settled:
            raise Superseded("the first view is over: whoever comes now has settled its buckets")
        self._tried = view
        self.group.reform(None, view, timeout_s=FORM_S, give_up=lambda: give_up() or self.view > view)
        self._joining.close()
        self.joined = True
        return view

    def _next_view(self, give_up: Callable[[], bool]) -> int:
        if self.generation and not self._announced:
            self._store.add(_VIEWS, 1)  # W1
            self._announced = True
        deadline = time.monotonic() + self._patience_s
        while (view := self.view) <= self._tried:
            if give_up():
                raise Superseded(f"no view after {view} is waited for any more")
            if time.monotonic() > deadline:
                raise NobodyCame("a lost rank's replacement", self._patience_s, hint="`argosy why` shows what it does")
            time.sleep(_POLL_S)
        return view

    # -- what all of them remember -----------------------------------------------------------------

    @property
    def tried(self) -> int:
        """The newest view in which this rank has met others, or tried to."""
        return self._tried

    def open_view(self) -> None:
        """Have all ranks meet again although none was replaced."""
        self._store.add(_VIEWS, 1)

    def counted(self, name: str) -> int:
        return 0 if self._store is None else int(self._store.add(f"argosy/count/{name}", 0))

    def count(self, name: str) -> int:
        """Count something over all ranks and generations; returns the new count."""
        return 1 if self._store is None else int(self._store.add(f"argosy/count/{name}", 1))
