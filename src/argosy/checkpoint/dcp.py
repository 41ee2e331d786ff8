"""Write for torch.distributed.checkpoint, and read what it wrote, unpickling nothing but its description of tensors."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import io
import pickle
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from argosy.core import ConfigError

_ALLOWED = {
    ("torch.distributed.checkpoint.metadata", None),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("torch._utils", "_rebuild_tensor_v2"),
    ("torch", "Size"),
    ("torch", "device"),
    ("pathlib", "PosixPath"),
    ("pathlib", "Path"),
    ("collections", "OrderedDict"),
    ("builtins", "set"),
}


class _Restricted(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if "." not in name and (is_dtype or (module, None) in _ALLOWED or (module, name) in _ALLOWED):
            return super().find_class(module, name)
        raise ConfigError(f"the metadata names something that is not a description of tensors: {module}.{name}")


def write_dcp(content: Mapping[str, Any], target: Path) -> None:
    """Write nested dicts into a directory. DCP makes text of their keys, and leaves empty dicts out.

    Raises:
        ConfigError: two things would have one name, as DCP makes names of keys.
    """
    import torch.distributed.checkpoint as dcp

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is one process is meant.
            dcp.save(dict(content), checkpoint_id=target, no_dist=True)
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, ValueError):
            raise ConfigError(f"DCP cannot hold it: {failure}", hint="export it as torch") from None
        raise failure from None


def reason_of(error: Exception) -> str:
    """What torch's unpickler complains of, without its advice."""
    text = str(error).strip() or type(error).__name__
    text = text.partition("WeightsUnpickler error: ")[2].strip() or text
    return text.partition("\n")[0].partition(". ")[0][:200]


def read_dcp(directory: Path) -> tuple[dict[str, Any], list[str]]:
    """What a DCP directory holds, nested as it was saved, tensors whole; and the names of what is not plain.

    Raises:
        ConfigError: it is none, its metadata would run code, or a tensor is not whole.
    """
    path = directory / ".metadata"
    if not path.is_file():
        raise ConfigError(f"no DCP checkpoint: {directory}")
    try:
        with path.open("rb") as file:
            metadata: Any = _Restricted(file).load()
        found, left = _read(directory, metadata)
        return _nested(found, metadata.planner_data or {}), left
    except FileNotFoundError as error:
        raise ConfigError(f"{directory} is not whole: there is no {error.filename}") from None
    except (ConfigError, OSError):
        raise
    except Exception as error:  # Torn or foreign bytes make unpicklers raise anything.
        raise ConfigError(f"{directory} cannot be read as DCP: {reason_of(error)}") from None


def _nested(found: Mapping[str, Any], paths: Mapping[str, Any]) -> dict[str, Any]:
    """The dicts that DCP took apart, in the order that they had: files are filled in another one."""
    content: dict[str, Any] = {}
    for name in [*(each for each in paths if each in found), *(each for each in found if each not in paths)]:
        _put(content, paths.get(name, (name,)), found[name])
    return content


def _read(directory: Path, metadata: Any) -> tuple[dict[str, Any], list[str]]:
    """Tensors and plain values by DCP's names for them."""
    found: dict[str, Any] = {}
    filled: dict[str, int] = {}
    left: list[str] = []
    for index, info in metadata.storage_data.items():
        description = metadata.state_dict_metadata.get(index.fqn)
        with (directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        if not hasattr(description, "chunks"):
            try:
                found[index.fqn] = torch.load(data, map_location="cpu", weights_only=True)
            except pickle.UnpicklingError as error:
                left.append(f"{index.fqn} ({reason_of(error)})")
            continue
        piece = torch.load(data, map_location="cpu", weights_only=True)
        whole = found.get(index.fqn)
        if whole is None:
            whole = found[index.fqn] = torch.empty(description.size, dtype=description.properties.dtype, device="cpu")
        offsets = index.offset if index.offset is not None else [0] * whole.dim()
        whole[tuple(slice(a, a + n) for a, n in zip(offsets, piece.shape, strict=True))] = piece
        filled[index.fqn] = filled.get(index.fqn, 0) + piece.numel()
    for name, cells in filled.items():
        if cells < found[name].numel():
            raise ConfigError(f"{name} is not whole: {cells} of {found[name].numel()} cells")
    stored = {index.fqn for index in metadata.storage_data}
    for name, description in metadata.state_dict_metadata.items():
        if name not in stored and getattr(description, "size", None) and description.size.numel() == 0:
            found[name] = torch.empty(description.size, dtype=description.properties.dtype, device="cpu")
        elif name not in stored:
            raise ConfigError(f"{name} is not whole: no file has it")
    return found, left


def _put(content: Any, path: Sequence[Any], value: Any) -> None:
    """Put a value where DCP took it from: numbers count the places of a list."""
    key, *rest = path
    if isinstance(key, int):
        content += [None] * (key + 1 - len(content))
    if not rest:
        content[key] = value
        return
    inner = content[key] if isinstance(key, int) else content.get(key)
    if inner is None:
        inner = content[key] = [] if isinstance(rest[0], int) else {}
    _put(inner, rest, value)
