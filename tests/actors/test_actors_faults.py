"""Calls under faults: every one ends, none twice, none by an old generation, and nothing leaks."""

import asyncio
import gc
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from console import until
from hands import Awkward, Company, Irreparable, Reluctant, Twins, Worker
from meshes import gone, owner, until_gone

import argosy
from argosy import Cluster, ConfigError, DeadlinePassed, PeerLost, RemoteError, Restart
from argosy.actors.replies import Reply
from argosy.supervise.client.agent_client import list_runs

FOR_EVER = Restart(policy="rank", per_hour=100_000, startup_max=100_000)


@pytest.fixture(scope="module")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with owner(tmp_path_factory.mktemp("owner")) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def cluster(runtime: Path) -> Iterator[Cluster]:
    with argosy.local(show=False) as opened:
        yield opened


@pytest.fixture
def worker(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    yield mesh.spawn(Worker)[0]
    mesh.stop()


@pytest.fixture
def awkward(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    yield mesh.spawn(Awkward)[0]
    mesh.stop()


def kill_at_random(cluster: Cluster, kills: int, seed: int) -> None:
    """Kill the callee at any moment of a call; each call ends in its own result or in PeerLost."""
    chance = random.Random(seed)
    mesh = cluster.mesh(ranks=2, preload=[], restart=FOR_EVER)
    workers = mesh.spawn(Worker)
    for _ in range(kills):
        victim = chance.randrange(2)
        pid = workers[victim].options(deadline_s=60).pid().get()
        killer = threading.Timer(chance.choice([0.0, 0.0005, 0.002, 0.01]), os.kill, (pid, signal.SIGKILL))
        killer.start()
        calls = [(x, workers[victim].options(deadline_s=60).square(x)) for x in range(chance.choice([1, 30, 300]))]
        for x, call in calls:
            try:
                outcome = call.get()
            except PeerLost as lost:
                outcome = lost.cause
            assert outcome in (x * x, "killed by SIGKILL")
        killer.join()
        until(lambda pid=pid: gone(pid), "the end of the victim")
        assert workers[victim].options(deadline_s=60, retry=3).pid().get() != pid
    assert sum(workers.generation().gather()) == kills
    mesh.stop()


@pytest.mark.parametrize("collect", ["gather", "outcomes", "stream"])
def test_a_call_is_made_again_while_others_wait_for_its_rank(cluster: Cluster, tmp_path: Path, collect: str):
    mesh = cluster.mesh(ranks=2, preload=[], restart=FOR_EVER)
    replies = mesh.spawn(Company).options(retry=3, deadline_s=60).meet(str(tmp_path / "gate"))
    found = [reply.get() for reply in replies.stream()] if collect == "stream" else getattr(replies, collect)()
    assert sorted(found) == [0, 1]
    mesh.stop()


@pytest.mark.system
def test_kills_at_any_moment_of_a_call(cluster: Cluster):
    kill_at_random(cluster, 25, seed=1)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_thousand_kills(cluster: Cluster):
    kill_at_random(cluster, 1000, seed=2)


def test_a_rank_that_cannot_be_restored_is_given_up_though_others_go_on(cluster: Cluster):
    mesh = cluster.mesh(ranks=2, preload=[], restart=Restart(policy="rank", startup_max=1))
    workers = mesh.spawn(Irreparable)
    os.kill(workers.pid().gather()[0], signal.SIGKILL)
    assert "failures in a row before any progress" in mesh.events.wait("gave up").cause
    assert mesh.events.wait("ended").cause.startswith("rank 0: exit code 1")
    assert mesh.events.newest(0) == 2


def test_an_endpoint_that_blocks_for_ever_is_left_and_stopped(awkward):
    for name in ("block", "spin"):
        with pytest.raises(DeadlinePassed) as caught:
            getattr(awkward.options(deadline_s=0.3), name)().get()
        assert f".{name} for" in caught.value.hint
        assert awkward.options(deadline_s=60).ready().get()


def test_what_cannot_be_sent_back_is_told(awkward):
    with pytest.raises(RemoteError, match="odd indeed"):
        awkward.raise_unpicklable().get()
    with pytest.raises(ConfigError, match=r"inner'\]\[0\].*cannot pickle"):
        awkward.lock().get()
    with pytest.raises(ConfigError, match="returns a generator"):
        awkward.generate().get()
    assert awkward.ready().get()


@pytest.mark.parametrize(("method", "code"), [("leave", 3), ("leave_at_once", 4), ("leave_at_once", 0)])
def test_an_endpoint_that_exits_is_a_lost_peer(awkward, method: str, code: int):
    with pytest.raises(PeerLost, match=f"exit code {code}"):
        getattr(awkward, method)(code).get()
    if code:
        assert awkward.ready().get()
    else:
        with pytest.raises(PeerLost, match="exit code 0"):
            awkward.ready().get()


def test_an_endpoint_that_forks_answers_once(awkward):
    children = [awkward.fork().get() for _ in range(2)]
    assert all(children)
    assert awkward.ready().get()
    until_gone(*children)


def test_a_forked_child_does_not_hide_its_parents_death(awkward):
    with pytest.raises(PeerLost, match="SIGKILL"):
        awkward.options(deadline_s=60).fork_and_die().get()
    assert awkward.options(deadline_s=60).ready().get()


def test_replies_that_nobody_reads_stop_no_other_caller(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    actor = mesh.spawn(Awkward)[0]
    unread = [actor.flood(1 << 20) for _ in range(100)]
    program = f"import argosy; print(argosy.connect({mesh.name!r}).run(len, 'abc').gather())"
    other = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=300)
    assert other.stdout == "[3]\n", other.stderr
    assert all(len(reply.get()) == 1 << 20 for reply in unread)
    mesh.stop()


def test_a_full_pipeline_in_both_directions_does_not_lock_up(worker):
    calls = [worker.echo(b"x" * 3000) for _ in range(6000)]
    assert all(len(call.get()) == 3000 for call in calls)


def test_a_client_that_dies_with_calls_in_flight_hurts_nobody(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    pid = mesh.run(os.getpid).gather()[0]
    program = (
        "import argosy, os, time\n"
        f"mesh = argosy.connect({mesh.name!r})\n"
        "calls = [mesh.run(time.sleep, 0.2) for _ in range(50)]\n"
        "os.kill(os.getpid(), 9)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=300).returncode == -9
    assert mesh.run(os.getpid).gather() == [pid]
    mesh.stop()


def test_an_owner_that_dies_takes_its_mesh_along(runtime: Path, tmp_path: Path):
    program = (
        "import argosy, os, time\n"
        "mesh = argosy.local().mesh(ranks=2, preload=[])\n"
        "print(*mesh.run(os.getpid).gather(), flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, cwd=tmp_path) as client:
        assert client.stdout is not None
        pids = [int(word) for word in client.stdout.readline().split()]
        client.kill()
    assert len(pids) == 2
    until_gone(*pids)


def test_garbage_and_half_frames_end_only_their_own_link(cluster: Cluster, runtime: Path):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    pid = mesh.run(os.getpid).gather()[0]
    (path,) = (path for path in (runtime / "runs").glob("*/0.calls") if mesh.name in _name(path, mesh))
    half = socket.socket(socket.AF_UNIX)
    half.connect(str(path))
    half.sendall(b"\xc1\xa5\0\0")
    for seed in range(20):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path))
            sock.sendall(random.Random(seed).randbytes(5000))
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(str(path.with_suffix(".ctrl")))
            sock.sendall(random.Random(seed).randbytes(5000))
    assert mesh.run(os.getpid).gather() == [pid]
    half.close()
    mesh.stop()


def _name(path: Path, mesh: argosy.Mesh) -> str:
    return mesh.name if str(path.parent) == mesh._grid.folder else ""  # pyright: ignore[reportPrivateUsage]


def test_a_stopped_rank_is_named_and_goes_on(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    worker = mesh.spawn(Worker)[0]
    pid = worker.pid().get()
    os.kill(pid, signal.SIGSTOP)
    with pytest.raises(DeadlinePassed) as caught:
        worker.options(deadline_s=0.5).square(2).get()
    assert "does not respond" in caught.value.hint
    mesh.events.wait("paused", rank=0)
    os.kill(pid, signal.SIGCONT)
    assert worker.options(deadline_s=60).square(2).get() == 4
    mesh.stop()


def test_awaiting_a_rank_that_is_being_replaced_stops_no_other_coroutine(cluster: Cluster, tmp_path: Path):
    mesh = cluster.mesh(ranks=2, preload=[], restart=FOR_EVER)
    gate = tmp_path / "gate"
    actors = mesh.spawn(Reluctant, str(gate))
    os.kill(actors[1].pid().get(), signal.SIGKILL)
    mesh.events.wait("lost", rank=1)

    async def note(rank: int, x: int) -> int:
        return await actors[rank].note(x)

    async def call() -> list[int]:
        late = [asyncio.ensure_future(note(1, x)) for x in range(4)]
        for x in range(20):  # If the loop were blocked, nobody would open the gate.
            assert await note(0, x) == x
        assert not any(task.done() for task in late)
        late[1].cancel()
        with pytest.raises(DeadlinePassed):
            await actors[1].options(deadline_s=0.2).note(9)
        gate.touch()
        assert [await late[0], await late[2], await late[3]] == [0, 2, 3]
        return await actors[1].notes()

    assert asyncio.run(call()) == [0, 2, 3]
    mesh.stop()


def test_an_awaited_call_that_loses_its_rank_is_made_again(cluster: Cluster, tmp_path: Path):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    (tmp_path / "gate").touch()
    actor = mesh.spawn(Reluctant, str(tmp_path / "gate"))[0].options(retry=9, deadline_s=60)

    async def survive() -> None:
        for _ in range(5):
            pid = await actor.pid()
            os.kill(pid, signal.SIGKILL)
            until(lambda pid=pid: gone(pid), "the end of the victim")
            assert await actor.pid() != pid

    asyncio.run(survive())
    mesh.stop()


@pytest.mark.parametrize("kind", [Worker, Twins])
def test_a_call_cancelled_at_any_moment_harms_no_other(cluster: Cluster, kind: type):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    worker = mesh.spawn(kind)[0]
    chance = random.Random(7)
    for _ in range(300):
        call = worker.sleep(chance.choice([0.0, 0.0002, 0.001]))
        time.sleep(chance.choice([0.0, 0.0001, 0.0005]))
        call.cancel()
    assert worker.options(deadline_s=60).square(3).get() == 9
    assert worker.generation().get() == 0
    mesh.stop()


def test_many_calls_leave_memory_and_descriptors_as_they_were(worker):
    def call(count: int) -> None:
        for _ in range(count // 500):
            for reply in [worker.square(3) for _ in range(500)]:
                reply.get()

    compare(worker, call, 5000, 20_000)


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_calls_of_all_kinds_leave_nothing_behind(worker):
    """Plain ones, arrays in band, beside it and in shared memory, errors, deadlines, cancellations, awaited ones."""
    kinds = [
        lambda: worker.square(3).get(),
        lambda: worker.echo({"a": [1, 2.0, "x"] * 20}).get(),
        lambda: worker.echo(np.ones(100)).get(),
        lambda: worker.zeros(1 << 16).get(),
        lambda: worker.zeros(1 << 18).get(),
        lambda: worker.options(deadline_s=60).square(2).get(),
        lambda: worker.square(3).cancel(),
        lambda: worker.options(reply=False).square(2),
    ]

    async def together(count: int) -> None:
        await asyncio.gather(*(answer(worker.square(x)) for x in range(count)))

    async def answer(reply: "Reply[int]") -> int:
        return await reply

    def call(count: int) -> None:
        for _ in range(count // 1000):
            for number in range(800):
                kinds[number % len(kinds)]()
            for _ in range(100):
                with pytest.raises(TypeError):
                    worker.square("x").get()
            asyncio.run(together(100))

    compare(worker, call, 10_000, 100_000)


def compare(worker, call: Callable[[int], None], before_count: int, count: int) -> None:
    """After `before_count` calls, `count` more leave memory and descriptors of both ends as they were.

    What else happens in both processes may take some once; what each call leaves behind is there every time.
    """

    def measure() -> tuple[int, int, int, int]:
        mine, theirs = psutil.Process(), psutil.Process(worker.pid().get())
        return mine.num_fds(), theirs.num_fds(), mine.memory_info().rss, theirs.memory_info().rss

    call(before_count)
    grown: list[list[int]] = []
    for _ in range(4):
        before = measure()
        call(count)
        gc.collect()
        grown.append([now - then for then, now in zip(before, measure(), strict=True)])
        if max(grown[-1][:2]) <= 2 and max(grown[-1][2:]) < 8 << 20:  # A segment more or less is in use.
            return
    raise AssertionError(f"descriptors and bytes, here and there, after {count} calls each time: {grown}")


def test_threads_share_a_link(worker):
    wrong: list[int] = []

    def ask(start: int) -> None:
        for x in range(start, start + 200):
            if worker.square(x).get() != x * x:
                wrong.append(x)

    threads = [threading.Thread(target=ask, args=(1000 * number,)) for number in range(8)]
    slow = worker.sleep(0.2)
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert not any(thread.is_alive() for thread in threads)
    assert wrong == []
    assert slow.get() == "slept"


def test_an_interrupt_is_heard_at_once_and_stops_the_callee(worker):
    worker.square(1).get()

    main = threading.get_ident()

    def interrupt() -> None:
        """As soon as the test waits for the reply."""
        until(lambda: "get" in [each.name for each in traceback.extract_stack(sys._current_frames()[main])], "a wait")
        os.kill(os.getpid(), signal.SIGINT)

    def sleep() -> None:
        threading.Thread(target=interrupt).start()
        worker.sleep(10_000).get()

    with pytest.raises(KeyboardInterrupt):
        sleep()
    assert worker.square(2).get() == 4


def test_killing_the_agent_touches_no_call(cluster: Cluster, worker):
    waiting = worker.sleep(1.0)
    agent = next(daemon.pid for daemon in list_runs().daemons if daemon.what == "agent")
    os.kill(agent, signal.SIGKILL)
    assert waiting.get() == "slept"
    pid = worker.pid().get()
    os.kill(pid, signal.SIGKILL)
    assert worker.options(deadline_s=60, retry=3).pid().get() != pid


def test_who_stopped_a_mesh_is_told(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=FOR_EVER)
    waiting = mesh.spawn(Worker)[0].sleep(600)
    words = [sys.executable, "-m", "argosy", "stop", mesh.name]
    assert subprocess.run(words, capture_output=True, timeout=300).returncode == 0
    with pytest.raises(PeerLost, match="stopped by argosy stop"):
        waiting.get()


def test_who_floods_a_slow_rank_waits_and_a_deadline_names_who_is_slow(worker):
    slow, calls = worker.sleep(600), []
    flood = threading.Thread(target=lambda: calls.extend(worker.square(x) for x in range(6000)))
    flood.start()
    for _ in range(3):
        with pytest.raises(DeadlinePassed) as caught:
            worker.options(deadline_s=0.3).square(2).get()
        assert ".sleep for" in caught.value.hint
    slow.cancel()
    flood.join(300)
    assert [call.get() for call in calls] == [x * x for x in range(6000)]
