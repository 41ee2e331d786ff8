"""Groups in daily use: counted on the progress page, from two threads, thousands of times, with large tensors."""

import pytest
from crew import crew

pytestmark = pytest.mark.timeout(300)  # many processes on a machine that may be loaded

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
x = torch.full((1 << 28,), float(rank + 1))
dist.all_reduce(x)
assert x[0] == x[-1] == x[12345678] == 3
print("good")
"""


def test_collectives_are_counted_once_on_the_progress_page():
    assert crew(COUNTED, 2) == ["4 1 all_reduce script.py:12 2 False\n"] * 2


def test_two_groups_are_used_from_two_threads():
    assert crew(THREADS, 2) == ["good\n"] * 2


def test_thousands_of_small_all_reduces():
    assert crew(MANY.format(count=5_000), 4) == ["good\n"] * 4


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_hundred_thousand_small_all_reduces():
    for _ in range(20):
        assert crew(MANY.format(count=5_000), 4) == ["good\n"] * 4


@pytest.mark.soak
def test_a_gibibyte():
    assert crew(LARGE, 2) == ["good\n"] * 2
