"""Who failed first, and what is written down before anything is killed."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from warm import warm

from argosy.core import RankId, WaitStatus
from argosy.supervise.evidence.frames import Frame, Stack, Thread
from argosy.supervise.evidence.incident import (
    Exit,
    Incident,
    crash_incident,
    first_failure,
    is_follower,
    read_incidents,
    write_incident,
)
from argosy.supervise.evidence.log_excerpt import log_tail
from argosy.supervise.evidence.proc_sample import read_proc
from argosy.supervise.evidence.stacks import Target, take

SOURCE = str(Path(__file__).parents[2] / "src")
HEAD = 'Traceback (most recent call last):\n  File "t.py", line 3, in <module>\n    step()\n'
GLOO = HEAD + "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:40301\n"
OWN = "step 7\n" + HEAD + "ValueError: bad batch\n"


def ended(index: int, log: str = "", *, code: int | None = 1, **more: object) -> Exit:
    exit = Exit(rank=RankId("main", index), status=WaitStatus(code=code), at=5.0 + index, log_tail=log)
    return msgspec.structs.replace(exit, **more)


def killed(index: int, number: int, **more: object) -> Exit:
    return msgspec.structs.replace(ended(index), status=WaitStatus(signal=number), **more)


def test_the_reaper_s_order_decides():
    failure = first_failure([ended(2, OWN), ended(0, OWN)])
    assert failure is not None
    assert failure.first.rank.index == 2
    assert failure.cause == "ValueError: bad batch (exit code 1)"
    assert [exit.rank.index for exit in failure.others] == [0]


def test_a_lost_connection_yields_to_a_reason_of_its_own():
    failure = first_failure([ended(0, GLOO), ended(3, GLOO), ended(1, OWN), killed(2, signal.SIGTERM, asked=True)])
    assert failure is not None
    assert failure.first.rank.index == 1
    assert sorted(exit.rank.index for exit in failure.followers) == [0, 2, 3]


def test_a_culprit_that_was_told_to_stop_while_it_died_is_still_the_culprit():
    failure = first_failure([ended(0, GLOO), ended(1, OWN, asked=True)])
    assert failure is not None
    assert failure.first.rank.index == 1


def test_among_followers_only_the_first_counts():
    failure = first_failure([ended(3, GLOO), ended(0, GLOO)])
    assert failure is not None
    assert failure.first.rank.index == 3


def test_a_kill_is_nobody_s_follower_but_an_abort_of_the_watchdog_is():
    assert not is_follower(killed(0, signal.SIGKILL, log_tail=GLOO))
    assert is_follower(killed(0, signal.SIGABRT, log_tail="Watchdog caught collective operation timeout\n"))
    assert not is_follower(killed(0, signal.SIGABRT, log_tail="assertion failed: x > 0\n"))


def test_ends_on_request_and_successes_are_no_failures():
    assert first_failure([ended(0, code=0), killed(1, signal.SIGTERM, asked=True)]) is None


def test_memory_is_named_as_the_cause():
    failure = first_failure([killed(0, signal.SIGKILL, oom="the memory cgroup /x counted an oom kill")])
    assert failure is not None
    assert failure.cause == ("killed by SIGKILL: out of memory: the memory cgroup /x counted an oom kill")


def test_an_incident_keeps_the_log_without_its_traceback():
    log = "".join(f"step {n}\n" for n in range(50)) + "[rank1]: " + OWN.partition("\n")[2].replace("\n", "\n[rank1]: ")
    failure = first_failure([ended(1, log), ended(0, GLOO)])
    assert failure is not None
    incident = crash_incident(failure, {}, host="h", launch=2)
    assert incident.log_tails[1][-1] == "step 49"
    assert incident.exception.endswith("ValueError: bad batch")
    assert incident.followers == [0]
    assert incident.headline == "rank 1 failed: ValueError: bad batch (exit code 1)"


def test_incidents_are_read_back_in_order_and_half_written_ones_are_not(tmp_path: Path):
    stack = Stack("faulthandler", (Thread("MainThread", (Frame("a.py", 3, "f"),), True),))
    for at in (9.0, 2.0):
        failure = first_failure([ended(0, OWN, at=at)])
        assert failure is not None
        write_incident(tmp_path / "incidents", crash_incident(failure, {1: stack}, host="h", launch=0), {1: stack})
    half = tmp_path / "incidents" / "5-crash"
    half.mkdir()
    (half / "stacks.txt").write_text("rank 1\n")
    (tmp_path / "incidents" / "7-crash").mkdir()
    (tmp_path / "incidents" / "7-crash" / "incident.json").write_text("{")
    found = read_incidents(tmp_path)
    assert [incident.at for incident in found] == [2.0, 9.0]
    assert found[0].stacks[0].frames == [Frame("a.py", 3, "f")]
    assert "a.py:3 in f" in (tmp_path / "incidents" / found[0].id / "stacks.txt").read_text()


def test_a_directory_that_cannot_be_written_is_an_os_error(tmp_path: Path):
    (tmp_path / "incidents").write_text("a file")
    incident = Incident(id="1", at=1.0, kind="stop", host="h", launch=0, headline="x")
    with pytest.raises(OSError, match="incidents"):
        write_incident(tmp_path / "incidents", incident, {})


STUCK = """
import sys, time
from argosy.supervise.evidence.stacks import arm
arm(sys.argv[1])
def hold():
    print("ready", flush=True); time.sleep(600)
hold()
"""


def test_evidence_is_on_disk_before_the_survivors_are_killed(tmp_path: Path):
    script = tmp_path / "stuck.py"
    script.write_text(STUCK)
    secret = "s3cret-of-the-environment"
    environment = {**os.environ, "PYTHONPATH": SOURCE, "TOKEN": secret}
    log = tmp_path / "1.err"
    with open(log, "wb") as err:
        code = subprocess.call([sys.executable, "-c", "raise ValueError('bad batch')"], stderr=err, env=environment)
    survivors = [
        subprocess.Popen([sys.executable, script, tmp_path / f"{i}"], stdout=subprocess.PIPE, env=environment)
        for i in range(2)
    ]
    try:
        for process in survivors:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
        samples = [read_proc(process.pid) for process in survivors]
        targets = [
            Target(i, p.pid, s.start, str(tmp_path / f"{i}"))
            for i, (p, s) in enumerate(zip(survivors, samples, strict=True))
            if s is not None
        ]
        failure = first_failure([ended(2, log_tail(log), code=code)])
        assert failure is not None
        stacks = take(targets)
        written = write_incident(tmp_path / "incidents", crash_incident(failure, stacks, host="h", launch=0), stacks)
        assert [process.poll() for process in survivors] == [None, None]
    finally:
        for process in survivors:
            process.kill()
            process.wait()
            assert process.stdout is not None
            process.stdout.close()
    (incident,) = read_incidents(tmp_path)
    assert incident.exception.endswith("ValueError: bad batch")
    assert [(group.ranks, group.frames[0].function) for group in incident.stacks] == [([0, 1], "hold")]
    assert all(secret not in path.read_text() for path in written.iterdir())


PEER = """
import sys, torch, torch.distributed as dist
rank = int(sys.argv[1])
dist.init_process_group("gloo", rank=rank, world_size=2, init_method=sys.argv[2])
dist.all_reduce(torch.ones(1))
if rank == 1:
    raise ValueError("bad batch")
dist.all_reduce(torch.ones(1))
"""


def test_the_error_of_a_real_gloo_peer_is_a_follower(tmp_path: Path):
    pytest.importorskip("torch")
    script = tmp_path / "peer.py"
    script.write_text(PEER)
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    arguments = [*warm(), str(script)]
    peers = [
        subprocess.Popen(
            [*arguments, str(rank), f"file://{tmp_path}/store"],
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in range(2)
    ]
    try:
        logs = [process.communicate(timeout=300)[1] for process in peers]
    finally:
        for process in peers:
            process.kill()
            process.wait()
    failure = first_failure([ended(0, logs[0]), ended(1, logs[1])])
    assert failure is not None
    assert (failure.first.rank.index, failure.cause) == (1, "ValueError: bad batch (exit code 1)")
    assert [exit.rank.index for exit in failure.followers] == [0], logs[0]
