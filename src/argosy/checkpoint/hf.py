"""A model as Hugging Face keeps it: safetensors files, an index if they are several, and config.json.

H1  What an index names is read whole or not at all: half a model would look like a whole one.
H2  What is written has the dtype and shape that it was saved with, or is refused.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import json
import mmap
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import torch

from argosy.checkpoint.format import ROOT, header
from argosy.checkpoint.nested import NAMES
from argosy.core import ConfigError
from argosy.transfer import from_safetensors, torch_dtypes

CONFIG = "$config"
"""The value that is a Hugging Face model's config.json."""
SHARD_BYTES = 5_000_000_000
INDEX = ".safetensors.index.json"
ONE_OF_THEM = "import one of them by its own name"
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def write_hf(weights: Mapping[str, Any], config: Any, target: Path, shard_bytes: int = SHARD_BYTES) -> None:
    """Write a model into a directory: several files and an index if it is large, as transformers does.

    Raises:
        ConfigError: safetensors has no such dtype.
    """
    _check_dtypes(weights)
    shards: list[list[str]] = [[]]
    size = 0
    for name, tensor in weights.items():
        if size and size + tensor.nbytes > shard_bytes:
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
        (target / f"model{INDEX}").write_text(json.dumps(index, indent=2))
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2))


def write_safetensors(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write one safetensors file; wide cells first, so that all are aligned.

    Raises:
        ConfigError: safetensors has no such dtype.
    """
    _check_dtypes(tensors)
    order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
    listed = [(name, NAMES[tensors[name].dtype], tuple(tensors[name].shape), tensors[name].nbytes) for name in order]
    with path.open("wb") as file:
        file.write(header(listed, {"format": "pt"}))
        for name in order:
            file.write(tensors[name].contiguous().flatten().view(torch.uint8).numpy().data)


def _check_dtypes(tensors: Mapping[str, Any]) -> None:
    """Refuse what could only be written as another tensor (H2): our own segments say F64 for it, with a dimension more.

    Raises:
        ConfigError: there is such a tensor.
    """
    wide = [name for name, tensor in tensors.items() if tensor.dtype == torch.complex128]
    if wide:
        raise ConfigError(
            f"safetensors has no complex128: {some(wide)}",
            hint="export it as torch or dcp, or save it as complex64, or as the real numbers of torch.view_as_real",
        )


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
        found[name] = torch.empty(layout.shape, dtype=kind, device="cpu") if flat is None else flat.view(layout.shape)
    return found


def read_hf(source: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a file, of the files that an index names, or of all files of a directory; and what was not read.

    Raises:
        ConfigError: they are not safetensors, some of them are missing, or it is not clear which count.
    """
    if source.is_file() and not source.name.endswith(INDEX):
        return read_safetensors(source), []
    if (source / ROOT).is_file():
        raise ConfigError(f"a step of Argosy, not of Hugging Face: {source}", hint="restore it, or export it as hf")
    index = source if source.is_file() else _index_in(source)
    if index is not None:
        return _read_indexed(index)
    files = sorted(source.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"no safetensors file in {source}")
    _check_numbers(files)
    return _merged((file.name, read_safetensors(file)) for file in files), []


def _index_in(directory: Path) -> Path | None:
    """The index of a directory, if it has one.

    Raises:
        ConfigError: there is another whole model beside it, or several, and none has the usual name.
    """
    found = sorted(directory.glob(f"*{INDEX}"))
    usual = directory / f"model{INDEX}"
    if len(found) > 1 and usual not in found:
        raise ConfigError(f"several indexes in {directory}: {some([each.name for each in found])}", hint=ONE_OF_THEM)
    index = usual if usual in found else found[0] if found else None
    if index is not None:
        whole = index.with_name(f"{index.name.removesuffix(INDEX)}.safetensors")
        if whole.is_file() and whole.name not in _homes(index).values():
            raise ConfigError(f"{whole.name} and {index.name} are both a model: {directory}", hint=ONE_OF_THEM)
    return index


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _homes(index: Path) -> dict[str, str]:
    """The file of each tensor, as an index says it."""
    try:
        return msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not an index of safetensors files: {index}: {error}") from None


def _read_indexed(index: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What an index names (H1), and what its files hold besides; a second copy of a tensor is not read.

    Raises:
        ConfigError: a file is missing, or does not have what the index says.
    """
    homes = _homes(index)
    files = sorted(set(homes.values()))
    missing = [file for file in files if not (index.parent / file).is_file()]
    if missing:
        raise ConfigError(
            f"{index} names files that are not there: {some(missing)}",
            hint="nothing was imported: the model is not whole without them",
        )
    held = {file: read_safetensors(index.parent / file) for file in files}
    lost = [
        f"{name} in {file}" + "".join(f" (it is in {other})" for other in files if name in held[other])
        for name, file in homes.items()
        if name not in held[file]
    ]
    if lost:
        raise ConfigError(
            f"{index} names tensors that are not there: {some(lost)}",
            hint="nothing was imported: its files are of another model, or another version of it",
        )
    unread: list[str] = []
    for file, tensors in held.items():
        for name in [each for each in tensors if homes.get(each, file) != file]:
            del tensors[name]
            unread.append(f"{name} of {file} (the index takes that of {homes[name]})")
    others = sorted(each.name for each in index.parent.glob("*.safetensors") if each.name not in held)
    return _merged(held.items()), [*unread, *(f"{name} ({index.name} does not name it)" for name in others)]


def _merged(files: Iterable[tuple[str, Mapping[str, torch.Tensor]]]) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    homes: dict[str, str] = {}
    for file, tensors in files:
        for name, tensor in tensors.items():
            if name in found:
                raise ConfigError(f"two files hold {name}: {homes[name]} and {file}", hint=ONE_OF_THEM)
            found[name], homes[name] = tensor, file
    return found


def _check_numbers(files: Sequence[Path]) -> None:
    """Without an index, the names of files still say how many there were.

    Raises:
        ConfigError: some are missing.
    """
    names = {file.name for file in files}
    missing: list[str] = []
    for title, one, count in sorted({match.groups() for name in names if (match := _NUMBERED.fullmatch(name))}):
        for number in range(1, int(count) + 1):
            name = f"{title}-{number:0{len(one)}d}-of-{count}.safetensors"
            if name not in names and name not in missing:
                missing.append(name)
    if missing:
        raise ConfigError(
            f"files are missing in {files[0].parent}: {some(missing)}",
            hint="the model is not whole without them; a part of it is imported by the name of its file",
        )


def read_config(source: Path) -> dict[str, Any]:
    """The configuration beside the weights of a Hugging Face model, as the value that goes with them."""
    path = (source.parent if source.name.endswith(INDEX) else source) / "config.json"
    try:
        return {CONFIG: json.loads(path.read_text())} if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}") from None


def some(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
