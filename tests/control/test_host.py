"""One host's decisions: who is started, signalled and killed."""

from control.processes import RUN, a_launch

from argosy.control import host
from argosy.control.host_events import ChildForked, ForkRanks, HostEffect, HostEvent, KillTree, Ordered, SendSignal
from argosy.control.host_state import HostState
from argosy.control.messages import AcceptRun, KillRanks, SignalRanks, StartRanks
from argosy.core import ProcessId, RankId

FIRST = RankId("main", 0, 0)
PROCESS = ProcessId(100, 100)


def react(state: HostState, event: HostEvent) -> list[HostEffect]:
    return host.react(state, event, 1.0)[1]


def asked(*ranks: RankId) -> HostState:
    """A host that was told to start these ranks; their processes are not known yet."""
    state = HostState()
    react(state, Ordered(RUN, AcceptRun(1, a_launch(kind="program", dims={"rank": 2}))))
    assert react(state, Ordered(RUN, StartRanks(1, ranks, 29500))) == [ForkRanks("", RUN, ranks, 29500, 1)]
    return state


def test_h2_a_process_that_nobody_ordered_is_killed():
    state, stranger = asked(FIRST), RankId("main", 1, 0)
    assert react(state, ChildForked(RUN, stranger, PROCESS)) == [KillTree(RUN, stranger)]


def test_h2_a_process_of_an_older_generation_is_killed():
    state = asked(RankId("main", 0, 1))
    assert react(state, ChildForked(RUN, FIRST, PROCESS)) == [KillTree(RUN, FIRST)]


def test_h4_a_signal_to_a_rank_that_does_not_exist_yet_is_sent_once_it_does():
    state = asked(FIRST)
    assert react(state, Ordered(RUN, SignalRanks((FIRST,), 15))) == []
    assert SendSignal(RUN, FIRST, 15) in react(state, ChildForked(RUN, FIRST, PROCESS))
    assert react(state, ChildForked(RUN, FIRST, PROCESS)) == []


def test_a_rank_that_is_killed_before_it_exists_is_killed_when_it_does():
    state = asked(FIRST)
    assert react(state, Ordered(RUN, KillRanks((FIRST,)))) == [KillTree(RUN, FIRST)]
    assert KillTree(RUN, FIRST) in react(state, ChildForked(RUN, FIRST, PROCESS))


def test_an_order_starts_its_ranks_alone():
    state, second = asked(FIRST), RankId("main", 1, 0)
    assert react(state, Ordered(RUN, StartRanks(2, (second,), 29500))) == [ForkRanks("", RUN, (second,), 29500, 2)]
