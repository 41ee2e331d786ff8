"""Find the step to restore: the newest that all ranks can open, from the nearest good copy. Ranks decide together.

R4  All ranks restore the same step, or none does; one rank's failure is told to all.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

from argosy.checkpoint.format import CorruptShard, StepNotFound
from argosy.checkpoint.gathering import exchanged
from argosy.checkpoint.keeper.source import keeper_sources
from argosy.checkpoint.reading import Candidate, FilesSource, Source
from argosy.checkpoint.stores import open_files
from argosy.core import ArgosyError, ConfigError

Kind = Literal["whole", "damaged", "unfit"]


class Search:
    """Candidates in order, as all ranks see them."""

    def __init__(self, path: str | Path, step: int | None, timeout_s: float) -> None:
        files, label = open_files(path)
        self.sources: list[Source] = [*keeper_sources(str(path)), FilesSource(files, label)]
        self.skipped: list[str] = []
        self._path, self._step, self._timeout_s = path, step, timeout_s
        self._size = 1
        self._holders: dict[str, list[Source]] = {}
        self._order: list[Candidate] = []

    def begin(self, size: int, fault: ArgosyError | None) -> None:
        """Agree on the candidates.

        Raises:
            ConfigError: a rank's state cannot be restored into (`fault`).
            StepNotFound: there is nothing.
            DeadlinePassed: a rank did not come.
        """
        self._size = size
        mine: dict[str, Candidate] = {}
        for source in self.sources:
            try:
                found = source.candidates()
            except (ArgosyError, OSError) as error:
                self.skipped.append(f"{source.label}: {error}")
                continue
            for candidate in found:
                mine.setdefault(candidate.name, candidate)
                self._holders.setdefault(candidate.name, []).append(source)
        text = msgspec.json.encode(list(mine.values())).decode()
        answers = exchanged(size, (text, None if fault is None else str(fault)), self._timeout_s)
        if fault is not None:
            raise fault
        for rank, (_, other) in enumerate(answers):
            if other is not None:
                raise ConfigError(f"rank {rank} cannot restore: {other}")
        seen = [{each.name: each for each in msgspec.json.decode(text, type=list[Candidate])} for text, _ in answers]
        common = [name for name in seen[0] if all(name in names for names in seen)]
        # Every rank takes rank 0's word for the order.
        everything = sorted((seen[0][name] for name in common), reverse=True)
        self._order = [each for each in everything if self._step in (None, each.step)]
        if not self._order:
            what = "no step was committed" if self._step is None else f"step {self._step} was not committed"
            known = ", ".join(dict.fromkeys(str(each.step) for each in everything[:8]))
            raise StepNotFound(
                f"{what} in {self._path}", hint=f"there are {known}" if known else "; ".join(self.skipped)
            )

    def holders(self, candidate: Candidate) -> Sequence[Source]:
        return self._holders[candidate.name]

    def next(self) -> Candidate:
        """The newest candidate that was not tried.

        Raises:
            StepNotFound: all were.
        """
        if not self._order:
            raise StepNotFound(f"no step is whole in {self._path}", hint="; ".join(self.skipped))
        return self._order.pop(0)

    def passed_over(self, candidate: Candidate, source: Source, error: Exception) -> None:
        where = "" if source is self.sources[-1] else f" from {source.label}"
        self.skipped.append(f"step {candidate.step}{where}: {error}")

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
            CorruptShard: it did not somewhere: what was restored must not be used.
        """
        answers = exchanged(self._size, ("", None if error is None else str(error)), self._timeout_s)
        if error is not None:
            raise error
        for rank, (_, fault) in enumerate(answers):
            if fault is not None:
                raise CorruptShard(f"rank {rank}", "its part", "written", fault)

    def close(self) -> None:
        for source in self.sources:
            source.close()
