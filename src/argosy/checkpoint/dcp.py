"""Write for torch.distributed.checkpoint, and read what it wrote, unpickling nothing but its description of tensors."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import io
import pickle
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from argosy.core import ConfigError

DICTS = "$dicts"
"""The value that says what DCP forgets, as it makes text of keys and leaves empty dicts out: (path, keys) of such."""
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
        if "." in name:
            raise ConfigError(f"the metadata names something that is not a description of tensors: {module}.{name}")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, None) in _ALLOWED or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ConfigError(f"the metadata names something that is not a description of tensors: {module}.{name}")


def write_dcp(content: Mapping[str, Any], target: Path) -> None:
    """Write nested dicts into a directory; if DCP alone would not keep all of them, `$dicts` has the rest.

    Raises:
        ConfigError: two things would have one name, as DCP makes names of keys.
    """
    import torch.distributed.checkpoint as dcp

    if DICTS in content:
        raise ConfigError(f"two things would be named {DICTS}", hint="export it as torch")
    odd = list(_odd_dicts(content, ()))
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # That there is one process is meant.
            dcp.save({**content, DICTS: odd} if odd else dict(content), checkpoint_id=target, no_dist=True)
    except dcp.CheckpointException as error:
        failure, _ = next(iter(error.failures.values()))
        if isinstance(failure, ValueError):
            raise ConfigError(f"DCP cannot hold it: {failure}", hint="export it as torch") from None
        raise failure from None


def _odd_dicts(value: Any, path: tuple[str | int, ...]) -> Iterator[tuple[tuple[str | int, ...], tuple[Any, ...]]]:
    """Where DCP would not keep a dict, and the keys that it has. Tuples are kept whole, whatever is in them."""
    if isinstance(value, Mapping):
        if not all(isinstance(key, str) for key in value) or not value:
            yield path, tuple(value)
        for key, inner in value.items():
            yield from _odd_dicts(inner, (*path, str(key)))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from _odd_dicts(inner, (*path, place))


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
    for path, keys in sorted(content.pop(DICTS, ()), key=lambda each: -len(each[0])):  # Inner ones first.
        if keys:
            _rename(content, path, keys)
        else:
            _put(content, path, {})
    return content


def _rename(content: Any, path: Sequence[Any], keys: Sequence[Any]) -> None:
    """Give the dict at `path` the keys of which DCP made text."""
    for key in path:
        content = content[key]
    by_text = dict(content)
    content.clear()
    content.update((key, by_text[str(key)]) for key in keys)


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
