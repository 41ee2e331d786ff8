"""What a researcher edits and runs again: torch is imported, the first rank speaks."""

import os

import torch

TEXT = "before"
assert torch.ones(1).item() == 1.0
if os.environ.get("RANK", "0") == "0":
    print(f"line {TEXT}", flush=True)
