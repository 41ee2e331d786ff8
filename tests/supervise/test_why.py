"""One screen that explains a run."""

import json
import re
import signal

import msgspec
import pytest

from argosy.control.facts import (
    AnyFact,
    GaveUp,
    HangEnded,
    HangSeen,
    IncidentTaken,
    LaunchEnded,
    LaunchStarted,
    RankExited,
    RankPaused,
    Restarting,
    StopAsked,
)
from argosy.core import RankId, WaitStatus
from argosy.supervise.evidence.frames import Frame
from argosy.supervise.evidence.incident import Incident, StackGroup
from argosy.supervise.evidence.why import Report, RunView, explain, own_frames, sections

ARGV = ["argosy", "run", "-d", "-n", "4", "--name", "night", "train.py", "--note", "two words"]
RUN = RunView(
    name="night",
    directory="runs/night",
    argv=ARGV,
    state="ended",
    code=1,
    resumes=True,
    size=4,
    started_at=0.0,
    now=30_000.0,
)
REDUCE = Frame("/v/lib/python3.11/site-packages/torch/distributed/c10d.py", 3035, "all_reduce")


def render(report: Report) -> str:
    """The screen, with every cell on the line of its row."""
    lines = [line for part in sections(report) for line in (part.title, *("  ".join(row) for row in part.rows)) if line]
    return "\n".join(lines) + "\n"


def crash(index: int, at: float, cause: str, **more: object) -> Incident:
    incident = Incident(
        id=f"{int(at)}-crash",
        at=at,
        kind="crash",
        host="node7",
        launch=0,
        headline=f"rank {index} failed: {cause}",
        first=RankId("main", index),
        cause=cause,
    )
    return msgspec.structs.replace(incident, **more)


def exited(index: int, at: float, **status: int) -> RankExited:
    return RankExited(at=at, rank=RankId("main", index), pid=9, status=WaitStatus(**status))


NIGHT: list[AnyFact] = [
    LaunchStarted(at=0.0, launch=0, argv=ARGV, size=4, host="node7"),
    exited(2, 8000.0, signal=signal.SIGKILL),
    exited(0, 8000.1, code=1),
    Restarting(at=8000.5, ranks=[0, 1, 2, 3], generation=1, cause="killed by SIGKILL"),
    exited(3, 20_000.0, code=1),
    exited(1, 20_000.1, code=1),
    IncidentTaken(at=20_000.3, incident="20000-crash", headline="rank 1 failed: ValueError: bad batch (exit code 1)"),
    GaveUp(at=20_001.0, reason="1 of 1 restarts used"),
    LaunchEnded(at=20_002.0, launch=0, code=1, reason="rank 3: exit code 1"),
]
KILL = crash(2, 8000.2, "killed by SIGKILL")
RAISE = crash(
    1,
    20_000.1,
    "ValueError: bad batch (exit code 1)",
    exception='Traceback (most recent call last):\n  File "train.py", line 9, in f\nValueError: bad batch',
    log_tails={1: [f"step {n} loss 2.0" for n in range(20)]},
    stacks=[StackGroup([0, 2, 3], "faulthandler", [REDUCE, Frame("/project/train.py", 77, "step")])],
    followers=[0, 3],
)


def test_the_morning_after():
    report = explain(RUN, NIGHT, [KILL, RAISE])
    text = render(report)
    assert report.verdict == "crash"
    assert text.startswith("night: failed after 5 h 33 min (exit code 1): 4 ranks, 1 restart\n")
    for said in (
        "rank 1 failed: ValueError: bad batch (exit code 1) on node7",
        '  File "train.py", line 9, in f',
        "ranks 0,3 failed after it",
        "step 19 loss 2.0",
        "ranks 0,2-3  train.py:77 in step (all_reduce)",
        "rank 2 failed: killed by SIGKILL",
        "ranks 0-3 restarted (generation 1)",
        "not restarted: 1 of 1 restarts used",
        "resume  argosy run -d -n 4 --name night train.py --note 'two words'",
        "logs  argosy logs night --rank 1",
        "stacks  less runs/night/incidents/20000-crash/stacks.txt",
    ):
        assert said in text, said
    assert text.count("Traceback") == 1
    assert "rank 3 failed" not in text, "it was reaped first, but is a follower"
    assert re.search(r"\d\d:\d\d:\d\d +rank 1 failed", text)


def test_an_end_for_another_reason_than_a_failed_rank_is_said():
    text = render(explain(RUN, NIGHT, []))
    assert "ended with exit code 1\n" in text
    lost = [*NIGHT[:-1], LaunchEnded(at=20_002.0, launch=0, code=1, reason="the run's environment was lost")]
    assert "ended with exit code 1: the run's environment was lost\n" in render(explain(RUN, lost, []))


def test_whatever_happened_fits_one_screen():
    long = msgspec.structs.replace(
        RAISE,
        exception="\n".join(f"line {n} " + "x" * 300 for n in range(200)),
        stacks=[StackGroup([n], "py-spy", [Frame(f"/p/f{n}.py", n + 1, "f")]) for n in range(64)],
        notes=[f"note {n}" for n in range(9)],
    )
    facts = [*NIGHT[:1], *(e for _ in range(50) for e in NIGHT[1:4]), *NIGHT[4:]]
    shown = sections(explain(msgspec.structs.replace(RUN, durable_step=1200), facts, [long]))
    assert sum(bool(part.title) + len(part.rows) + 1 for part in shown) <= 40
    assert [row[0] for row in shown[-1].rows] == ["saved", "resume", "logs", "stacks"]
    assert all(len({len(row) for row in part.rows}) <= 1 for part in shown)


def test_a_healthy_run_is_said_to_be_well():
    run = msgspec.structs.replace(RUN, state="running", code=None, steps=(118, 120), now=65.0)
    report = explain(run, NIGHT[:1], [])
    assert report.verdict == "healthy"
    text = render(report)
    assert text.startswith("night: running: 4 ranks, steps 118-120, 1 min 5 s\n")
    assert "resume" not in text
    assert "argosy stacks night" in text


def test_a_run_without_visible_steps_is_not_said_to_be_healthy():
    report = explain(msgspec.structs.replace(RUN, state="running", code=None, now=65.0), NIGHT[:1], [])
    assert (report.verdict, report.summary) == ("running", "running: 4 ranks, no steps seen, 1 min 5 s")


def test_a_run_with_a_stopped_rank_is_not_said_to_be_well():
    run = msgspec.structs.replace(RUN, state="running", code=None, now=65.0, steps=(9, 9))
    paused = RankPaused(at=9.0, rank=RankId("main", 2), signal=19)
    assert explain(run, [NIGHT[0], paused], []).summary.startswith("running, rank 2 stopped by a signal: 4 ranks")
    goes_on = msgspec.structs.replace(paused, resumed=True)
    assert explain(run, [NIGHT[0], paused, goes_on], []).summary.startswith("running: 4 ranks")


def test_what_a_restart_has_healed_is_history():
    run = msgspec.structs.replace(RUN, state="running", code=None, steps=(9, 9), now=9000.0)
    report = explain(run, NIGHT[:4], [KILL])
    assert (report.verdict, report.headline) == ("healthy", "")
    assert "rank 2 failed: killed by SIGKILL" in render(report)


def test_a_hang_of_a_running_run_leads():
    line = "ranks 0-2 wait in all_reduce #12; rank 3 at data.py:41"
    incident = crash(3, 50.0, "elsewhere", kind="hang", headline=line, notes=["rank 3: data.py:41 in load"])
    run = msgspec.structs.replace(RUN, state="running", code=None, steps=(11, 12), now=90.0)
    report = explain(run, [NIGHT[0], HangSeen(at=50.0, summary=line)], [incident])
    assert report.verdict == "hang"
    text = render(report)
    assert text.startswith("night: hung: 4 ranks, steps 11-12")
    assert line in text
    assert "rank 3: data.py:41 in load" in text
    assert "stop  argosy stop night" in text


def test_a_hang_that_was_stopped_is_called_one_and_says_by_whom():
    line = "rank 3 hangs at its exit at threading.py:1590"
    incident = crash(3, 50.0, "ending", kind="hang", headline=line)
    facts = [
        NIGHT[0],
        *(exited(index, 20.0, code=0) for index in range(3)),
        HangSeen(at=50.0, summary=line),
        StopAsked(at=60.0, by="SIGTERM to `argosy run` (pid 7)", signal=15),
        LaunchEnded(at=61.0, launch=0, code=143, reason="stopped by SIGTERM to `argosy run` (pid 7)"),
    ]
    text = render(explain(msgspec.structs.replace(RUN, code=143), facts, [incident]))
    how = "stopped by SIGTERM to `argosy run` (pid 7) after 1 min 1 s (exit code 143): 4 ranks"
    assert " ".join(text.split()).startswith(f"night: hung, then {how}")
    assert f"hang: {line}" in text
    assert "ranks 0-2 ended with exit code 0" in text
    assert "stop requested by SIGTERM to `argosy run` (pid 7)" in text


def test_a_hang_that_ended_is_history():
    line = "rank 3 is stopped (SIGSTOP); ranks 0-2 wait for it in all_reduce #12"
    incident = crash(3, 50.0, "stopped", kind="hang", headline=line, recovered_after_s=35.2)
    facts = [NIGHT[0], HangSeen(at=50.0, summary=line), HangEnded(at=55.0, incident=incident.id, lasted_s=35.2)]
    report = explain(msgspec.structs.replace(RUN, state="running", code=None, now=90.0), facts, [incident])
    assert (report.verdict, report.headline) == ("running", "")
    assert "hung for 35 s, then resumed" in render(report)
    stopped = [
        *facts,
        StopAsked(at=60.0, by="ctrl-c", signal=2),
        LaunchEnded(at=61.0, launch=0, code=130, reason="stopped by ctrl-c"),
    ]
    assert explain(msgspec.structs.replace(RUN, code=130), stopped, [incident]).verdict == "stopped"


def test_a_living_hang_suggests_native_stacks():
    incident = crash(3, 50.0, "elsewhere", kind="hang", headline="rank 3 at data.py:41")
    run = msgspec.structs.replace(RUN, state="running", code=None, now=90.0)
    assert "argosy stacks --native night" in render(explain(run, NIGHT[:1], [incident]))


def test_without_an_incident_the_facts_must_do():
    report = explain(RUN, NIGHT, [])
    assert report.verdict == "failed"
    assert report.headline == "rank 3 failed: exit code 1"
    assert report.host == "node7"


def test_a_stop_on_request_is_no_failure():
    facts = [
        NIGHT[0],
        StopAsked(at=5.0, by="ctrl-c", signal=2),
        LaunchEnded(at=6.0, launch=0, code=130, reason=""),
    ]
    report = explain(msgspec.structs.replace(RUN, code=130), facts, [])
    assert report.verdict == "stopped"
    assert render(report).startswith("night: stopped by ctrl-c after 6 s (exit code 130): 4 ranks\n")


def test_a_failure_that_a_restart_has_healed_does_not_explain_a_later_stop():
    facts = [
        *NIGHT[:4],
        StopAsked(at=9000.0, by="argosy stop", signal=15),
        LaunchEnded(at=9001.0, launch=0, code=143, reason="stopped by argosy stop"),
    ]
    report = explain(msgspec.structs.replace(RUN, code=143), facts, [KILL])
    assert (report.verdict, report.headline) == ("stopped", "")
    assert "rank 2 failed: killed by SIGKILL" in render(report)


def test_ranks_that_are_killed_after_a_stop_are_named():
    facts = [
        NIGHT[0],
        StopAsked(at=5.0, by="ctrl-c", signal=2),
        *(msgspec.structs.replace(exited(index, 5.1, signal=signal.SIGKILL), asked=True) for index in (1, 2)),
        msgspec.structs.replace(exited(3, 5.2, signal=signal.SIGTERM), asked=True),
        StopAsked(at=5.5, by="ctrl-c", signal=2),
        LaunchEnded(at=6.0, launch=0, code=130, reason="stopped by ctrl-c"),
    ]
    text = render(explain(msgspec.structs.replace(RUN, code=130), facts, []))
    assert text.count("ranks 1-2 killed by SIGKILL") == 1
    assert "rank 3" not in text


def test_a_stack_without_a_line_of_the_script_is_said_to_be_outside_of_it():
    stacks = [StackGroup([0, 3], "py-spy", [Frame("<internal>", 7, "cleanup")])]
    text = render(explain(RUN, NIGHT, [msgspec.structs.replace(RAISE, stacks=stacks)]))
    assert "ranks 0,3  outside the script: <internal>:7 in cleanup\n" in text


def test_a_finished_run_is_done():
    run = msgspec.structs.replace(RUN, code=0)
    facts = [*NIGHT[:4], LaunchEnded(at=9000.0, launch=0, code=0, reason="")]
    report = explain(run, facts, [KILL])
    assert (report.verdict, report.headline) == ("done", "")
    assert "resume" not in report.commands


def test_only_a_run_that_can_resume_is_said_to():
    plain = msgspec.structs.replace(RUN, resumes=False)
    commands = explain(plain, NIGHT, []).commands
    assert "resume" not in commands
    assert commands["rerun"].startswith("argosy run -d -n 4")


def test_resuming_names_the_directory_where_the_command_does_not():
    run = msgspec.structs.replace(
        RUN, named=False, directory="/w/runs/train-1", cwd="/w", argv=["argosy", "run", "t.py"]
    )
    assert explain(run, NIGHT, []).commands["resume"] == "argosy run --dir runs/train-1 t.py"


def test_an_older_launch_does_not_explain_a_newer_one():
    facts = [*NIGHT, LaunchStarted(at=25_000.0, launch=1, argv=ARGV, size=4, host="node7")]
    run = msgspec.structs.replace(RUN, state="running", code=None, steps=(3, 3), now=25_060.0)
    report = explain(run, facts, [KILL, RAISE])
    assert report.verdict == "healthy"
    assert report.summary == "running: 4 ranks, step 3, 1 min 0 s"


@pytest.mark.parametrize("facts", [[], NIGHT[:1]])
def test_little_is_known_and_still_something_is_said(facts: list[AnyFact]):
    report = explain(RUN, facts, [])
    assert render(report).startswith("night: failed after")
    assert json.loads(msgspec.json.encode(report))["commands"]["resume"].startswith("argosy run")


def test_a_traceback_keeps_the_users_frames_and_drops_those_of_packages():
    lines = [
        "Traceback (most recent call last):",
        '  File "/home/me/deep.py", line 4, in train',
        "    loss = model(x)",
        "           ^^^^^^^^",
        '  File "/venv/lib/python3.11/site-packages/torch/nn/modules/module.py", line 1778, in _wrapped_call_impl',
        "    return self._call_impl(*args, **kwargs)",
        "           ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "RuntimeError: shapes cannot be multiplied",
    ]
    assert own_frames(lines) == [lines[0], lines[1], lines[2], lines[-1]]
