"""The agent log: what an agent must remember, as the events that its roots were fed.

A restarted agent replays them through the same decisions and arrives at the same state.
"""

from pathlib import Path

import msgspec

from argosy.core import RankId
from argosy.observe import Journal, read_journal
from argosy.process.host.messages import Child
from argosy.process.run import root
from argosy.control.launch import Launch


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
        self.port = 0
        self.trouble = ""
        """Why its events cannot be replayed; then `state` is the one before the event that failed."""
        self.state = root.new_run(launched.number, launch.dims, launch.restart, launch.grace_s, launch.size)

    def replay(self, event: root.Event, at: float) -> None:
        """React as the earlier agent did; an event that it died of must not kill this one too."""
        if self.trouble:
            return
        try:
            self.state, _ = root.react(self.state, event, at)
        except Exception as error:
            self.trouble = f"{type(event).__name__}: {error!r}"


class AgentLog:
    """The appending end. Disk trouble is survived: the agent then remembers less, and says so."""

    def __init__(self, runtime: Path) -> None:
        self._path = runtime / "agent.log"
        self._journal = Journal(self._path)
        self.trouble = ""

    def append(self, entry: Entry) -> None:
        try:
            self._journal.append(msgspec.msgpack.encode(entry))
        except OSError as error:
            self.trouble = f"{error.strerror}: {self._path}"

    def forget(self) -> None:
        """Begin anew; only while no run is alive."""
        self._journal.close()
        self._path.unlink(missing_ok=True)
        self._journal = Journal(self._path)


def recall(runtime: Path) -> dict[str, Remembered]:
    """Replay the log: the runs that were not over, in the state they were in."""
    path = runtime / "agent.log"
    runs: dict[str, Remembered] = {}
    if not path.exists():
        return runs
    for payload in read_journal(path):
        match _decoder.decode(payload):
            case Launched() as launched:
                runs[launched.run] = Remembered(launched)
            case Fed(run, event, at) if run in runs:
                runs[run].replay(event, at)
            case Has(run, child) if run in runs:
                runs[run].children[child.rank] = child
            case Opened(run, port) if run in runs:
                runs[run].port = port
            case Over(run):
                runs.pop(run, None)
            case _:
                pass
    return runs
