"""A model as Hugging Face keeps it: safetensors files, an index if they are several, and config.json.

H1  What an index names is read whole or not at all: half a model would look like a whole one.
H2  What is written has the dtype and shape that it was saved with, or is refused.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import torch

from argosy.checkpoint.format import ROOT
from argosy.checkpoint.restore_plan import some
from argosy.core import ConfigError

CONFIG = "$config"
"""The value that is a Hugging Face model's config.json."""
INDEX = ".safetensors.index.json"
ONE_OF_THEM = "import one of them by its own name"
_NUMBER = re.compile(r"os error (\d+)")
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")


def write_hf(weights: Mapping[str, torch.Tensor], config: Any, target: Path) -> None:
    """Write a model into a directory, as one file.

    Raises:
        ConfigError: safetensors has no such dtype.
    """
    wide = [name for name, tensor in weights.items() if tensor.dtype == torch.complex128]
    if wide:  # H2
        raise ConfigError(
            f"safetensors has no complex128: {some(wide)}",
            hint="export it as torch or dcp, or save it as complex64, or as the real numbers of torch.view_as_real",
        )
    whole, file = {name: tensor.contiguous() for name, tensor in weights.items()}, target / "model.safetensors"
    try:
        _library("safetensors.torch").save_file(whole, file, {"format": "pt"})
    except _library("safetensors").SafetensorError as error:
        number = _NUMBER.search(str(error))
        raise OSError(int(number[1]), os.strerror(int(number[1])), file) if number else error from None
    if config is not None:
        (target / "config.json").write_text(json.dumps(config, indent=2))


def read_safetensors(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file."""
    try:
        return _library("safetensors.torch").load_file(path)
    except _library("safetensors").SafetensorError as error:
        raise ConfigError(f"not a safetensors file: {path}: {error}") from None


def _library(module: str) -> Any:
    try:
        return import_module(module)
    except ImportError:
        raise ConfigError("Hugging Face's format needs safetensors", hint="pip install safetensors") from None


def read_hf(source: Path) -> tuple[dict[str, torch.Tensor], list[str]]:
    """The tensors of a file, of the files of an index, or of all files of a directory; and what was not read."""
    if source.is_file() and not source.name.endswith(INDEX):
        return read_safetensors(source), []
    if (source / ROOT).is_file():
        raise ConfigError(f"a step of Argosy, not of Hugging Face: {source}", hint="restore it, or export it as hf")
    indexes = [source] if source.is_file() else sorted(source.glob(f"*{INDEX}"))
    if len(indexes) > 1:
        raise ConfigError(f"several indexes in {source}: {some([each.name for each in indexes])}", hint=ONE_OF_THEM)
    files = sorted(indexes[0].parent.glob("*.safetensors")) if indexes else sorted(source.glob("*.safetensors"))
    if indexes:
        return _read_indexed(indexes[0], files)
    if not files:
        raise ConfigError(f"no safetensors file in {source}")
    _check_numbers(files)
    found: dict[str, torch.Tensor] = {}
    for file in files:
        tensors = read_safetensors(file)
        if twice := sorted(found.keys() & tensors):
            raise ConfigError(f"two files hold {twice[0]}: {file.name} is the second", hint=ONE_OF_THEM)
        found |= tensors
    return found, []


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def _read_indexed(index: Path, files: Sequence[Path]) -> tuple[dict[str, torch.Tensor], list[str]]:
    """What an index names (H1), what its files hold besides, and which files it does not name."""
    try:
        homes = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"not an index of safetensors files: {index}: {error}") from None
    held = {file.name: read_safetensors(file) for file in files if file.name in set(homes.values())}
    if lost := [f"{name} in {file}" for name, file in homes.items() if name not in held.get(file, ())]:
        raise ConfigError(
            f"{index} names tensors that are not there: {some(lost)}",
            hint="nothing was imported: a file is missing, or of another version of the model",
        )
    besides = {name: tensor for tensors in held.values() for name, tensor in tensors.items()}
    found = besides | {name: held[file][name] for name, file in homes.items()}
    return found, [f"{file.name} ({index.name} does not name it)" for file in files if file.name not in held]


def _check_numbers(files: Sequence[Path]) -> None:
    """Without an index, the names of files still say how many there were."""
    names = {file.name for file in files}
    parts = {match.groups() for name in names if (match := _NUMBERED.fullmatch(name))}
    wanted = {
        f"{t}-{n:0{len(one)}d}-of-{count}.safetensors" for t, one, count in parts for n in range(1, int(count) + 1)
    }
    if missing := sorted(wanted - names):
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
