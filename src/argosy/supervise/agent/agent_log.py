"""The agent log: what an agent must remember, as the events that its roots were fed.

A restarted agent replays them through the same decisions and arrives at the same state. What it has to do then is the
root's answer to `Recovered`; facts and exits that the earlier agent knew of come out of the replay.
"""

from pathlib import Path

import msgspec

from argosy.control import AnyFact, Launch
from argosy.core import RankId
from argosy.supervise.agent import effects as do
from argosy.supervise.agent import root
from argosy.supervise.evidence.incident import Exit
from argosy.supervise.messages import Child
from argosy.supervise.records.retrying_journal import RetryingJournal, read_records


class Launched(msgspec.Struct, frozen=True, tag=True):
    """A run was accepted."""

    run: str
    number: int
    launch: Launch
    started_at: float


class Fed(msgspec.Struct, frozen=True, tag=True):
    """A run's root was fed an event."""

    run: str
    event: root.Event
    at: float


class Has(msgspec.Struct, frozen=True, tag=True):
    """A run has a child."""

    run: str
    child: Child


class Opened(msgspec.Struct, frozen=True, tag=True):
    """A run's store has this port."""

    run: str
    port: int
    generation: int = 0


class Over(msgspec.Struct, frozen=True, tag=True):
    """A run is over; nothing about it need be remembered."""

    run: str


Entry = Launched | Fed | Has | Opened | Over
_decoder: "msgspec.msgpack.Decoder[Entry]" = msgspec.msgpack.Decoder(Entry)


class Remembered:
    """A run as the log knows it."""

    def __init__(self, launched: Launched) -> None:
        launch = launched.launch
        self.launched = launched
        self.children: dict[RankId, Child] = {}
        self.opened: Opened | None = None
        self.facts: list[AnyFact] = []
        """Those that the root asked to record."""
        self.exits: list[Exit] = []
        """Those about which evidence may still be taken."""
        self.started_at: dict[RankId, float] = {}
        self.trouble = ""
        """Why its events cannot be replayed; then `state` is the one before the event that failed."""
        self.state = root.new_run(launched.number, launch.dims, launch.restart, launch.grace_s, launch.size)

    def replay(self, event: root.Event, at: float) -> None:
        """React as the earlier agent did; an event that it died of must not kill this one too."""
        if self.trouble:
            return
        before = self.state
        try:
            self.state, effects = root.react(before, event, at)
        except Exception as error:
            self.trouble = f"{type(event).__name__}: {error!r}"
            return
        self.facts += [effect.fact for effect in effects if isinstance(effect, do.Record)]
        match event:
            case root.Started(rank):
                self.started_at[rank] = at
                self.exits = [exit for exit in self.exits if exit.rank.index != rank.index]
            case root.Exited(rank, status) if before.slots[rank.index].alive and rank == before.rank(rank.index):
                asked = before.slots[rank.index].asked
                self.exits.append(Exit(rank=rank, status=status, at=at, asked=asked, oom=event.oom))
            case root.EvidenceTaken():
                self.exits = [exit for exit in self.exits if exit.status.ok]
            case _:
                pass


class AgentLog:
    """The appending end."""

    def __init__(self, runtime: Path) -> None:
        self._path = runtime / "agent.log"
        self._journal = RetryingJournal(self._path)

    @property
    def trouble(self) -> str:
        """Why a restarted agent would not know all that happened; "" if it would."""
        return self._journal.trouble

    def append(self, entry: Entry) -> None:
        self._journal.append(msgspec.msgpack.encode(entry))

    def retry(self) -> None:
        """Write what there was no room for."""
        self._journal.retry()

    def forget(self) -> None:
        """Begin anew; only while no run is alive."""
        self._journal.close()
        self._path.unlink(missing_ok=True)
        self._journal = RetryingJournal(self._path)


def recall(runtime: Path) -> dict[str, Remembered]:
    """Replay the log: the runs that were not over, in the state they were in."""
    runs: dict[str, Remembered] = {}
    for payload in read_records(runtime / "agent.log"):
        match _decoder.decode(payload):
            case Launched() as launched:
                runs[launched.run] = Remembered(launched)
            case Fed(run, event, at) if run in runs:
                runs[run].replay(event, at)
            case Has(run, child) if run in runs:
                runs[run].children[child.rank] = child
            case Opened(run) as opened if run in runs:
                runs[run].opened = opened
            case Over(run):
                runs.pop(run, None)
            case _:
                pass
    return runs
