"""Find the step to restore: the newest that all ranks can open, from the nearest good copy. Ranks decide together.

R4  All ranks restore the same step, or none does; one rank's failure is told to all.
"""

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from argosy.checkpoint.format import CorruptShard, StepNotFound, Unreadable
from argosy.checkpoint.keeper.source import keeper_sources
from argosy.checkpoint.rank_exchange import exchanged
from argosy.checkpoint.step_index import Candidate, FilesSource, Source
from argosy.checkpoint.stores import located, open_files
from argosy.core import ArgosyError, ConfigError, PeerLost

Kind = Literal["whole", "damaged", "unfit"]


RELISTS = 3
"""How often to look again where all steps that were there are gone: somebody saves and deletes meanwhile."""


def sources_of(path: str) -> list[Source]:
    """The places that a directory's or store's steps can be restored from, the nearest first."""
    files, label = open_files(path)
    return [*keeper_sources(path), FilesSource(files, label)]


def newest_of(path: str) -> tuple[int, int]:
    """Era and step of the newest that is there; what cannot be read does not count."""
    found = [(0, -1)]
    for source in sources_of(path):
        with suppress(ArgosyError, OSError):
            found += [(each.era, each.step) for each in source.candidates()]
        source.close()
    return max(found)


class _Seen(msgspec.Struct, array_like=True):
    """What a rank finds."""

    candidates: list[Candidate]
    faults: list[str]
    asked: int | None = None
    """The step that it is to restore."""


class Search:
    """Candidates in order, as all ranks see them."""

    def __init__(self, path: str | Path, step: int | None, timeout_s: float) -> None:
        self.sources = sources_of(located(path))
        self.skipped: list[str] = []
        self._path, self._step, self._timeout_s = path, step, timeout_s
        self._size = 1
        self._holders: dict[str, list[Source]] = {}
        self._order: list[Candidate] = []
        self._tried: set[str] = set()
        self._relists = RELISTS

    def begin(self, size: int, fault: ArgosyError | None) -> None:
        """Agree on the candidates.

        Raises:
            ConfigError: a rank's state cannot be restored into (`fault`).
            StepNotFound: there is nothing.
            Unreadable: nobody knows whether there is something.
            DeadlinePassed: a rank did not come.
        """
        self._size = size
        everything, faults = self._listed(fault)
        self._order = [each for each in everything if self._step in (None, each.step)]
        if self._order:
            return
        if faults:
            why = faults[0].removeprefix(f"{self._path}: ")
            raise Unreadable(f"{self._path} cannot be read: {why}", hint="; ".join(faults[1:]))
        what = "no step was committed" if self._step is None else f"step {self._step} was not committed"
        known = ", ".join(dict.fromkeys(str(each.step) for each in everything[:8]))
        raise StepNotFound(f"{what} in {self._path}", hint=f"there are {known}" if known else "")

    def _listed(self, fault: ArgosyError | None = None) -> tuple[list[Candidate], list[str]]:
        """The steps that all ranks see, the newest first, and what some could not read."""
        mine: dict[str, Candidate] = {}
        faults: list[str] = []
        self._holders = {}
        for source in self.sources:
            try:
                found = source.candidates()
            except (ArgosyError, OSError) as error:
                faults.append(f"{source.label}: {error}")
                continue
            for candidate in found:
                mine.setdefault(candidate.name, candidate)
                self._holders.setdefault(candidate.name, []).append(source)
        self.skipped += faults
        text = msgspec.json.encode(_Seen(list(mine.values()), faults, self._step)).decode()
        answers = exchanged(self._size, (text, None if fault is None else str(fault)), self._timeout_s)
        if fault is not None:
            raise fault
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise ConfigError(f"rank {rank} cannot restore: {other}")
        seen = [msgspec.json.decode(text, type=_Seen) for text, _ in answers]
        for rank, one in enumerate(seen):
            if one.asked != seen[0].asked:
                raise ConfigError(
                    f"ranks ask for different steps: {seen[0].asked} on rank 0, {one.asked} on rank {rank}"
                )
        names = [{each.name for each in one.candidates} for one in seen]
        # Every rank takes rank 0's word for the order.
        common = [each for each in seen[0].candidates if all(each.name in others for others in names)]
        return sorted(common, reverse=True), [text for one in seen for text in one.faults]

    def holders(self, candidate: Candidate) -> Sequence[Source]:
        return self._holders[candidate.name]

    def next(self) -> Candidate:
        """The newest candidate that was not tried.

        Raises:
            Unreadable: all were.
        """
        while not self._order and self._relists and self._step is None:
            self._relists -= 1
            everything, _ = self._listed()
            self._order = [each for each in everything if each.name not in self._tried]
            if not self._order:
                break
        if not self._order:
            raise Unreadable(f"no step is whole in {self._path}", hint="; ".join(self.skipped))
        self._tried.add(self._order[0].name)
        return self._order.pop(0)

    def passed_over(self, candidate: Candidate, source: Source, error: Exception) -> None:
        where = "" if source is self.sources[-1] else f" from {source.label}"
        self.skipped.append(f"step {candidate.step}{where}: {error}")

    def exchange(self, text: str) -> list[str]:
        """What each rank says."""
        return [answer for answer, _ in exchanged(self._size, (text, None), self._timeout_s)]

    def settle(self, candidate: Candidate, kind: Kind, error: Exception | None) -> bool:
        """Whether all ranks have this step whole; if not, all go on to the next one, or all raise.

        Raises:
            ConfigError: it does not fit, here or on another rank.
            CorruptShard: it is damaged, and it was asked for by its number.
        """
        answers = exchanged(self._size, (kind, None if error is None else str(error)), self._timeout_s)
        if all(other == "whole" for other, _ in answers):
            return True
        if kind == "unfit" and error is not None:
            raise error
        for rank, (other, fault) in enumerate(answers):
            if other == "unfit":
                raise ConfigError(f"rank {rank} cannot restore: {fault}")
        rank, fault = next((i, fault) for i, (other, fault) in enumerate(answers) if other == "damaged")
        if self._step is not None and not self._order:
            raise error or CorruptShard(candidate.name, f"rank {rank}", "a whole step", str(fault))
        if kind == "whole":
            self.skipped.append(f"step {candidate.step}: rank {rank}: {fault}")
        return False

    def finish(self, error: Exception | None) -> None:
        """Tell all ranks whether writing succeeded.

        Raises:
            PeerLost: it did not on another rank: what was restored must not be used.
        """
        answers = exchanged(self._size, ("", None if error is None else str(error)), self._timeout_s)
        if error is not None:
            raise error
        for rank, (_, fault) in enumerate(answers):
            if fault is not None:
                raise PeerLost(f"what rank {rank} restored", f"{fault}; what was restored here must not be used")

    def close(self) -> None:
        for source in self.sources:
            source.close()
