"""The device of a script of bench/gpu.py: `cuda`, `cpu`, or the emulated accelerator of the tests."""

import os
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

COPY_S = 0.01
"""What each copy takes on the emulated accelerator."""


def open_device(name: str) -> Any:
    """Choose this rank's device; returns the switches of the emulated accelerator, else None."""
    if name == "emul":
        sys.path.append(str(Path(__file__).parents[2] / "tests"))
        switches: Any = import_module("emulation").load_accelerator()
        switches.set_copy_seconds(COPY_S)
        return switches
    if name != "cpu":
        torch.accelerator.set_device_index(int(os.environ["LOCAL_RANK"]))
    return None


def report_error(name: str, switches: Any) -> None:
    """Have the device report an error that stays: the next operations fail, some of them later."""
    if name == "emul":
        switches.fail_next_copy()
        torch.empty(1, pin_memory=True).copy_(torch.ones(1, device=name), non_blocking=True)
    else:  # An index out of range: the kernel's assertion fails.
        torch.zeros(4, device=name)[torch.tensor([2**20], device=name)]
