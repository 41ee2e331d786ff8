"""FLOPs are counted on fake tensors, equal to the formula, and leave the live model alone."""

from ranks import run_script

SCRIPT = """
import logging, sys, threading
import torch
from argosy.observe.flops import count_step

class Block(torch.nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.qkv = heads, torch.nn.Linear(width, 3 * width, bias=False)
        self.out, self.up = torch.nn.Linear(width, width, bias=False), torch.nn.Linear(width, 4 * width, bias=False)
        self.down = torch.nn.Linear(4 * width, width, bias=False)
    def forward(self, x):
        q, k, v = (each.unflatten(-1, (self.heads, -1)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x + self.down(torch.nn.functional.gelu(self.up(x)))

class GPT(torch.nn.Module):
    def __init__(self, vocab, width, layers, heads):
        super().__init__()
        self.embed = torch.nn.Embedding(vocab, width)
        self.blocks = torch.nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.head = torch.nn.Linear(width, vocab, bias=False)
    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

with torch.device("meta"):
    large = GPT(1000, 768, 12, 12)
rows, length, width, layers = 4, 256, 768, 12
ids = torch.zeros(rows, length, dtype=torch.long, device="meta")
formula = rows * length * (2 * (12 * width * width * layers + 1000 * width) + 4 * length * width * layers)
counted = count_step(torch, large, (ids,), {}).forward
print(sum(each.numel() for each in large.parameters()) // 10**6, abs(counted / formula - 1) < 0.01)

model = GPT(100, 32, 2, 2)
ids = torch.randint(0, 100, (2, 16))
before = model(ids)
stop = threading.Event()
def count():
    while not stop.is_set():
        count_step(torch, model, (ids,), {})
thread = threading.Thread(target=count)
thread.start()
same = all(torch.equal(model(ids), before) for _ in range(300))
stop.set()
thread.join()
print(same, all(type(each) is torch.nn.Parameter and each.device.type == "cpu" for each in model.parameters()))

class Trainer:
    def __deepcopy__(self, memo):
        raise AssertionError("with it the training data would be copied")
model.last, model.losses, model._trainer = torch.ones(3), [torch.ones(2)], Trainer()
logged = []
logging.getLogger("torch._subclasses.fake_tensor").addFilter(lambda record: logged.append(record.getMessage()))
print(count_step(torch, model, (ids,), {}).forward > 0, logged, model.last.tolist())
"""

RECOMPUTED = """
import torch
from torch.utils.checkpoint import checkpoint
from argosy.observe.flops import bytes_by_role, count_step

class Model(torch.nn.Module):
    def __init__(self, again):
        super().__init__()
        self.again = again
        linear = lambda: torch.nn.Linear(64, 64, bias=False)
        self.blocks = torch.nn.ModuleList(torch.nn.Sequential(linear(), torch.nn.ReLU(), linear()) for _ in range(2))
    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return {"loss": x.square().mean()}

x = torch.randn(32, 64)
layer = 2 * 32 * 64 * 64
for again in (False, True):
    found = count_step(torch, Model(again), (x,), {})
    print(found.forward // layer, found.executed // layer, found.activation_bytes // (32 * 64 * 4))

model = Model(False)
optimizer = torch.optim.AdamW(model.parameters())
model(x)["loss"].backward()
optimizer.step()
print(bytes_by_role(model.parameters(), optimizer.state))
"""


def test_what_is_computed_again_counts_as_executed_and_memory_has_roles():
    weights = 4 * 64 * 64 * 4
    plain, again, memory = run_script(RECOMPUTED).splitlines()
    assert plain.split()[:2] == ["4", "11"]  # The first layer's input needs no gradient.
    assert again.split()[:2] == ["4", "13"]  # Torch stops as soon as it has what the second layer needs.
    assert int(again.split()[2]) < int(plain.split()[2])
    assert memory == str({"parameter_bytes": weights, "gradient_bytes": weights, "moment_bytes": 2 * weights + 4 * 4})


def test_the_count_equals_the_formula_and_a_model_that_trains_is_not_disturbed():
    assert run_script(SCRIPT) == "86 True\nTrue True\nTrue [] [1.0, 1.0, 1.0]\n"
