"""Decide from silence alone: which host is suspected, which never joined, when a host gives up its head.

Pure: the caller says what it heard and how much time passed. A head that was itself slow says less time: what it did
not hear then says nothing about its hosts.

L1  A host that is often slow is suspected later: after `SLOWNESS` times its longest pause of late.
L2  A suspicion is raised once per silence. It ends nothing by itself (`run.py` decides): only the engine's word, or
    that a host never joined, is final.
"""

import msgspec

from argosy.control.run_events import HostGone, HostSilent

SILENT_S = 2.0
"""A host that was not heard of for this long is suspected."""
SLOWNESS = 4.0
FORGET = 0.98
"""What one beat leaves of the longest pause."""
RETURN_S = 20.0
"""How long hosts have to find a new agent of the head."""
JOIN_S = 180.0
ABANDONED_S = 600.0
"""After this long without a head, nobody will come for a host's ranks."""
TURN_MAX_S = 0.5
"""A turn of the head's loop that took longer says more about the head than about the hosts."""


class HostSilence(msgspec.Struct):
    """How long one host has been silent, and how long it may be."""

    limit_s: float = JOIN_S
    joined: bool = False
    silent_s: float = 0.0
    pause_s: float = 0.0
    """Its longest pause of late."""

    def join(self) -> None:
        """The host said that it is there."""
        self.joined, self.limit_s, self.pause_s = True, SILENT_S, 0.0

    def hear(self) -> None:
        """The host said something."""
        self.pause_s, self.silent_s = max(self.silent_s, FORGET * self.pause_s), 0.0

    def wait(self, passed_s: float, host: str) -> HostSilent | HostGone | None:
        """Time passed, and the host said nothing: return what the run is to hear."""
        self.silent_s += min(passed_s, TURN_MAX_S)
        if self.silent_s < max(self.limit_s, SLOWNESS * self.pause_s):  # L1
            return None
        self.silent_s = 0.0  # L2
        if self.joined:
            return HostSilent(host)
        return HostGone(host, f"it did not join within {self.limit_s:.0f} s", joined=False)


def silence_of_returning() -> HostSilence:
    """Of a host that had joined an earlier agent of the head."""
    return HostSilence(RETURN_S, joined=True)
