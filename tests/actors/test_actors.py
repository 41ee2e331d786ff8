"""Processes called like objects: what a user sees of meshes, handles and replies."""

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from console import until
from hands import Beside, Caller, Options, Restorable, Worker
from meshes import owner, until_gone

import argosy
from argosy import Cluster, ConfigError, DeadlinePassed, Mesh, PeerLost, Restart
from argosy.actors.readiness import LogLine


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with owner(tmp_path_factory.mktemp("owner")), argosy.local(show=False) as opened:
        yield opened


@pytest.fixture(scope="module")
def mesh(cluster: Cluster) -> Mesh:
    """Four ranks that several tests share; they leave them alive."""
    return cluster.mesh(dp=2, tp=2, preload=["numpy"], restart=Restart.rank())


@pytest.fixture(scope="module")
def workers(mesh: Mesh):
    return mesh.spawn(Worker, seed=3)


def test_calls_reach_all_some_and_one(mesh: Mesh, workers):
    assert workers.square(3).gather() == [9, 9, 9, 9]
    assert workers.rank().gather() == [0, 1, 2, 3]
    assert workers.slice(dp=1).rank().gather() == [2, 3]
    assert workers.slice(tp=0).rank().gather() == [0, 2]
    assert workers.slice(dp=1).slice(tp=0).rank().get() == 2
    assert workers[2].rank().get() == 2
    assert workers[1:3].rank().gather() == [1, 2]
    with pytest.raises(IndexError, match="there are 4 actors, none at 9"):
        workers[9]
    assert [worker.rank().get() for worker in workers] == [0, 1, 2, 3]
    assert mesh.slice(dp=0).run(lambda x: x + 1, 1).gather() == [2, 2]
    assert len(set(workers.pid().gather())) == 4


def test_replies_stream_and_reduce(workers):
    assert sorted(reply.get() for reply in workers.rank().stream()) == [0, 1, 2, 3]
    assert workers.rank().reduce(lambda a, b: a + b) == 6


def test_a_slow_rank_does_not_hold_up_the_stream(workers):
    slow = workers[0].sleep(600)
    first = next(iter(workers.rank().stream()))
    assert first.get() != 0
    assert slow.cancel()


def test_replies_are_awaitable(workers):
    async def ask() -> list[object]:
        together = asyncio.gather(workers[0].square(4), workers[1].square(5))
        return [await workers[1].square(3), await workers.rank(), await together]

    assert asyncio.run(ask()) == [9, [0, 1, 2, 3], [16, 25]]


def test_an_awaited_call_can_be_cancelled(workers):
    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.1):
                await workers[0].sleep(60)

    asyncio.run(give_up())
    assert workers[0].square(2).get() == 4


def test_calls_of_one_caller_run_in_order_and_need_no_reply(workers):
    for x in range(200):
        workers[3].options(reply=False).note(x)
    assert workers[3].notes().get() == list(range(200))


def test_a_remote_exception_keeps_its_type_and_tells_its_rank(mesh: Mesh):
    def divide() -> float:
        return 1 / 0

    with pytest.raises(ZeroDivisionError) as caught:
        mesh.run(divide).gather()
    (note,) = caught.value.__notes__
    assert "rank 0 of" in note
    assert "in divide" in note
    assert "src/argosy/" not in note


def test_what_does_not_exist_is_named(workers, mesh: Mesh):
    with pytest.raises(AttributeError, match="Worker has no endpoint 'cube'"):
        workers.cube(3)
    with pytest.raises(ConfigError, match="no such dimension: 'pp'"):
        workers.slice(pp=0)
    with pytest.raises(ConfigError, match="no such actor"):
        mesh.actors("nobody").square(3).gather()


def test_what_was_asked_for_in_the_wrong_way_is_named(cluster: Cluster, mesh: Mesh):
    with pytest.raises(ConfigError, match=r"handles have a method of this name themselves: Options\.options"):
        mesh.spawn(Options)
    with pytest.raises(ConfigError, match="actors are built from a class"):
        mesh.spawn(cast(type, Worker()))
    wrong: Any = "rank"
    with pytest.raises(ConfigError, match="restart takes a policy: 'rank'") as caught:
        cluster.mesh(ranks=2, restart=wrong)
    assert caught.value.hint == "restart=argosy.Restart.rank()"
    with pytest.raises(ConfigError, match="restart takes a policy: 'rank'"):
        mesh.exec(["true"], restart=wrong)
    with pytest.raises(ConfigError, match="dp='rank'"):
        cluster.mesh(dp=wrong)
    with pytest.raises(ConfigError, match="preload takes a list of words: 'rank'"):
        cluster.mesh(ranks=1, preload="rank")


def test_after_its_block_a_mesh_says_that_it_has_ended(cluster: Cluster):
    with argosy.local(show=False) as ended:
        mesh = ended.mesh(ranks=2, preload=[], restart=Restart.rank())
        workers = mesh.spawn(Worker)
        unread = workers.square(2)
        blocked = workers[1].sleep(600)
    for use in (
        unread.gather,
        blocked.get,
        lambda: workers.square(3).gather(),
        lambda: next(workers.square(3).stream()).get(),
        lambda: workers[0].options(deadline_s=60).square(3).get(),
        lambda: mesh.run(os.getpid).gather(),
        lambda: mesh.spawn(Worker),
        lambda: mesh.exec(["true"]),
        lambda: mesh.service("late", ["true"], ready=LogLine("ready")),
        lambda: mesh.find("late"),
        lambda: mesh.slice(rank=0).run(os.getpid).gather(),
        lambda: mesh.events.wait("replaced"),
        lambda: asyncio.run(awaited(workers)),
    ):
        with pytest.raises(PeerLost, match="the end of its `with` block"):
            use()
    with pytest.raises(ConfigError, match="the cluster's block has ended"):
        ended.mesh(ranks=1)


async def awaited(workers: Any) -> Any:
    return await workers.square(3)


def test_what_cannot_be_pickled_is_named(workers):
    class Model:
        def __init__(self) -> None:
            self.layers = [{"lock": threading.Lock()}]

    with pytest.raises(ConfigError, match=r"layers\[0\]\['lock'\].*cannot pickle '_thread.lock'") as caught:
        workers.echo(Model()).gather()
    assert "calling Worker" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("count", [10, 5_000, 200_000, 4_000_000])
def test_arrays_travel_whole_both_ways(workers, count: int):
    array = np.arange(count, dtype=np.float64)
    back = workers[1].echo({"a": array, "b": array[:7]}).get()
    assert np.array_equal(back["a"], array)
    assert np.array_equal(back["b"], array[:7])
    assert workers.total(array).gather() == [array.sum()] * 4
    assert len(workers[0].zeros(count).get()) == count


def test_what_a_rank_does_to_its_argument_nobody_else_sees(workers):
    array = np.ones(1 << 20)
    assert set(workers.scribble(array).gather()) == {7.0 * (1 << 20)}
    assert array.sum() == 1 << 20


def test_segments_are_used_again(workers):
    array = np.ones(1 << 20)
    workers[1].total(array).get()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        workers[1].total(array).get()
    assert len(os.listdir("/proc/self/fd")) == before


def test_tensors_travel_as_they_are(cluster: Cluster):
    torch = pytest.importorskip("torch")
    mesh = cluster.mesh(ranks=1, preload=["torch"])
    workers = mesh.spawn(Worker)
    for tensor in (
        torch.randn(1000, 300),
        torch.randn(8, 9).t(),
        torch.ones(3, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.tensor(5),
    ):
        back = workers[0].echo(tensor).get()
        assert torch.equal(back, tensor)
        assert back.dtype == tensor.dtype
    parameter = workers[0].echo(torch.nn.Parameter(torch.ones(2))).get()
    assert isinstance(parameter, torch.nn.Parameter)
    mesh.stop()


def test_a_deadline_ends_the_call_and_stops_the_callee(workers):
    with pytest.raises(DeadlinePassed) as caught:
        workers[0].options(deadline_s=0.2).sleep(600).get()
    assert "has been in Worker" in caught.value.hint
    assert workers[0].options(deadline_s=60).square(2).get() == 4


def test_a_deadline_also_holds_for_calls_that_wait_for_their_turn(workers):
    slow = workers[0].sleep(600)
    late = workers[0].options(deadline_s=0.1).note(99)
    with pytest.raises(DeadlinePassed):
        late.get()
    assert slow.cancel()
    assert 99 not in workers[0].notes().get()


def test_cancel_reaches_the_callee(workers):
    call = workers[1].sleep(600)
    workers[2].square(1).get()
    assert call.cancel()
    with pytest.raises(argosy.ArgosyError, match="cancelled"):
        call.get()
    assert workers[1].square(2).get() == 4


def test_endpoints_run_beside_each_other_on_request(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[])
    actor = mesh.spawn(Beside)[0]
    held = actor.hold()
    dreams = [actor.dream(0.3) for _ in range(20)]
    assert [dream.get() for dream in dreams] == ["dreamt"] * 20
    assert not held.is_done
    actor.release().get()
    assert held.get() is True
    mesh.stop()


def test_handles_can_be_passed_on_and_called_in_a_circle(mesh: Mesh, workers):
    callers = mesh.spawn(Caller)
    assert callers[0].ask(workers[3], 5).get() == 25
    assert callers[0].circle(callers[1], callers[0], 6).get() == 6


def test_a_replaced_rank_answers_at_the_same_handle(cluster: Cluster):
    mesh = cluster.mesh(ranks=3, preload=[], restart=Restart.rank())
    plain, hooked = mesh.spawn(Worker, seed=5), mesh.spawn(Restorable, seed=6)
    before = plain.pid().gather()
    waiting = plain[1].sleep(600)
    os.kill(before[1], signal.SIGKILL)
    with pytest.raises(PeerLost, match=r"rank 1 of .* is lost: killed by SIGKILL"):
        waiting.get()
    after = plain.pid().gather()
    assert (after[0], after[2]) == (before[0], before[2])
    assert after[1] != before[1]
    assert plain.generation().gather() == [0, 1, 0]
    assert hooked.was_restored().gather() == [False, True, False]
    assert mesh.events.wait("lost", rank=1).cause == "killed by SIGKILL"
    assert str(mesh.events.wait("replaced", rank=1)) == "rank 1 replaced, generation 1"
    mesh.stop()


def test_an_idempotent_call_is_made_again(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=Restart.rank())
    workers = mesh.spawn(Worker)
    pid = workers[0].pid().get()
    blocked = workers[0].sleep(600)
    again = workers[0].options(retry=3).pid()
    os.kill(pid, signal.SIGKILL)
    assert again.get() != pid
    with pytest.raises(PeerLost):
        blocked.get()
    with pytest.raises(ConfigError, match="only idempotent endpoints"):
        workers[0].options(retry=1).square(2)
    mesh.stop()


def test_without_a_policy_the_first_loss_ends_the_mesh(cluster: Cluster):
    mesh = cluster.mesh(ranks=2, preload=[])
    workers = mesh.spawn(Worker)
    pids = workers.pid().gather()
    os.kill(pids[0], signal.SIGKILL)
    assert mesh.events.wait("ended").cause == "rank 0: killed by SIGKILL"
    until_gone(*pids)
    with pytest.raises(PeerLost):
        workers[1].square(2).get()
    assert list(mesh.events)[-1].what == "ended"


def test_a_mesh_of_an_actor_dies_with_it(cluster: Cluster):
    mesh = cluster.mesh(ranks=1, preload=[], restart=Restart.rank())
    owner_of_others = mesh.spawn(Caller)[0]
    children = owner_of_others.mesh_of_my_own().get()
    os.kill(owner_of_others.pid().get(), signal.SIGKILL)
    until_gone(*children)
    mesh.stop()


def test_linked_meshes_end_together(cluster: Cluster):
    first, second = cluster.mesh(ranks=1, preload=[]), cluster.mesh(ranks=1, preload=[])
    pid = second.spawn(Worker)[0].pid().get()
    first.link(second)
    first.stop()
    until_gone(pid)


def test_prints_of_ranks_are_shown(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    with owner(tmp_path), argosy.local() as opened:
        opened.mesh(ranks=2, preload=[]).spawn(Worker).say("a word from a rank").gather()
    assert capfd.readouterr().out.count("a word from a rank") in (1, 2)  # Equal lines of two ranks may be one.


def test_a_run_is_found_by_its_name(cluster: Cluster):
    mesh = cluster.mesh(a=2, preload=[], name="named")
    mesh.spawn(Worker)
    found = argosy.connect("named")
    assert found.dims == {"a": 2}
    assert found.run(os.getpid).gather() == mesh.run(os.getpid).gather()
    with pytest.raises(ConfigError, match="only the owner"):
        found.stop()
    with pytest.raises(ConfigError, match="no such living run: nothing"):
        argosy.connect("nothing")
    mesh.stop()
    until(lambda: not _alive("named"), "the end of the run")


def _alive(name: str) -> bool:
    try:
        argosy.connect(name)
    except ConfigError:
        return False
    return True


def test_a_name_used_again_means_the_new_mesh(cluster: Cluster):
    for _ in range(8):  # What became of the one before stands in the same journal.
        mesh = cluster.mesh(ranks=1, preload=[], name="again")
        assert mesh.run(len, "abc").gather() == [3]
        mesh.stop()
