"""Which accelerators this host has, without initialising one: from the environment, or the kernel's device files."""

import re
from collections.abc import Mapping
from pathlib import Path

from argosy.core import ConfigError

_GPU = re.compile(r"nvidia\d+")


def list_accelerators(environment: Mapping[str, str], files: Path = Path("/dev")) -> list[str]:
    """The GPUs that ranks may use, as CUDA_VISIBLE_DEVICES names them."""
    text = environment.get("CUDA_VISIBLE_DEVICES")
    if text is not None:
        return [each.strip() for each in text.split(",") if each.strip()]
    found = sorted(int(path.name.removeprefix("nvidia")) for path in files.iterdir() if _GPU.fullmatch(path.name))
    return [str(number) for number in found]


def count_ranks(text: str, accelerators: list[str], cpus: int, spare: int = 0) -> int:
    """How many ranks `-n TEXT` means: `gpu` one per accelerator that is not `spare`, `auto` the same or one per CPU.

    Raises:
        ConfigError: it is no number, or there is no accelerator.
    """
    if text == "auto" and accelerators:
        text = "gpu"
    if spare and text != "gpu":
        raise ConfigError(f"--spare-gpus needs -n gpu, and GPUs: -n {text}", hint="argosy run -n gpu --spare-gpus 1")
    if text in ("cpu", "auto"):
        return cpus
    if text == "gpu":
        if not accelerators:
            raise ConfigError("no GPU was found for -n gpu", hint="give a number, or look at CUDA_VISIBLE_DEVICES")
        if spare >= len(accelerators):
            raise ConfigError(f"--spare-gpus {spare} leaves no GPU for a rank: there are {len(accelerators)}")
        return len(accelerators) - spare
    if text == "xpu":
        raise ConfigError("only NVIDIA GPUs are counted: -n xpu", hint="give a number")
    if not text.removeprefix("-").isdecimal():
        raise ConfigError(f"-n must be a number, gpu, cpu or auto: {text!r}")
    return int(text)


def one_per_rank(text: str | None, size: int, spare: int, accelerators: list[str]) -> tuple[list[str], list[str]]:
    """The only accelerator that each rank sees under `-n gpu`, and under `-n auto` if there are any; the spare ones."""
    if text not in ("gpu", "auto") or len(accelerators) != size + spare:
        return [], []
    return accelerators[:size], accelerators[size:]
