"""The ranks of a run, as one of them sees them: alone, under a foreign launcher, or replaceable.

W1  Ranks meet in views, which grow: whoever replaces a lost rank opens the next one, and all leave for the newest.
W2  Until a rank has met the others its groups answer locally, so that constructors and rehearsals need nobody.
W3  Where a connection breaks or a deadline passes and all ranks live, nobody is replaced: a rank that saw it opens the
    next view.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import os
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Literal

import torch
import torch.distributed as dist

from argosy.collective import ConnectionLost, Group, Latch, Superseded, joining, meet_when_needed, open_agent_store
from argosy.core import ArgosyError, ConfigError, DeadlinePassed, PeerLost
from argosy.fabric import here
from argosy.train._torch import default_store
from argosy.train.heal_decision import Version, newest

Kind = Literal["alone", "foreign", "replaceable"]
_VIEWS = "argosy/views"
_LIVE = "live"
_POLL_S = 0.002
FORM_S = 60.0
REOPENED_MAX = 5
"""How often a rank opens a view at the same step though nobody is replaced, before it waits for a replacement."""


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
        self._tried = self._seen_view = 0
        self._announced = False
        self._held = ""
        """What this rank's arena holds, as it was posted."""
        self._reopened: list[tuple[int, ArgosyError]] = []
        """At which step this rank opened a view because of which loss; of the newest such step."""
        self._failure: ArgosyError | None = None
        """A deadline that passed while ranks met or took the state over, though all may live."""
        self.group: Any = None
        self.board: Any = None
        """What all ranks can write on and read; None where nobody could be told to stop waiting."""
        self.joined = False
        self.kind: Kind = self._open(place.launcher == "argosy" and place.memory is not None and not place.alone)
        if isinstance(self.group, Group):
            # torchrun keeps one store over its restarts: what an earlier attempt wrote must not be read.
            attempt = f"argosy/attempt{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
            self.board = self._store or dist.PrefixStore(attempt, default_store())

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
        if not launched:
            dist.init_process_group("argosy")
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

    def part(self) -> None:
        """Exchange nothing more with the other ranks: where a loss raises nothing, groups answer locally."""
        if isinstance(self.group, Group):
            self.group.lose(ConnectionLost("the group", "this rank has left it"))

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

    def meet(self, give_up: Callable[[], bool], *, settled: bool = True, at: int = -1) -> int:
        """Meet the others in the newest view, or if this rank is not `settled` in the first; returns its number.

        `at` is the step that this rank has the state of, -1 if it has none: a rank that replaces another reads it.

        Raises:
            NobodyCame: there is no use in waiting any more.
            PeerLost, DeadlinePassed, Superseded: it failed; meet again.
        """
        self._post(self._tried, at)
        self._reopen(at)
        view = self._next_view(give_up)
        if at < 0:
            self._post(view, at)
        if view > 1 and not settled:
            raise Superseded("the first view is over: whoever comes now has settled its buckets")
        self._tried = view
        self._seen_view = self._agent_store.view
        self.group.reform(None, view, timeout_s=FORM_S, give_up=lambda: give_up() or self.view > view)
        self._joining.close()
        self.joined = True
        return view

    def fail(self, error: ArgosyError) -> None:
        """What all ranks did together failed: they meet again before the next step."""
        self._failure = error if isinstance(error, DeadlinePassed) else None
        self.group.give_up(error)

    def _reopen(self, at: int) -> None:
        """Open a view, once for each failure of W3. If a rank died after all, its replacement does too."""
        loss, self._failure = self._failure or self.group.loss, None
        if not isinstance(loss, ConnectionLost | DeadlinePassed) or any(loss is known for _, known in self._reopened):
            return
        self._reopened = [(step, known) for step, known in self._reopened if step == at] + [(at, loss)]
        if len(self._reopened) <= REOPENED_MAX:
            self.open_view()

    def _next_view(self, give_up: Callable[[], bool]) -> int:
        if self.generation and not self._announced:
            self._store.add(_VIEWS, 1)  # W1
            self._announced = True
        deadline = time.monotonic() + self._patience_s
        while (view := self.view) <= self._tried:
            if give_up():
                raise Superseded(f"no view after {view} is waited for any more")
            if time.monotonic() > deadline:
                raise NobodyCame(self._awaited(), self._patience_s, hint="`argosy why` shows what it does")
            time.sleep(_POLL_S)
        return view

    def _awaited(self) -> str:
        """What this rank waits for, as far as the run has told."""
        if self._agent_store.view > self._seen_view:
            return f"a lost rank's replacement, which was started in view {self._agent_store.view} of the run"
        return "a lost rank's replacement, which was not started"

    def _post(self, view: int, at: int | str) -> None:
        self._store.set(f"argosy/at/{view}/{self.rank}", f"{at}{self._held if at == -1 else ''}")

    def healed(self) -> None:
        """This rank trains in the view that it has met others in: what it posted about it is over."""
        if self._store is not None:
            self._post(self._tried, _LIVE)

    def entry_step(self, held: Sequence[Version] = ()) -> int:
        """The step that the other ranks wait at for this one, which replaces another; -1 if none has any state.

        If no rank has state, it is the newest step that the arenas of all ranks hold; `held` is what this rank's holds.

        Raises:
            NobodyCame: they do not say so in time.
        """
        deadline = time.monotonic() + self._patience_s
        self._held = "".join(f" {each.step}/{each.view}" for each in held)
        while self._store is not None and self.view > 1 - bool(self.generation):
            view = self.view
            self._post(view, -1)
            keys = [f"argosy/at/{view}/{rank}" for rank in range(self.size)]
            said = [self._store.get(key).decode() for key in keys] if self._store.check(keys) else [_LIVE]
            if _LIVE not in said:
                live = max(int(each.split()[0]) for each in said)
                common = set[str].intersection(*({*each.split()[1:]} for each in said)) if live < 0 else ()
                versions = [Version(*map(int, each.split("/"))) for each in common]
                return newest(versions).step if versions else live
            if time.monotonic() > deadline:
                raise NobodyCame("the other ranks", self._patience_s, hint="`argosy why` shows what they do")
            time.sleep(_POLL_S)
        return -1

    def meet_when_needed(self, wanted: bool) -> None:
        """When a loop is over: whether the first operation between ranks meets others that came late, too."""
        meet_when_needed(self._meet_late if wanted else None)

    def _meet_late(self) -> None:
        meet_when_needed(None)
        deadline = time.monotonic() + FORM_S
        while not self.joined:
            try:
                self.meet(lambda: time.monotonic() > deadline)
            except (PeerLost, DeadlinePassed, Superseded) as error:
                if time.monotonic() > deadline:
                    raise PeerLost(
                        "a rank that ended with the loop of steps",
                        f"rank {self.rank} was replaced later",
                        hint="run the same command again: it repeats what follows the loop, on all ranks",
                    ) from error

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
