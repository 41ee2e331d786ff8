"""Others' formats: Hugging Face safetensors, torch.distributed.checkpoint, torch.save. Pickle is read restricted."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import json
import mmap
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint.format import header
from argosy.checkpoint.restoring import Restored, restore
from argosy.checkpoint.saver import Saver
from argosy.core import ConfigError
from argosy.transfer import Member, State, Unit, from_safetensors, replicated, role_of, torch_dtypes

FORMATS = ("hf", "dcp", "torch")
SHARD_BYTES = 5_000_000_000
_NAMES = {dtype: name for name, dtype in torch_dtypes.items()}


def export(path: str | Path, kind: str, target: str | Path, step: int | None = None) -> Restored:
    """Write a step in another format: `hf` and `torch` hold parameters and buffers, `dcp` everything.

    Raises:
        ConfigError: the format is unknown, or the target exists.
    """
    if kind not in FORMATS:
        raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")
    target = Path(target)
    if target.exists() and (target.is_file() or any(target.iterdir())):
        raise ConfigError(f"it exists: {target}", hint="remove it, or choose another name")
    found = restore(path, step=step)
    weights = {name: tensor for name, tensor in found.tensors.items() if "::" not in name}
    if kind == "hf":
        target.mkdir(parents=True, exist_ok=True)
        _export_hf(found, weights, target)
    elif kind == "torch":
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(weights, target)
    else:
        import torch.distributed.checkpoint as dcp

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is one process is meant.
            dcp.save(found.tensors, checkpoint_id=target, no_dist=True)
    return found


def _export_hf(found: Restored, weights: Mapping[str, Any], target: Path) -> None:
    """Tied weights once, as transformers does; several files and an index if they are large."""
    once: dict[int, str] = {}
    for name, tensor in weights.items():
        if _is_of_model(name, found):
            once.setdefault(id(tensor), name)
    shards: list[list[str]] = [[]]
    size = 0
    for name in once.values():
        count = weights[name].nbytes
        if size and size + count > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += count
    files: dict[str, str] = {}
    for number, names in enumerate(shards, start=1):
        one = len(shards) == 1
        file = "model.safetensors" if one else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        write_safetensors(target / file, {name: weights[name] for name in names})
        files |= dict.fromkeys(names, file)
    if len(shards) > 1:
        total = sum(weights[name].nbytes for name in files)
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (target / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
    config = found.values.get("$config")
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2))


def _is_of_model(name: str, found: Restored) -> bool:
    """Tensors of schedules and generators are not the model's."""
    others = [other for other in found.values if not other.startswith("$")]
    return not any(name == other or name.startswith(f"{other}.") for other in others)


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write one safetensors file; wide cells first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    listed = [(name, _NAMES[tensors[name].dtype], tuple(tensors[name].shape), tensors[name].nbytes) for name in order]
    with path.open("wb") as file:
        file.write(header(listed, {"format": "pt"}))
        for name in order:
            file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, mapped, not copied.

    Raises:
        ConfigError: it is no safetensors file, or too short.
    """
    with path.open("rb") as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(mapped[:8], "little")
    if length > len(mapped) - 8:
        raise ConfigError(f"not a safetensors file: {path}")
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, layout, offset) in from_safetensors(mapped[8 : 8 + length]).items():
        if dtype not in torch_dtypes:
            raise ConfigError(f"{name} has an unknown dtype: {dtype}")
        cells = 1
        for size in layout.shape:
            cells *= size
        kind = torch_dtypes[dtype]
        if 8 + length + offset + cells * kind.itemsize > len(mapped):
            raise ConfigError(f"{path} ends before {name}")
        flat = torch.frombuffer(mapped, dtype=kind, count=cells, offset=8 + length + offset) if cells else None
        found[name] = torch.empty(layout.shape, dtype=kind) if flat is None else flat.view(layout.shape)
    return found


def read_foreign(kind: str, source: Path) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """The tensors of another format by name, and what else it holds."""
    if kind == "hf":
        files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no safetensors file in {source}")
        tensors = {name: tensor for file in files for name, tensor in read_safetensors(file).items()}
        config = source / "config.json"
        return tensors, {"$config": json.loads(config.read_text())} if config.is_file() else {}
    if kind == "torch":
        return flattened(torch.load(source, map_location="cpu", weights_only=True, mmap=True)), {}
    if kind == "dcp":
        from argosy.checkpoint.dcp import read_dcp

        return read_dcp(source), {}
    raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")


def flattened(content: Any, prefix: str = "") -> dict[str, torch.Tensor]:
    """The tensors of nested dicts and lists, by dotted names."""
    if isinstance(content, torch.Tensor):
        return {prefix: content}
    items = content.items() if isinstance(content, Mapping) else enumerate(content)
    found: dict[str, torch.Tensor] = {}
    for key, value in items if isinstance(content, Mapping | list | tuple) else ():
        found |= flattened(value, f"{prefix}.{key}" if prefix else str(key))
    return found


def import_(kind: str, source: str | Path, path: str | Path, step: int = 0) -> int:
    """Make a committed step of another format's files; returns how many tensors it has."""
    tensors, values = read_foreign(kind, Path(source))
    state = State(values=values)
    seen: dict[tuple[int, tuple[int, ...], Any], str] = {}
    for name, tensor in sorted(tensors.items()):
        unit, _, key = name.partition("::")
        first = (
            seen.setdefault((tensor.data_ptr(), tuple(tensor.shape), tensor.dtype), name) if tensor.numel() else name
        )
        if first != name and not key:
            state.units[first].aliases += (name,)
            continue
        role = role_of(key, tuple(tensor.shape)) if key else "parameter"
        member = Member(key or "parameter", role, _NAMES[tensor.dtype], replicated(tuple(tensor.shape)), tensor)
        state.units.setdefault(unit, Unit(unit)).members[member.key] = member
    with Saver(path) as saver:
        saver.save(state, step).wait()
    return len(tensors)
