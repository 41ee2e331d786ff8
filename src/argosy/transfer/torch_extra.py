"""What a module keeps besides parameters and buffers: its extra state, and what would be lost in silence."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

from collections.abc import Iterator
from typing import Any

from torch import nn

from argosy.core import ConfigError


class Extra:
    """The extra state of a module, as something with a state_dict."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    def state_dict(self) -> Any:
        return self._module.get_extra_state()

    def load_state_dict(self, state: Any) -> None:
        self._module.set_extra_state(state)


def extras_of(module: nn.Module) -> Iterator[tuple[str, Extra]]:
    """The modules inside that have extra state, by the names that torch gives it."""
    for name, inner in module.named_modules():
        if type(inner).get_extra_state is not nn.Module.get_extra_state:
            yield f"{name}._extra_state".removeprefix("."), Extra(inner)


def _says_more(module: Any) -> bool:
    """Whether a module has something of its own to do with its `state_dict`."""
    kind, plain = type(module), nn.Module
    is_plain = kind.state_dict is plain.state_dict and kind._save_to_state_dict is plain._save_to_state_dict
    return not is_plain or bool(module._state_dict_hooks)


def _check_shards(name: str, module: Any) -> None:
    """Refuse shards that do not say how they are cut: each would be taken for the whole."""
    is_first = any(kind.__name__ == "FullyShardedDataParallel" for kind in type(module).__mro__)
    if is_first and module.world_size > 1 and getattr(module.sharding_strategy, "name", "") != "NO_SHARD":
        raise ConfigError(
            f"{name or 'the module'} is a FullyShardedDataParallel, whose tensors do not say how they are cut",
            hint="shard it with torch.distributed.fsdp.fully_shard (FSDP2)",
        )


def check_modules(module: nn.Module) -> None:
    """Refuse what a module's own `state_dict` says and nobody would find."""
    for name, inner in module.named_modules():
        _check_shards(name, inner)
        if not _says_more(inner):
            continue
        tensors = [*inner.named_parameters(remove_duplicate=False), *inner.named_buffers(remove_duplicate=False)]
        known = {id(each) for _, each in tensors}
        names = {key for key, _ in tensors}
        said = inner.state_dict(keep_vars=True)
        for key, value in said.items():
            if id(value) not in known and key not in names and not key.endswith("_extra_state"):
                raise ConfigError(
                    f"{name or type(inner).__name__} has {key!r} in its state_dict, which is neither a parameter nor "
                    "a buffer: it would be lost",
                    hint="make it a buffer, return it from get_extra_state, or give it to the dict itself",
                )
