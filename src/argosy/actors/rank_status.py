"""What became of a rank, from the facts of its run: alive, gone and why, replaced or not."""

import contextlib
from collections.abc import Iterable
from pathlib import Path

import msgspec

from argosy.control import facts
from argosy.fabric import Alive, Fate, Gone
from argosy.observe import Damage, follow

_decoder = msgspec.msgpack.Decoder(facts.AnyFact)


class History:
    """The facts of one launch, as far as they are known."""

    def __init__(self) -> None:
        self._causes: dict[tuple[int, int], tuple[str, bool]] = {}
        """Why a generation of a slot ended, and whether it ended well."""
        self._newest: dict[int, int] = {}
        self._restart = ""
        self._stop = ""
        self._failure = ""
        self._hang = ""
        self.over = ""
        """Why the launch ended, if it did."""

    def learn(self, news: Iterable[facts.AnyFact]) -> None:
        """Take in facts, oldest first."""
        for fact in news:
            match fact:
                case facts.LaunchStarted():
                    self.__init__()
                case facts.RankStarted(rank=rank):
                    self._newest[rank.index] = max(rank.generation, self._newest.get(rank.index, 0))
                case facts.RankExited(rank=rank, status=status, asked=asked, oom=oom):
                    why = oom or str(status)
                    if asked:
                        failed = f"stopped, because of {self._failure}" if self._failure else ""
                        why = self._stop or self._restart or failed or why
                    elif not status.ok:
                        self._failure = self._failure or f"rank {rank.index}: {why}"
                    self._causes[rank.index, rank.generation] = (why, status.ok and not asked)
                case facts.Restarting(ranks=ranks, generation=generation, cause=cause):
                    self._restart = f"stopped, because of {cause}"
                    for index in ranks:
                        self._newest[index] = generation
                case facts.StopAsked(by=by):
                    self._stop = f"stopped by {by}"
                case facts.GaveUp(reason=reason):
                    self._restart = f"no more restarts: {reason}"
                case facts.LaunchEnded(reason=reason):
                    self.over = reason
                case _:
                    pass

    def fate(self, index: int, generation: int) -> Fate:
        """What became of a generation of the slot; -1 asks for the newest."""
        newest = self._newest.get(index, 0)
        asked = newest if generation < 0 else generation
        cause, ended_well = self._causes.get((index, asked), ("", False))
        if self.over:
            return Gone(cause or f"the run is over: {self.over}", replaced=False)
        if newest > asked:
            return Gone(cause or "it was replaced", replaced=True)
        if cause:
            # Whether a failure is followed by a restart is told a moment later, or the run ends.
            return Gone(cause, replaced=not ended_well)
        return Alive(asked)


class Chronicle:
    """Reads the journal of a run as it grows; any process of the user can."""

    def __init__(self, directory: Path, files: Path) -> None:
        self.history = History()
        self._path, self._files = directory / "events", files
        self._offset = 0

    def fate(self, index: int, generation: int) -> Fate:
        """What became of a generation of a slot, as of now."""
        with contextlib.suppress(OSError):
            for entry in follow(self._path, self._offset):
                if isinstance(entry, Damage):
                    continue
                self._offset = entry.end
                with contextlib.suppress(msgspec.MsgspecError):
                    self.history.learn([_decoder.decode(entry.record)])
        fate = self.history.fate(index, generation)
        if isinstance(fate, Alive) and not self._files.exists():
            return Gone("the run is over", replaced=False)
        return fate
