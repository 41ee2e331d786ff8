"""Copies of a live state: what a rank returns to, and what it takes over from another one."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import msgspec
import torch

from argosy.transfer.units import Member, State, Unit


def copy_of(state: State) -> State:
    """The same in memory of its own: later changes of the live state do not change it."""
    return State(state.rank, state.size, {name: _copied(unit) for name, unit in state.units.items()}, state.values)


def _copied(unit: Unit) -> Unit:
    members = {key: _cloned(member) for key, member in unit.members.items()}
    return Unit(unit.name, members, unit.options, unit.aliases)


def _cloned(member: Member) -> Member:
    return member if member.local is None else msgspec.structs.replace(member, local=member.local.clone())


def take_over(live: State, copy: State) -> None:
    """Write a copy into the tensors that are there, as far as it has some, and drop what it says is absent (U2).

    Whoever holds the live tensors, such as DDP or a compiled graph, continues with them.

    Raises:
        ConfigError: it is the state of something else.
    """
    assert live.adopt is not None
    adoption, held = live.adopt(copy), copy.tensors()
    with torch.no_grad():
        for name, target in adoption.targets.items():
            if target.local is not None and name in held:
                target.local.copy_(held[name].reshape(target.local.shape))
    adoption.commit()
