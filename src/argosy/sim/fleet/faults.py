"""How often what goes wrong in a simulated world.

Probabilities are per occasion. What happens to hosts is drawn from rates, per host and hour.
"""

from dataclasses import dataclass, field

Span = tuple[float, float]
"""Seconds, at least and at most."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """What goes wrong, and how long what goes right takes."""

    letter_lost: float = 0.0
    letter_twice: float = 0.0
    latency_s: Span = (0.0002, 0.002)
    fork_s: Span = (0.01, 0.2)
    fork_refused: float = 0.0
    exit_unseen: float = 0.0
    """No parent reports that a process ended."""
    evidence_lost: float = 0.0
    store_refused: float = 0.0
    store_dies: float = 0.0
    zygote_dies: tuple[float, ...] = (0.0,)
    """One of these holds for a world."""
    zygote_late: float = 0.0
    """A zygote takes long to find a new agent."""
    stubborn: float = 0.0
    """A process ignores signals."""
    ends: float = 0.0
    """A process is done before the others."""
    fails: float = 0.0
    """A process fails by itself."""
    device_fails: float = 0.0
    """The kernel says that it failed because of its device; at times the device cannot be used again."""
    log_shortened: float = 0.0
    managed: float = 1.0
    """A world's ranks are those of `argosy.Run`."""
    grouped: float = 0.0
    """They have a process group of torch."""
    programs: float = 0.0
    """They are executed, not forked."""
    detached: float = 1.0
    """No client waits for the run."""
    spares: tuple[int, ...] = (0,)
    """As many processes wait on each host to become a rank; one of these numbers holds for a world."""
    engine_s: Span = (1.0, 30.0)
    """The engine says so long after a host was lost that it is."""
    cut_s: Span = (5.0, 120.0)
    """A host cannot be reached for so long."""
    per_hour: dict[str, float] = field(default_factory=dict[str, float])
    """How often this happens to a host: `power`, `cut`, `one-way`, `rank`, `agent`."""


HARSH = Faults(
    letter_lost=0.1,
    letter_twice=0.25,
    latency_s=(0.0, 0.5),
    fork_s=(0.01, 1.0),
    fork_refused=0.04,
    exit_unseen=0.1,
    evidence_lost=0.2,
    store_refused=0.02,
    store_dies=0.2,
    zygote_dies=(0.0, 0.3),
    zygote_late=0.1,
    stubborn=0.2,
    ends=0.5,
    fails=0.3,
    device_fails=0.2,
    log_shortened=0.02,
    managed=0.3,
    grouped=0.3,
    programs=0.3,
    detached=0.5,
    spares=(0, 0, 2),
    engine_s=(0.1, 5.0),
    cut_s=(1.0, 30.0),
)
"""Everything goes wrong, all the time: for small worlds that live a minute."""

LLAMA3_HOST_HOURS = 54 * 24 * 16384 / 8
LLAMA3 = Faults(
    letter_twice=0.001,
    exit_unseen=0.01,
    evidence_lost=0.01,
    per_hour={
        cause: count / LLAMA3_HOST_HOURS
        for cause, count in {"rank": 148 + 54 + 7 + 6 + 6, "power": 72 + 32 + 19 + 17 + 16, "cut": 35 + 7}.items()
    },
)
"""The 419 unexpected interruptions of 54 days on 16,384 GPUs in hosts of eight, by what a supervisor sees of them:

ranks that fail (GPUs, software, watchdogs, silent corruption, heat), hosts that are lost (memory, maintenance,
processors, other parts), hosts that cannot be reached (switches, cables, network cards).
"""

CALM = Faults()
PROFILES = {"calm": CALM, "llama3": LLAMA3, "harsh": HARSH}
