"""A user's own group of Gloo or NCCL gets the name of a missing rank, and is re-formed where torch can do that."""

from crew import crew

NAMED = """
import os, signal, sys
from argosy.collective import guard
from argosy.core import PeerLost
guarded = guard(form("gloo"))
dist.all_reduce(torch.ones(1))
if rank == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    if rank == 0:  # it waits for a living rank, of whom it will hear nothing
        guarded.wait(dist.irecv(torch.ones(1), 1))
    else:
        with guarded:
            dist.all_reduce(torch.ones(3))
except PeerLost as loss:
    print(loss)
sys.stdout.flush()
os._exit(0)
"""

REFORMED = """
import os, signal, sys
from argosy.collective import guard
from argosy.core import PeerLost
ready, go = os.pipe()
spare = rank == 1 and os.fork() == 0
if spare:
    os.close(go)
    os.read(ready, 1)  # until the one whose place it takes is gone
world = form("gloo", enable_reconfigure=True)
guarded = guard(world, view=2 if spare else 1)
if not spare:
    dist.all_reduce(torch.ones(1))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with guarded:
            dist.all_reduce(torch.ones(1))
    except PeerLost as loss:
        print(loss)
    guarded.reform(2)
dist.all_reduce(x := torch.full((3,), float(rank + 1)))
print(x.tolist(), spare)
sys.stdout.flush()
dist.barrier()
os._exit(0)
"""

ENGINE = """
import datetime, os, signal, sys
from argosy.collective import plans
from argosy.collective.arguments import reduction_options
from argosy.collective.peer_links import Links
from argosy.collective.reconfigured import Backends, Reconfigured
from argosy.collective.rendezvous import Meeting, meet
from argosy.core import PeerLost

def make(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout, True)

def form_view(view):
    meeting = Meeting(name="test", rank=rank, size=size, generation=view, gloo=True)
    members, links = meet(store, meeting, 60.0)
    near = {r: member.pid for r, member in enumerate(members) if r != rank}
    backend = backends.of("cpu", store, meeting, datetime.timedelta(seconds=60))
    return Reconfigured(Links(links, near, range(size)), backend, store, meeting, 60.0)

def reduce(engine):
    x = torch.full((3,), float(rank + 1))
    plan = plans.all_reduce("all_reduce", [x], 0, ("allreduce", ([x], reduction_options(None))))
    engine.run(plan, 60.0)
    try:
        plan.torch_work.wait()
    except RuntimeError as error:
        plan.explain(error)
    return x.tolist()

ready, go = os.pipe()
spare = rank == 1 and os.fork() == 0
if spare:
    os.close(go)
    os.read(ready, 1)
store, backends = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False), Backends({"cpu": make})
if not spare:
    engine = form_view(1)
    print(reduce(engine))
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        reduce(engine)
    except PeerLost as loss:
        print(loss)
    engine.abort("the next view is formed")
    engine.close()
engine = form_view(2)
print(reduce(engine), spare)
sys.stdout.flush()
reduce(engine)
os._exit(0)
"""


def test_the_engine_over_reconfigure_outlives_a_rank():
    """The calls that NCCL gets, on Gloo."""
    first, other = crew(ENGINE, 2, must_end_well=False)
    assert first.splitlines()[:3] == ["[3.0, 3.0, 3.0]", "rank 1 is lost: killed by SIGKILL", "[3.0, 3.0, 3.0] False"]
    assert "[3.0, 3.0, 3.0] True" in other


def test_every_other_rank_learns_who_is_missing():
    for text in crew(NAMED, 3, must_end_well=False)[:2]:
        assert text.splitlines()[-1] == "rank 2 is lost: killed by SIGKILL", text


def test_a_group_that_torch_can_reform_goes_on_with_a_replacement():
    first, other = crew(REFORMED, 2, must_end_well=False)
    assert "rank 1 is lost: killed by SIGKILL" in first
    assert "[3.0, 3.0, 3.0] False" in first
    assert "[3.0, 3.0, 3.0] True" in other
