"""The emulated accelerator `emul`: built once for each torch, then loaded; emulated/accelerator.cpp is the device."""

# pyright: reportUnknownLambdaType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import hashlib
import importlib.util
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch

SOURCE = Path(__file__).parent / "emulated" / "accelerator.cpp"


def build() -> Path:
    """The compiled extension; the first call with a torch or a source takes half a minute."""
    digest = hashlib.blake2s(SOURCE.read_bytes() + torch.__version__.encode(), digest_size=6).hexdigest()
    name = f"emul_{digest}"
    cache = Path(os.environ.get("ARGOSY_TEST_CACHE", Path.home() / ".cache" / "argosy-tests"))
    built = cache / f"{name}.so"
    if not built.exists():
        from torch.utils.cpp_extension import load

        cache.mkdir(parents=True, exist_ok=True)
        # In a place of its own: torch waits for ever for the lock of a build that was killed.
        with tempfile.TemporaryDirectory(dir=cache) as place:
            load(name, [str(SOURCE)], extra_cflags=["-O0", "-w"], build_directory=place, is_python_module=False)
            os.replace(Path(place, f"{name}.so"), built)
    return built


def load_accelerator() -> Any:
    """Give torch the device `emul`; returns its switches."""
    if "torch.emul" in sys.modules:
        return sys.modules["torch.emul"].switches
    built = build()
    spec = importlib.util.spec_from_file_location(built.stem, built)
    assert spec is not None
    assert spec.loader is not None
    switches = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(switches)
    module: Any = types.ModuleType("torch.emul")
    module.switches = switches
    module.is_available = module.is_initialized = lambda: True
    module._is_in_bad_fork = lambda: False
    module.device_count = lambda: 1
    module.current_device = lambda: 0
    module.set_device = lambda device: None
    module.default_generators = [torch.default_generator]
    module.manual_seed_all = lambda seed: None
    module.get_rng_state = lambda device=None: torch.get_rng_state()
    module.set_rng_state = lambda state, device=None: torch.set_rng_state(state)
    module.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]
    for name in ("synchronize", "current_stream", "set_stream"):
        setattr(module, name, getattr(torch.accelerator, name))
    module.Stream, module.Event = torch.Stream, torch.Event
    module.stream = lambda stream: stream
    torch.utils.rename_privateuse1_backend("emul")
    torch._register_device_module("emul", module)
    torch.utils.generate_methods_for_privateuse1_backend()
    return switches
