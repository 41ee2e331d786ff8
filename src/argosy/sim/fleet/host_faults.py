"""How hosts of a simulated world are lost or cut off, and how the head hears of it."""

from functools import partial

from control.processes import RUN, lose_power
from control.world import Agent, World

from argosy.control.node import ForRun
from argosy.control.run_events import HostGone, HostSilent


def lose_host(world: World, name: str, *, power: bool) -> None:
    """A host loses its power, which its engine tells; or it is cut off for a while, which is seen as silence."""
    lost = world.agents[name]
    if power:
        lose_power(lost)
        world.after(world.random.uniform(0.1, 5), partial(_tell_head, world, HostGone(name, "no power")))
    else:
        lost.cut = True
        world.after(2.0, partial(_tell_head, world, HostSilent(name)))
        world.after(world.random.uniform(1, 30), partial(_connect, lost))


def _connect(agent: Agent) -> None:
    agent.cut = False


def _tell_head(world: World, event: HostGone | HostSilent) -> None:
    """Who watches hosts tells each new agent of the head what it does not know."""
    state = world.head.state.runs.get(RUN)
    if not world.finished and (state is None or event.host not in state.lost):
        world.head.feed(ForRun(RUN, event))
        if isinstance(event, HostGone) or world.agents[event.host].cut:
            world.after(1.0, partial(_tell_head, world, event))
