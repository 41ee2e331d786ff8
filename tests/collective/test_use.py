"""Groups in daily use: counted on the progress page, from two threads, thousands of times, with large tensors."""

import json
import os
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

import pytest
from crew import crew, crews

COUNTED = """
import os, tempfile
from argosy.observe import Page, attach, install
install()
path = tempfile.mktemp()
page = Page.create(path)
attach(page)
form()
for _ in range(3):
    dist.all_reduce(torch.ones(2))  # line 10
dist.send(torch.ones(2), 1) if rank == 0 else dist.recv(torch.ones(2), 0)
dist.all_reduce(torch.ones(2))  # line 12
(group,) = page.read().groups
os.unlink(path)
print(group.issued, group.p2p, group.op, group.site, group.size, group.waiting)
"""

THREADS = """
import threading
form()
groups = [dist.new_group() for _ in range(2)]
failures = []
def work(group, seed):
    try:
        for i in range(300):
            x = torch.full((64 if i % 50 else 200_000,), float(i + seed))
            dist.all_reduce(x, group=group)
            assert x[0] == size * (i + seed), (i, seed, x[0])
    except BaseException as error:
        failures.append(error)
# The ranks start the threads in opposite order: groups must not wait for each other.
order = [0, 1] if rank == 0 else [1, 0]
threads = [threading.Thread(target=work, args=(groups[i], i * 1000)) for i in order]
[t.start() for t in threads], [t.join() for t in threads]
print(failures or "good")
"""

CALLBACKS = """
import time
form()
def again(future):
    found = future.value()
    return dist.all_reduce(found[0], async_op=True).get_future().wait()
for late in range(size):  # some ranks are called back by the caller, some by the group's own thread
    if rank == late:
        time.sleep(0.05)
    future = dist.all_reduce(torch.ones(3), async_op=True).get_future().then(again).then(again)
    assert future.wait()[0].tolist() == [size**3] * 3
print("good")
"""

MANY = """
form()
x = torch.zeros(1)
for i in range({count}):
    x.fill_(i % 7)
    dist.all_reduce(x)
    assert x.item() == size * (i % 7)
print("good")
"""

LARGE = """
form()
count = 1 << 28
def ramp(seed):
    return torch.arange(count, dtype=torch.int32).add_(seed)
x = ramp(rank)
dist.all_reduce(x)
assert torch.equal(x, ramp(0).mul_(2).add_(1))
dist.broadcast(x.fill_(0) if rank else x, 0)
assert torch.equal(x, ramp(0).mul_(2).add_(1))
given = ramp(rank * 1000)
dist.all_to_all_single(x, given)
half = count // 2
for source in range(2):
    expected = torch.arange(rank * half, (rank + 1) * half, dtype=torch.int32).add_(source * 1000)
    assert torch.equal(x[source * half : (source + 1) * half], expected)
dist.reduce_scatter_single(share := torch.empty(half, dtype=torch.int32), given)
assert torch.equal(share, torch.arange(rank * half, (rank + 1) * half, dtype=torch.int32).mul_(2).add_(1000))
dist.all_gather_single(x, share)
assert torch.equal(x, ramp(0).mul_(2).add_(1000))
print("good")
"""

BITS = """
import time
form()
def bits(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank)).mul_(10.0 ** rank)
def tree(parts):
    if len(parts) == 1:
        return parts[0]
    half = 1 << ((len(parts) - 1).bit_length() - 1)  # the largest power of two below the length
    return tree(parts[:half]) + tree(parts[half:])
x = bits(size * 100_000)
parts = [torch.empty_like(x) for _ in range(size)]
dist.all_gather(parts, x)
expected = tree(parts)
dist.all_reduce(whole := x.clone())
assert torch.equal(whole, expected)
pieces = x.clone()
for number, piece in enumerate(pieces.split(777 * 100)):  # in other pieces, and each rank late in turn
    time.sleep(0.002 if number % size == rank else 0)
    dist.all_reduce(piece)
assert torch.equal(pieces, expected)
dist.reduce_scatter_single(share := torch.empty(100_000), x)
assert torch.equal(share, expected[rank * 100_000 : (rank + 1) * 100_000])
dist.reduce(rooted := x.clone(), size - 1)
assert rank < size - 1 or torch.equal(rooted, expected)
print("good")
"""

WAITING = """
import time
form()
dist.barrier()
for call in (dist.barrier, lambda: dist.send(torch.ones(1), 1) if rank == 0 else dist.recv(torch.ones(1), 0)):
    if rank == 0:
        time.sleep(1)
        call()
    else:
        before = time.process_time()
        call()
        print(time.process_time() - before < 0.5)
"""

LAYOUTS = """
from argosy.core import ArgosyError
from argosy.collective import joining
with joining():
    world = form()
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(3)))
cap = 0.02 if round == "same" or rank == 0 else 0.05
model = torch.nn.parallel.DistributedDataParallel(layers, bucket_cap_mb=cap)
world.rehearse(lambda: model(torch.ones(2, 64)).sum().backward())
try:
    world.reform(None, 1)
    dist.barrier()
    print("formed")
except ArgosyError as error:
    print(error)
"""

MEMORY = """
world = form()
groups = [dist.new_group() for _ in range(16)]
held = [group.memory() for group in (world, *groups)]
print(sum(held) < 17 << 20, held[0] > 2 << 20, min(held) < 400_000)
for group in groups:
    x = torch.full((500_000,), float(rank))
    dist.all_reduce(x, group=group)
    assert x[0] == x[-1] == sum(range(size))
print("good")
"""

APART = """
import ctypes, os, pathlib
user = os.getuid()
if rank == 1 and ctypes.CDLL(None).unshare(0x10000000):  # another user is another host
    print("skip"); os._exit(0)
if rank == 1 and round == "same number":
    pathlib.Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
    assert os.getuid() == user
world = form()
assert world._transport.shared is None
dist.all_reduce(x := torch.full((3,), float(rank)))
dist.broadcast(y := torch.full((3,), float(rank)), 1)
dist.all_gather(z := [torch.empty(2) for _ in range(size)], torch.full((2,), float(rank)))
dist.all_gather_object(objects := [None] * size, {"rank": rank})
world.all_gather_single_coalesced([whole := torch.empty(2 * size)], [torch.full((2,), float(rank))]).wait()
options = dist.ReduceScatterOptions()
world.reduce_scatter_single_coalesced([part := torch.empty(2)], [torch.ones(2 * size)], options).wait()
dist.all_gather_single(single := torch.empty(size), torch.full((1,), float(rank)))
dist.all_to_all_single(parts := torch.empty(size), torch.full((size,), float(rank)))
assert (whole.tolist(), part.tolist()) == ([0, 0, 1, 1], [2, 2]), (whole, part)
assert single.tolist() == parts.tolist() == [0, 1], (single, parts)
dist.send(torch.ones(3), 1) if rank == 0 else dist.recv(torch.empty(3), 0)
work = dist.all_reduce(torch.ones(3), async_op=True)
work.wait()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(3, 3))
model(torch.ones(2, 3)).sum().backward()
dist.barrier()
print(x[0].item(), y[0].item(), [part[0].item() for part in z], [o["rank"] for o in objects])
"""

SPARSE = """
form()
x = torch.sparse_coo_tensor([[rank]], [1.0], (4,))
dist.all_reduce(x)
print(x.to_dense().tolist())
"""

FULL = """
import ctypes, os, subprocess
if ctypes.CDLL(None).unshare(0x20000):
    print("skip"); os._exit(0)
for command in ("mount --make-rprivate /", "mount -t tmpfs -o size=64k none /dev/shm"):
    if subprocess.run(command.split(), stderr=subprocess.DEVNULL).returncode:
        print("skip"); os._exit(0)
form()
dist.all_reduce(x := torch.ones(2_000_000))
assert x[0] == x[-1] == size
print("good")
"""

NO_MEMORY = """
import resource
from argosy.core import ArgosyError
if rank == 0:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
try:
    form()
except ArgosyError as error:
    print(error)
"""


def test_collectives_are_counted_once_on_the_progress_page():
    assert crew(COUNTED, 2) == ["4 1 all_reduce script.py:12 2 False\n"] * 2


def test_two_groups_are_used_from_two_threads():
    assert crew(THREADS, 2) == ["good\n"] * 2


def test_the_callback_of_a_future_may_wait_for_another_collective():
    assert crew(CALLBACKS, 2) == ["good\n"] * 2


@pytest.mark.system
def test_thousands_of_small_all_reduces():
    assert crew(MANY.format(count=5_000), 4) == ["good\n"] * 4


@pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])
def test_sums_follow_the_tree_of_ranks_in_any_pieces_and_order_of_arrival(compiled: bool):
    assert crews(BITS, [(3, ""), (4, "")], compiled=compiled) == [["good\n"] * 3, ["good\n"] * 4]


def test_a_rank_that_waits_needs_no_core():
    assert crew(WAITING, 2) == ["", "True\nTrue\n"]


@pytest.mark.system
def test_the_bench_measures_both_backends():
    words = ["--ranks", "2", "--sizes", "4", "--operations", "all_reduce,barrier", "--json"]
    command = [sys.executable, "-m", "argosy.collective.bench", *words]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    cells = {(cell["backend"], cell["operation"]): cell["median_s"] for cell in json.loads(done.stdout)}
    assert set(cells) == {(name, what) for name in ("argosy", "gloo") for what in ("all_reduce", "barrier")}
    assert min(cells.values()) > 0


def test_ranks_with_other_bucket_layouts_do_not_train_together():
    for text in crew(LAYOUTS, 2, rounds=["same", "other"]):
        same, other, *_ = text.splitlines()
        assert same == "formed"
        assert other.startswith("the DDP bucket layouts of the ranks differ: ranks ")


def test_the_groups_of_a_rank_share_16_mib():
    assert crew(MEMORY, 3) == ["True True True\ngood\n"] * 3


@pytest.mark.parametrize("who", ["another", "same number"])
def test_ranks_that_share_no_host_meet_through_gloo(who: str):
    said = crew(APART, 2, rounds=[who])
    if "skip" in said[1]:
        pytest.skip("no user namespaces here")
    assert [text.splitlines()[-1] for text in said] == ["1.0 1.0 [0.0, 1.0] [0, 1]"] * 2


def test_a_full_dev_shm_does_not_matter():
    said = crew(FULL, 2)
    if any("skip" in text for text in said):
        pytest.skip("no mount namespaces here")
    assert said == ["good\n"] * 2


def test_a_lack_of_memory_is_said_on_every_rank_at_the_start():
    first, other = (text.splitlines()[-1] for text in crew(NO_MEMORY, 2))
    assert first.startswith("no memory for a group's buffers, ")
    assert other == f"rank 0: {first}"


def test_sparse_tensors_go_through_gloo():
    assert [text.splitlines()[-1] for text in crew(SPARSE, 2)] == ["[1.0, 1.0, 0.0, 0.0]"] * 2


@contextmanager
def busy_machine() -> Generator[None]:
    """Every core has something else to do, too."""
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:
        yield
    finally:
        for other in others:
            other.kill()
            other.wait()


@pytest.mark.soak
@pytest.mark.timeout(700)
@pytest.mark.parametrize("part", range(4))
def test_a_hundred_thousand_small_all_reduces_under_load(part: int):
    with busy_machine():
        assert crew(MANY.format(count=25_000), 4) == ["good\n"] * 4


@pytest.mark.soak
def test_a_gibibyte():
    assert crew(LARGE, 2) == ["good\n"] * 2
