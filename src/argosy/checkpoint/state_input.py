"""Turn what callers pass (modules, dicts, states) into a State."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateUsage=false

import gc
import sys
from collections.abc import Callable, Generator, Iterable, Mapping, MutableMapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from argosy.checkpoint.per_rank_values import add_own, is_own
from argosy.checkpoint.rank_exchange import is_in_group, place
from argosy.core import ConfigError
from argosy.transfer import Adoption, Member, State, Unit, replicated, why_fixed

if TYPE_CHECKING:
    from argosy.transfer import Declared

_NUMPY = {
    "F64": "<f8", "F32": "<f4", "F16": "<f2", "I64": "<i8", "I32": "<i4", "I16": "<i2", "I8": "i1", "U64": "<u8",
    "U32": "<u4", "U16": "<u2", "U8": "u1", "BOOL": "?", "C64": "<c8", "C128": "<c16",
}  # fmt: skip
_NAMES = {np.dtype(text): name for name, text in _NUMPY.items()}


@contextmanager
def without_collection() -> Generator[None, None, None]:
    """For work that makes objects by the hundred thousand, none of them garbage: looking for it takes as long again."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def as_state(thing: Any, *, saving: bool = False, declared: "Declared | None" = None) -> State:
    """A state from a State, a module, or a dict of modules, optimizers, arrays and whatever has a state_dict.

    Where it is `saving`, each rank also says its own of what ranks may differ in (`per_rank_values.py`). `declared`
    says which parameters are each rank's own, and which are the same on all.

    Raises:
        ConfigError: something in it cannot be kept, or nothing says who owns a parameter.
    """
    if isinstance(thing, State):
        return thing
    if isinstance(thing, Mapping):
        for key in thing:
            if not isinstance(key, str) or not key:
                raise ConfigError(f"the keys of a state are names, texts of at least one letter: {key!r}")
            if is_own(key):
                raise ConfigError(f"{key!r} is what a rank's own {key.partition('/')[2]!r} is called", hint="rename it")
    if isinstance(thing, Mapping) and all(isinstance(value, np.ndarray) for value in thing.values()) and thing:
        return describe_arrays(thing)
    if "torch" not in sys.modules:
        raise ConfigError(f"neither a state nor arrays: {type(thing).__name__}")
    import torch
    from torch.optim import Optimizer

    from argosy.transfer import describe

    if isinstance(thing, torch.nn.Module):
        return describe(thing)
    if not isinstance(thing, Mapping):
        raise ConfigError(f"a state is a module or a dict of modules, optimizers and others: {type(thing).__name__}")
    modules = {name: value for name, value in thing.items() if isinstance(value, torch.nn.Module)}
    optimizers = {name: value for name, value in thing.items() if isinstance(value, Optimizer)}
    others = {name: value for name, value in thing.items() if name not in modules and name not in optimizers}
    model = next(iter(modules.values())) if len(modules) == 1 else modules
    local: list[Any] = [name for name, value in others.items() if isinstance(value, torch.Generator)]
    local += _own(modules, optimizers.values(), declared, saving=saving)
    state = describe(model, optimizers, others=others, local=local)
    state.modules = state.modules or dict.fromkeys(modules, "")
    if saving:
        add_own(state, [name for name in others if name in state.values])
    adopt = state.adopt

    def adopt_and_put_back(stored: State) -> Adoption:
        assert adopt is not None
        adoption = adopt(stored)

        def commit() -> None:
            adoption.commit()
            if isinstance(thing, MutableMapping):
                thing.update({name: value for name, value in others.items() if value is not thing[name]})

        return replace(adoption, commit=commit)

    state.adopt = adopt_and_put_back
    return state


def declared(to: str, **said: Iterable[Any]) -> "Declared | None":
    """What the user said of parameters, as `own=` and `replicated=`; None: nothing."""
    if all(isinstance(what, tuple | list) and not what for what in said.values()):
        return None
    from argosy.transfer import Declared

    found = Declared(to)
    for how, what in said.items():
        found.add(how, what)
    return found


def _own(
    modules: Mapping[str, Any], optimizers: Iterable[Any], declared: "Declared | None", *, saving: bool
) -> list[Any]:
    """The parameters of which each rank has its own."""
    from argosy.transfer import find_owned

    if not is_in_group() or (size := place()[1]) == 1:
        return []
    owned = find_owned(modules, optimizers, declared, size)
    if saving:
        owned.refuse(owned.unknown, "Saver(..., ")
    return [each for each in owned.owned if id(each) in owned.declared]


def describe_arrays(arrays: Mapping[str, Any]) -> State:
    """A state of plain numpy arrays."""
    state = State()
    for name, array in arrays.items():
        if array.dtype not in _NAMES:
            raise ConfigError(f"{name} cannot be kept: arrays of this dtype cannot: {array.dtype}")
        member = Member("value", "buffer", _NAMES[array.dtype], replicated(tuple(array.shape)), array)
        state.units[name] = Unit(name, {"value": member})

    have = {name: unit.members["value"] for name, unit in state.units.items()}

    def adopt(stored: State) -> Adoption:
        wanted = {name: member for name, _, member in stored.members()}
        for name in set(have) & set(wanted):
            if (have[name].dtype, have[name].shape) != (wanted[name].dtype, wanted[name].shape):
                raise ConfigError(f"{name} is {wanted[name].dtype}{list(wanted[name].shape)}, not what is here")
            if (why := why_fixed(have[name].local)) is not None:
                raise ConfigError(f"{name} cannot be restored into: {why}", hint="restore into a copy of it")
        targets = {name: have[name] for name in set(have) & set(wanted)}
        kept, unused = sorted(set(have) - set(wanted)), sorted(set(wanted) - set(have))
        return Adoption(targets, lambda: None, kept, unused)

    state.adopt = adopt
    return state


def new_tensor(dtype: str, shape: tuple[int, ...]) -> Any:
    """A torch tensor, or a numpy array where torch is not installed."""
    try:
        import torch
    except ImportError:
        if dtype not in _NUMPY:
            raise ConfigError(f"numpy has no {dtype}", hint="install torch") from None
        return np.empty(shape, _NUMPY[dtype])
    from argosy.transfer import torch_dtypes

    with torch.inference_mode(False):  # Whatever the caller is in, and whatever device is its default.
        return torch.empty(shape, dtype=torch_dtypes[dtype], device="cpu")


def landing(local: Any) -> tuple[Any, Callable[[], None]]:
    """Plain memory for the bytes of a tensor that is not, and what makes them the tensor's."""
    if not hasattr(local, "data_ptr"):
        buffer = np.ascontiguousarray(local)
        return buffer, lambda: np.copyto(local, buffer)
    import torch

    buffer = torch.empty(local.shape, dtype=local.dtype, device="cpu")
    # Cells that no piece names keep their value.
    buffer.copy_(local)

    def finish() -> None:
        with torch.no_grad():
            local.copy_(buffer)

    return buffer, finish
