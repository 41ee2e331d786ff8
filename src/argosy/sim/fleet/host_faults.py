"""What happens to hosts of a simulated run, and how the head hears of it: through the engine, or as silence."""

from functools import partial

from argosy.control import ForRun, HostGone, HostSilence, HostSilent
from argosy.core import WaitStatus
from argosy.sim.fleet.run_invariants import RETURNED_S
from argosy.sim.fleet.sim_agent import SimAgent
from argosy.sim.fleet.sim_process import RUN
from argosy.sim.fleet.sim_run import SimRun

BEAT_S = 0.5
"""So often a host says that it is there. Only beats that do not come are simulated."""
FAILURES = (WaitStatus(code=1), WaitStatus(signal=9), WaitStatus(signal=11))


def strike(run: SimRun, kind: str, name: str) -> None:
    """Let something of a kind happen to a host now; a host that is gone is not struck again."""
    agent = run.agents[name]
    if agent.gone or run.finished:
        return
    match kind:
        case "power":
            agent.lose_power()
            run.world.after(run.world.within(run.world.faults.engine_s), partial(_tell_engines_word, run, name))
            _miss_beats(run, agent)
        case "cut" | "one-way":
            agent.hears, agent.heard = kind == "one-way", False
            run.world.after(run.world.within(run.world.faults.cut_s), partial(_connect, run, agent))
            _miss_beats(run, agent)
        case "rank":
            living = [each for each in agent.processes if each.status is None]
            if living:
                agent.end_later(run.world.random.choice(living), 0.0, run.world.random.choice(FAILURES))
        case "agent":
            if agent.up:
                agent.die()
        case _:
            raise AssertionError(kind)


def _connect(run: SimRun, agent: SimAgent) -> None:
    agent.hears = agent.heard = True
    agent.reached_at = run.world.now
    run.world.after(RETURNED_S, lambda: run.invariants.check_returned(run.state, agent))


def _tell_engines_word(run: SimRun, name: str) -> None:
    """Tell each new agent of the head what it does not know."""
    state = run.state
    if not run.finished and (state is None or name not in state.lost):
        run.head.feed(ForRun(RUN, HostGone(name, "no power")))
        run.world.after(1.0, partial(_tell_engines_word, run, name))


def _miss_beats(run: SimRun, agent: SimAgent) -> None:
    """The head hears nothing, beat after beat, until the host is back or out of the run."""
    silence = HostSilence()
    silence.join()

    def miss() -> None:
        state = run.state
        if run.finished or (agent.heard and not agent.gone) or (state is not None and agent.name in state.lost):
            return
        if run.head.up and isinstance(word := silence.wait(BEAT_S, agent.name), HostSilent):
            run.head.feed(ForRun(RUN, word))
        run.world.after(BEAT_S, miss)

    run.world.after(BEAT_S, miss)
