"""Drives the machines of `control`: events come in, are logged with what follows from them, and are performed.

One turn of the agent's loop ends with `settle`: one write to the log, then the effects. What they lead to in the same
turn is written and performed before the loop waits again.
"""

from collections import deque
from collections.abc import Callable
from pathlib import Path

from argosy.control import (
    Decided,
    ForHost,
    ForRun,
    HostTick,
    HostWakeAt,
    Known,
    LogRecord,
    NodeEffect,
    NodeEvent,
    Numbered,
    OfHost,
    OfRun,
    Performed,
    Tick,
    WakeAt,
    node,
    recovered,
)
from argosy.core import Clock
from argosy.supervise.agent.agent_log import AgentLog, recall


class Decisions:
    """The state of this node's machines; `perform` does what they ask for."""

    def __init__(self, runtime: Path, perform: Callable[[NodeEffect], None], name: str = "") -> None:
        self.state, pending = recall(runtime, name)
        self.log = AgentLog(runtime)
        if self.log.is_empty:  # Its runs know the node by this name, whatever the host is called later.
            self.log.append([Known(self.state)])
        self.clock = Clock(not_before=self.state.now)
        self._perform = perform
        self._unwritten: list[LogRecord] = []
        self._effects: deque[Numbered] = deque(pending)
        self._wakes: dict[str, float] = {}
        """When each machine wants to be woken first; the host's has no name."""

    def feed(self, event: NodeEvent) -> None:
        """Decide what follows from an event; it is performed by `settle`."""
        now = self.clock.now()
        self._unwritten.append(Decided(event, now))
        try:
            self.state, effects = node.react(self.state, event, now)
        except Exception:
            self.log.append(self._unwritten)  # The next agent gives up the run whose event this is.
            raise
        self._effects.extend(effects)

    def settle(self) -> None:
        """Write what was decided, then perform it, until nothing is left to do."""
        while self._unwritten or self._effects:
            if self._unwritten:
                self.log.append(self._unwritten)
                self._unwritten = []
            if self._effects:
                number, effect = self._effects.popleft()
                self._do(effect)
                if not self._effects:
                    self.log.append([Performed(number)])
        if self.log.is_long:
            self.log.restart(self.state)

    def _do(self, effect: NodeEffect) -> None:
        match effect:
            case OfRun(name, WakeAt(at)):
                self._wakes[name] = min(at, self._wakes.get(name, at))
            case OfHost(HostWakeAt(at)):
                self._wakes[""] = min(at, self._wakes.get("", at))
            case _:
                self._perform(effect)

    def recover(self) -> None:
        """Let the machines ask again for what an earlier agent had under way."""
        for event in recovered(self.state):
            self.feed(event)

    def tick(self) -> None:
        """Wake the machines whose time has come."""
        now = self.clock.now()
        for name in [name for name, at in self._wakes.items() if at <= now]:
            del self._wakes[name]
            if not name:
                self.feed(ForHost(HostTick()))
            elif name in self.state.runs:
                self.feed(ForRun(name, Tick()))

    def patience(self) -> float | None:
        """Seconds until a machine wants to be woken."""
        return max(0.0, min(self._wakes.values()) - self.clock.now()) if self._wakes else None
