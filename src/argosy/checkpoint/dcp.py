"""Read what torch.distributed.checkpoint wrote, unpickling nothing but its own description of tensors."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

import io
import pickle
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
        if "." in name:
            raise ConfigError(f"the metadata names something that is not a description of tensors: {module}.{name}")
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, None) in _ALLOWED or (module, name) in _ALLOWED:
            return super().find_class(module, name)
        raise ConfigError(f"the metadata names something that is not a description of tensors: {module}.{name}")


def read_dcp(directory: Path) -> dict[str, torch.Tensor]:
    """The tensors of a DCP directory, whole.

    Raises:
        ConfigError: it is none, its metadata would run code, or a tensor is not whole.
    """
    path = directory / ".metadata"
    if not path.is_file():
        raise ConfigError(f"no DCP checkpoint: {directory}")
    with path.open("rb") as file:
        metadata: Any = _Restricted(file).load()
    tensors: dict[str, torch.Tensor] = {}
    filled: dict[str, int] = {}
    for index, info in metadata.storage_data.items():
        description = metadata.state_dict_metadata.get(index.fqn)
        if not hasattr(description, "chunks"):
            continue  # Not a tensor.
        with (directory / info.relative_path).open("rb") as file:
            file.seek(info.offset)
            data = io.BytesIO(file.read(info.length))
        piece = torch.load(data, map_location="cpu", weights_only=True)
        whole = tensors.get(index.fqn)
        if whole is None:
            whole = torch.empty(description.size, dtype=description.properties.dtype)
            tensors[index.fqn] = whole
        offsets = index.offset if index.offset is not None else [0] * whole.dim()
        whole[tuple(slice(a, a + n) for a, n in zip(offsets, piece.shape, strict=True))] = piece
        filled[index.fqn] = filled.get(index.fqn, 0) + piece.numel()
    for name, tensor in tensors.items():
        if filled[name] < tensor.numel():
            raise ConfigError(f"{name} is not whole: {filled[name]} of {tensor.numel()} cells")
    return tensors
