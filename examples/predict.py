"""A training that `argosy plan` and `argosy sim` understand: the model of gpt.py, 8 billion parameters.

    argosy plan examples/predict.py --chips 64xh100 --rows 128
    argosy sim step examples/predict.py --recipe "fsdp=8 dtype=bf16" --slow 3:1.1

Nothing is allocated and no GPU is needed. `argosy plan` takes a minute. Expect a table of recipes, fastest first.
"""

import torch
from gpt import GPT, Config, loss_of

from argosy.graph import Training

LENGTH = 8192
SIZE = Config(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=LENGTH,
)

training = Training(
    model=lambda: GPT(SIZE),
    batch=lambda rows: (torch.zeros(rows, LENGTH, dtype=torch.long),) * 2,
    loss=lambda model, tokens, targets: loss_of(model(tokens), targets),
    optimizer=torch.optim.AdamW,
)

if __name__ == "__main__":
    from argosy.cost import Recipe, load_chip
    from argosy.graph import Planner

    found = Planner(training).predict(Recipe(fsdp=8, dtype="bf16"), load_chip("h100"))
    print(f"predicted, not measured: {found.step_s:.2f} s per step, {found.memory_bytes / 1e9:.0f} GB")
