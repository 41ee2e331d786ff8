"""What an agent answers when somebody looks at its runs."""

import os
from collections.abc import Iterable

from argosy.fabric import Link
from argosy.process.evidence.frames import group_stacks, place, stacks_text
from argosy.process.evidence.stacks import take
from argosy.process.host.messages import (
    DaemonInfo,
    Environment,
    GetEnvironment,
    Refused,
    Runs,
    Stacks,
    StackText,
    TakeStacks,
    ToAgent,
)
from argosy.process.host.pool import Pool
from argosy.process.host.running import Running
from argosy.control.launch import rank_defaults

STACKS_S = 10.0


def answer_list(runs: Iterable[Running], pool: Pool, warden_pid: int) -> Runs:
    """The living runs and what lingers."""
    daemons = [DaemonInfo("warden", warden_pid), DaemonInfo("agent", os.getpid())]
    daemons += [DaemonInfo("zygote", zygote.pid) for zygote in pool.zygotes.values() if zygote.pid]
    return Runs([run.info() for run in runs], daemons)


def answer_stacks(link: Link[ToAgent], run: Running, message: TakeStacks) -> None:
    """Take the stacks of some ranks; equal ones are grouped."""
    targets = run.inquest.targets(message.ranks)
    native = [targets[0].index] if message.native and targets else []
    stacks = take(targets, STACKS_S, native=native)
    groups = [
        StackText(list(ranks), stacks_text({ranks[0]: stack}), place(stack)) for ranks, stack in group_stacks(stacks)
    ]
    missing = [index for index in message.ranks if index not in stacks]
    link.send(Stacks(groups, [f"rank {index} is not alive" for index in missing]))


def answer_environment(link: Link[ToAgent], run: Running, message: GetEnvironment) -> None:
    """Hand over the environment of a rank, sealed as it is."""
    if not 0 <= message.rank < run.launch.size:
        link.send(Refused(f"no such rank: {message.rank}", f"this run has ranks 0-{run.launch.size - 1}"))
        return
    spec = run.spec(run.state.rank(message.rank))
    link.send(Environment({**spec.variables}, rank_defaults(run.launch), run.launch.cwd), [run.sealed])
