"""The torch hooks count, change no result, and stay out of the way. Each fact in a process of its own."""

import os
from pathlib import Path

from ranks import run_script

SETUP = """
import os, sys
from argosy.observe import *
page = Page.create(sys.argv[1] + "/page" + str(os.getpid()))
def seen():
    return Page.read(page)
"""

TRAIN = """
def train(compiled):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
    run = torch.compile(model, backend="eager", fullgraph=True) if compiled else model
    optimizer = torch.optim.Adam(model.parameters())
    losses = []
    for batch in torch.utils.data.DataLoader(torch.randn(24, 8), batch_size=4):
        optimizer.zero_grad()
        loss = run(batch).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item().hex())
    return losses
"""


def test_losses_are_bit_identical_and_fullgraph_holds(tmp_path: Path):
    printed = run_script(
        SETUP
        + "import torch\n"
        + TRAIN
        + """
plain = train(False), train(True)
before = seen()
install(page)
torch._dynamo.reset()
hooked = train(False), train(True)
assert plain == hooked, (plain, hooked)
after = seen()
print(before.steps, after.steps, after.pulse > 12, after.doing == Activity.NOTHING)

with torch.inference_mode():
    print(torch.nn.Linear(2, 2)(torch.ones(1, 2)).shape)
""",
        str(tmp_path),
    )
    assert printed == "0 12 True True\ntorch.Size([1, 2])\n"


def test_a_compiled_ddp_step_has_no_more_graphs_and_no_warning_with_hooks(tmp_path: Path):
    printed = run_script(
        SETUP
        + """
import logging, tempfile, warnings
logging.disable(logging.WARNING)  # Torch says what it leaves out of a compiled DDP.
import torch, torch.distributed as dist
from torch._dynamo.testing import CompileCounter
store = tempfile.NamedTemporaryFile()
dist.init_process_group("gloo", init_method=f"file://{store.name}-x", rank=0, world_size=1)
inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 8))
model = torch.nn.parallel.DistributedDataParallel(inner)
x = torch.randn(4, 8)

def step(x):
    return model(x).sum()

def graphs():
    torch._dynamo.reset()
    counter = CompileCounter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            torch.compile(step, backend=counter)(x).backward()
        broken = torch._dynamo.explain(step)(x).graph_break_count
    return counter.frame_count, broken, [str(w.message)[:60] for w in caught if "trace the builtin" in str(w.message)]

plain = graphs()
install(page)
hooked = graphs()
print(plain == hooked, hooked, seen().groups[0].issued > 0)
del model
dist.destroy_process_group()
""",
        str(tmp_path),
    )
    assert printed == "True (1, 0, []) True\n"


def test_hooks_arrive_with_torch_and_leave_no_trace_in_the_import_system(tmp_path: Path):
    printed = run_script(
        SETUP
        + """
finders = list(sys.meta_path)
install_when_imported(page)
assert "torch" not in sys.modules and "numpy" not in sys.modules
assert not seen().has(Flag.TORCH_HOOKS)
import torch
print(sys.meta_path == finders, type(torch.__spec__.loader).__name__, vars(torch.__loader__).keys())
install_when_imported(page)
"""
        + TRAIN
        + "train(False); print(seen().steps, seen().has(Flag.TORCH_HOOKS), seen().has(Flag.PROCESS_GROUP))",
        str(tmp_path),
        has_torch=False,
    )
    assert printed == "True SourceFileLoader dict_keys(['name', 'path'])\n6 True False\n"


def test_an_import_that_fails_fails_as_it_would(tmp_path: Path):
    (tmp_path / "torch.py").write_text("raise ImportError('broken')")
    printed = run_script(
        SETUP
        + """
install_when_imported(page)
sys.path.insert(0, sys.argv[1])
for _ in range(2):
    try:
        import torch
    except ImportError as error:
        print(error, "torch" in sys.modules)
""",
        str(tmp_path),
        has_torch=False,
    )
    assert printed == "broken False\n" * 2


def test_something_else_named_torch_is_left_alone(tmp_path: Path):
    (tmp_path / "torch.py").write_text("here = 1")
    script = """
install_when_imported(page)
sys.path.insert(0, sys.argv[1])
import torch
print(torch.here, seen().flags)
"""
    assert run_script(SETUP + script, str(tmp_path), has_torch=False) == "1 0\n"


def test_errors_of_operators_modules_and_loaders_are_torchs_own(tmp_path: Path):
    printed = run_script(
        SETUP
        + """
import torch, torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
class Bad(torch.utils.data.Dataset):
    def __len__(self): return 1
    def __getitem__(self, index): raise KeyError("bad sample")
def errors():
    found = []
    for call in (
        lambda: dist.group.WORLD.allreduce([torch.ones(2), torch.ones(3)]),
        lambda: torch.ops.c10d.allreduce_(
            [torch.ones(2), torch.ones(3)], dist.group.WORLD.boxed(), torch.classes.c10d.ReduceOp(), None),
        lambda: torch.nn.Linear(2, 2)(torch.ones(3)),
        lambda: torch.ones(1).backward(),
        lambda: next(iter(torch.utils.data.DataLoader(Bad()))),
    ):
        try:
            call()
        except Exception as error:
            found.append((type(error).__name__, str(error).partition("Exception raised from")[0]))
    return found
plain = errors()
install(page)
assert errors() == plain, (plain, errors())
print(len(plain), seen().doing == Activity.NOTHING)
group = seen().groups[0]
print(group.name, group.size, group.issued >= 1)
dist.destroy_process_group()
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.barrier()
print([(g.issued, g.op) for g in seen().groups if g.at])
dist.destroy_process_group()
""",
        str(tmp_path),
    )
    assert printed == "5 True\n0 1 True\n[(1, 'barrier')]\n"


def test_workers_of_a_loader_do_not_write_to_the_page(tmp_path: Path):
    printed = run_script(
        SETUP
        + """
import torch
install(page)
class Busy(torch.utils.data.Dataset):
    def __len__(self): return 8
    def __getitem__(self, index):
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
        optimizer.step()
        return index
loader = torch.utils.data.DataLoader(Busy(), num_workers=2, multiprocessing_context="fork")
print(sorted(int(batch) for batch in loader), seen().steps, seen().pid == os.getpid())
""",
        str(tmp_path),
    )
    assert printed == f"{list(range(8))} 0 True\n"


def test_the_door_is_cheap(tmp_path: Path):
    script = "import sys, argosy.observe; print({'torch', 'numpy', 'asyncio'} & set(sys.modules))"
    assert run_script(script, has_torch=False) == "set()\n"
    assert os.listdir(tmp_path) == []
