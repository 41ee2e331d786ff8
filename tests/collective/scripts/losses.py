"""A rank is killed while the others are in an operation: each of them gets PeerLost, named, and soon."""

# ruff: noqa: F821 (names that the crew gives)
import ctypes
import os
import signal
import sys
import time

from argosy.core import PeerLost

apart, operation = round.startswith("apart "), round.removeprefix("apart ")
if apart and rank == 0 and ctypes.CDLL(None).unshare(0x10000000):  # another user is another host
    print("skip"), sys.stdout.flush(), os._exit(0)
world = form()
victim = size - 1
big = torch.ones(8_000_000)
whole = torch.empty(size * 1_000_000)
calls = {
    "all_reduce": lambda: dist.all_reduce(big),
    "small all_reduce": lambda: dist.all_reduce(torch.ones(1)),
    "async all_reduce": lambda: dist.all_reduce(torch.ones(1), async_op=True).wait(),
    "all_gather": lambda: dist.all_gather_single(whole, big[:1_000_000]),
    "reduce_scatter": lambda: dist.reduce_scatter_single(big[:1_000_000], whole),
    "broadcast": lambda: dist.broadcast(big, victim),
    "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    "barrier": lambda: dist.barrier(),
    "recv": lambda: dist.recv(big, victim),
    "send": lambda: dist.send(big, victim),
    "sparse all_reduce": lambda: dist.all_reduce(torch.sparse_coo_tensor([[rank]], [1.0], (4,))),
    "a living rank": lambda: dist.recv(big, 1 - rank),  # which waits too, for the other
}
told = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
calls["barrier"]()
if rank == victim:
    for other in range(size - 1):
        told.wait([f"waits{other}"])
    time.sleep(0.2)
    told.set("killed", repr(time.monotonic()))
    os.kill(os.getpid(), signal.SIGKILL)
told.set(f"waits{rank}", "")
try:
    while True:
        calls[operation]()
except PeerLost as error:
    late = time.monotonic() - float(told.get("killed"))
    print(f"{error}|{late * 1000:.1f}")
try:
    dist.all_reduce(torch.ones(1))
except PeerLost as error:
    print(error)
sys.stdout.flush()
os._exit(0)
