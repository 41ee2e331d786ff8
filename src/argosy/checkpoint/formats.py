"""Others' formats: Hugging Face safetensors, torch.distributed.checkpoint, torch.save. Pickle is read restricted."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import json
import mmap
import warnings
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint.asking import STEP_MAX
from argosy.checkpoint.dcp import read_dcp, reason_of
from argosy.checkpoint.format import StepNotFound, header
from argosy.checkpoint.inspecting import list_steps, opened
from argosy.checkpoint.nested import MODELS, NAMES, holds_values, nested, of_modules, state_of
from argosy.checkpoint.reading import Step
from argosy.checkpoint.restoring import Restored, restore
from argosy.checkpoint.retention import KeepEvery
from argosy.checkpoint.saver import Saver, warn
from argosy.core import ConfigError
from argosy.transfer import from_safetensors, torch_dtypes

FORMATS = ("hf", "dcp", "torch")
CONFIG = "$config"
"""The value that is a Hugging Face model's config.json."""
SHARD_BYTES = 5_000_000_000


def export(path: str | Path, kind: str, target: str | Path, step: int | None = None) -> Restored:
    """Write a step in another format: `torch` and `dcp` hold everything (`nested` says how), `hf` the model's weights.

    What is returned has the tensors that were written and their bytes; `unused` names what was left out.

    Raises:
        ConfigError: the format is unknown, the target exists, or there is nothing that the format could hold.
    """
    if kind not in FORMATS:
        raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"it exists: {target}", hint="remove it, or choose another name")
    chosen, found = _committed(path, step)
    if kind == "hf":
        weights = _weights(chosen, found.tensors)
        written = {id(tensor) for tensor in weights.values()}
        found.unused = sorted(name for name, tensor in found.tensors.items() if id(tensor) not in written)
        found.unused += [name for name in found.values if name != CONFIG and holds_values(found.values[name])]
        found.tensors = weights
        target.mkdir(parents=True, exist_ok=True)
        _export_hf(chosen, weights, target)
    elif kind == "torch":
        if target.is_dir():
            raise ConfigError(f"it is a directory: {target}", hint="torch.save writes a file: name one")
        target.parent.mkdir(parents=True, exist_ok=True)
        torch.save(nested(chosen, found.tensors), target)
    else:
        target.mkdir(parents=True, exist_ok=True)
        _export_dcp(nested(chosen, found.tensors), target)
    found.bytes = sum({id(tensor): tensor.nbytes for tensor in found.tensors.values()}.values())
    return found


def _committed(path: str | Path, step: int | None) -> tuple[Step, Restored]:
    """A step with its tensors: the asked one, or the newest that is committed, not only in a keeper's memory."""
    found = restore(path, step=step)
    try:
        return opened(path, found.step), found
    except StepNotFound:
        if step is not None:
            raise
        chosen = opened(path, None)
        return chosen, restore(path, step=chosen.root.step)


def _export_dcp(content: dict[str, Any], target: Path) -> None:
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is one process is meant.
            dcp.save(content, checkpoint_id=target, no_dist=True)
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        raise failure from None


def _weights(step: Step, tensors: Mapping[str, Any]) -> dict[str, Any]:
    """What a model consists of, tied weights once: the modules' tensors, else those of a dict that is called so."""
    found = of_modules(step, tensors)
    if not found:
        shared = {name: tensor for name, tensor in tensors.items() if "/" not in name}
        named = [(name, name.partition(".")) for name in shared]
        found = {rest: shared[name] for name, (first, _, rest) in named if first in MODELS and rest} or shared
    if not found:
        raise ConfigError(f"step {step.root.step} holds no tensors that hf could", hint="export it as torch or dcp")
    once: dict[int, str] = {}
    for name, tensor in found.items():
        once.setdefault(id(tensor), name)
    return {name: found[name] for name in once.values()}


def _export_hf(step: Step, weights: Mapping[str, Any], target: Path) -> None:
    """Several files and an index if they are large, as transformers does."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if size and size + tensor.nbytes > SHARD_BYTES:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += tensor.nbytes
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
    config = step.values.get(CONFIG)
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2))


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write one safetensors file; wide cells first, so that all are aligned."""
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    listed = [(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape), tensors[name].nbytes) for name in order]
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
        if not path.stat().st_size:
            raise ConfigError(f"not a safetensors file: {path}")
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    length = int.from_bytes(mapped[:8], "little")
    if length > len(mapped) - 8:
        raise ConfigError(f"not a safetensors file: {path}")
    try:
        listed = from_safetensors(mapped[8 : 8 + length])
    except (ConfigError, UnicodeDecodeError) as error:
        raise ConfigError(f"not a safetensors file: {path}: {error}") from None
    found: dict[str, torch.Tensor] = {}
    for name, (dtype, layout, offset) in listed.items():
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


def read_foreign(kind: str, source: Path) -> tuple[Any, list[str]]:
    """What files of another format hold, tensors in nested dicts, and the names of what was not read.

    Raises:
        ConfigError: they are not of this format.
    """
    if kind == "hf":
        files = [source] if source.is_file() else sorted(source.glob("*.safetensors"))
        if not files:
            raise ConfigError(f"no safetensors file in {source}")
        return {name: tensor for file in files for name, tensor in read_safetensors(file).items()}, []
    if kind == "torch":
        return _read_torch(source), []
    if kind == "dcp":
        return read_dcp(source)
    raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")


def _read_torch(source: Path) -> Any:
    if source.is_dir():
        raise ConfigError(f"torch.save writes a file, this is a directory: {source}")
    try:
        return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except OSError:
        raise
    except Exception as error:  # Torn or foreign bytes make it raise anything.
        raise ConfigError(
            f"{source} cannot be read as tensors and plain values: {reason_of(error)}",
            hint="objects of other classes are never unpickled: save a state_dict and plain values",
        ) from None


def _config(source: Path) -> dict[str, Any]:
    """The configuration beside the weights of a Hugging Face model."""
    path = source / "config.json"
    try:
        return {CONFIG: json.loads(path.read_text())} if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def import_(
    kind: str, source: str | Path, path: str | Path, step: int | None = None, *, say: Callable[[str], None] = warn
) -> int:
    """Make a committed step (0 if not given) of another format's files; returns how many tensors it has.

    `say` is told what could not be kept.

    Raises:
        ConfigError: they are not of this format, hold no tensor, or there is a step 0 and no other was asked for.
    """
    if step is not None and not 0 <= step <= STEP_MAX:
        raise ConfigError(f"no such step can be: {step}", hint="steps are counted from 0, in up to twelve digits")
    if step is None and any(each.step == 0 for each in list_steps(path)):
        raise ConfigError(f"step 0 is there already: {path}", hint="say which step it becomes: --step, or step=")
    content, unread = read_foreign(kind, Path(source))
    state, left = state_of(content)
    if kind == "hf":
        state.values |= _config(Path(source))
    count = sum(len(unit.members) + len(unit.aliases) for unit in state.units.values())
    if not count:
        raise ConfigError(f"no tensor in {source}")
    for name in (*unread, *left):
        say(f"left out {name}")
    with Saver(path, keep=[KeepEvery(1)]) as saver:  # Nothing that is there goes for it.
        saver.save(state, step or 0).wait()
    return count
