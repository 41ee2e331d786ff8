"""A run that cannot be replayed is given up alone."""

from pathlib import Path

from argosy.control.launch import Launch
from argosy.control.restart import Restart
from argosy.core import RankId, WaitStatus
from argosy.supervise.agent import root
from argosy.supervise.agent.agent_log import AgentLog, Fed, Launched, recall


def test_an_event_that_cannot_be_replayed_spoils_its_own_run_only(tmp_path: Path) -> None:
    log = AgentLog(tmp_path)
    launch = Launch(
        name="one",
        directory=str(tmp_path),
        argv=["true"],
        kind="program",
        target="true",
        args=[],
        python=[],
        dims={"ranks": 1},
        cwd="/",
        umask=0o22,
        restart=Restart.never(),
    )
    for run in ("good", "bad"):
        log.append(Launched(run, 1, launch, 0.0))
        log.append(Fed(run, root.Begin(), 1.0))
    log.append(Fed("bad", root.Started(RankId("main", 77, 0), 4), 2.0))  # There is no rank 77.
    log.append(Fed("bad", root.Exited(RankId("main", 0, 0), WaitStatus(code=0)), 3.0))
    log.append(Fed("good", root.Started(RankId("main", 0, 0), 4), 2.0))
    runs = recall(tmp_path)
    assert runs["good"].trouble == ""
    assert runs["good"].state.slots[0].pid == 4
    assert "Started: IndexError" in runs["bad"].trouble
    assert runs["bad"].state.slots[0].starting
