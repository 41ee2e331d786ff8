"""The agent log: what is written is known again, and a run that cannot be replayed is given up alone."""

from pathlib import Path

from control.processes import a_launch

from argosy.control.host_events import ChildForked
from argosy.control.messages import Started
from argosy.control.node import Decided, ForHost, ForRun, Launched, NodeState
from argosy.control.run_events import FromHost, Recovered
from argosy.core import ProcessId, RankId
from argosy.supervise.agent.agent_log import AgentLog, recall
from argosy.supervise.agent.decisions import Decisions


def launched(name: str) -> Decided:
    return Decided(Launched(run=name, number=1, launch=a_launch(kind="program"), hosts=["here"]), 1.0)


def test_a_log_that_begins_anew_knows_what_the_old_one_knew(tmp_path: Path) -> None:
    log = AgentLog(tmp_path)
    log.append([launched("one")])
    before, _ = recall(tmp_path)
    before.name = "here"
    log.restart(before)
    log.append([launched("two")])
    state, _ = recall(tmp_path)
    assert list(state.runs) == ["one", "two"]
    assert state.runs["one"] == before.runs["one"]


def test_a_host_that_is_renamed_keeps_its_runs(tmp_path: Path) -> None:
    first = Decisions(tmp_path, lambda effect: None, name="here")
    first.feed(launched("one").event)
    first.settle()
    second = Decisions(tmp_path, lambda effect: None, name="renamed")
    assert second.state == first.state
    assert list(second.state.host.runs) == ["one"]


def test_an_event_that_cannot_be_replayed_spoils_its_own_run_only(tmp_path: Path) -> None:
    log = AgentLog(tmp_path)
    log.restart(NodeState("here"))
    log.append([launched("good"), launched("bad")])
    log.append(
        [Decided(ForRun("bad", FromHost("here", Started(RankId("main", 77, 0), 4))), 2.0)]
    )  # There is no rank 77.
    log.append([Decided(ForRun("bad", Recovered()), 3.0)])
    log.append([Decided(ForHost(ChildForked("good", RankId("main", 0, 0), ProcessId(4, 4))), 2.0)])
    state, _ = recall(tmp_path)
    assert not state.runs["good"].ended
    bad = state.runs["bad"]
    assert bad.outcome is not None
    assert (bad.ended, bad.outcome[0]) == (True, 1)
    assert "the agent cannot carry it on: ForRun: IndexError" in bad.outcome[1]
    assert state.host.runs["bad"].removing
