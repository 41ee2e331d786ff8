"""The one file that knows devices, on the emulated accelerator: copies beside other work, errors that arrive late."""

from pathlib import Path

import pytest
from crew import crew
from emulation import build

pytestmark = pytest.mark.system

DEVICE = """
import os, sys, threading, time
sys.path.append(os.environ["TESTS"])
import emulation
switches = emulation.load_accelerator()
import numpy as np
from argosy.checkpoint import Saver, restore
from argosy.data import Loader, seed_generators
from argosy.transfer import DeviceFailed, HostCopies, PinnedMemory, device_of, synchronize

x = torch.arange(6.0).to("emul")
assert device_of([torch.ones(1), x]).type == "emul" and device_of([torch.ones(1)]) is None
memory = PinnedMemory()

# A copy is stale until it was waited for; a change that waits for the fence does not tear it.
switches.set_copy_seconds(0.2)
copies = HostCopies([x], memory)
assert copies.copies[0].tolist() != [0, 1, 2, 3, 4, 5]
assert copies.written_to() == []
copies.fence()
x.add_(1)
copies.wait()
assert copies.copies[0].tolist() == [0, 1, 2, 3, 4, 5]
first = copies.copies[0].data_ptr()
copies.give_back()

# Whoever writes before the fence is found out; pinned memory is used again.
copies = HostCopies([x], memory)
x.add_(1)
assert copies.written_to() == [0]
copies.wait()
assert copies.copies[0].data_ptr() == first
switches.set_copy_seconds(0.0)

# Batches are pinned; the same key draws the same numbers.
batch = next(iter(Loader(np.ones((4, 2), np.float32), batch=2, seed=0)))
assert batch.is_pinned()
seed_generators(3, "a")
drawn = torch.rand(3, device="emul").tolist()
seed_generators(3, "a")
assert torch.rand(3, device="emul").tolist() == drawn

# A checkpoint of what is on the device holds what was there when it was asked for.
model = torch.nn.Linear(64, 64).to("emul")
optimizer = torch.optim.AdamW(model.parameters())
model(torch.ones(2, 64, device="emul")).sum().backward()
optimizer.step()
wanted = model.weight.detach().cpu().clone()
switches.set_copy_seconds(0.01)
directory = os.path.join(os.environ["PLACE"], "run")
fences, fence = [], HostCopies.fence
HostCopies.fence = lambda copies: (fences.append(threading.current_thread() is threading.main_thread()), fence(copies))
with Saver(directory) as saver:
    handle = saver.save({"model": model, "optimizer": optimizer}, 1)
    handle.durable.result(60)
    assert not fences, "only a change of the state has the device wait for the copies"
    handle = saver.save({"model": model, "optimizer": optimizer}, 2)
    optimizer.step()
    assert fences == [True]
    assert not torch.equal(model.weight.detach().cpu(), wanted)
    handle.durable.result(60)
again = torch.nn.Linear(64, 64).to("emul")
restore(directory, into={"model": again, "optimizer": torch.optim.AdamW(again.parameters())})
assert torch.equal(again.weight.detach().cpu(), wanted)

# Lack of memory is the user's; an error of a copy surfaces late, and stays.
switches.set_memory_limit(1)
try:
    torch.empty(100, device="emul")
except torch.OutOfMemoryError:
    print("out of memory")
switches.set_memory_limit(0)
switches.fail_next_copy()
torch.empty(6, pin_memory=True).copy_(x, non_blocking=True)
for _ in range(2):
    try:
        synchronize(x.device)
    except DeviceFailed as error:
        print(error)
sys.stdout.flush()
os._exit(0)
"""


def test_copies_errors_generators_and_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    build()
    monkeypatch.setenv("TESTS", str(Path(__file__).parents[1]))
    monkeypatch.setenv("PLACE", str(tmp_path))
    (text,) = crew(DEVICE, 1)
    failed = "device emul:0 failed: emul error: a copy failed"
    assert text.splitlines() == ["out of memory", failed, failed], text
