"""Others' formats: Hugging Face safetensors, torch.distributed.checkpoint, torch.save. Pickle is read restricted."""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false
# pyright: reportPrivateImportUsage=false

import os
import shutil
import warnings
import zipfile
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from argosy.checkpoint.arguments import STEP_MAX
from argosy.checkpoint.dcp import read_dcp, reason_of, write_dcp
from argosy.checkpoint.format import StepNotFound
from argosy.checkpoint.hf import CONFIG, read_config, read_hf, write_hf
from argosy.checkpoint.nested import MODELS, nested, of_modules, state_of
from argosy.checkpoint.restore_step import Restored, restore
from argosy.checkpoint.retention import KeepEvery
from argosy.checkpoint.saver import Saver, warn
from argosy.checkpoint.step_index import ELSEWHERE, Step
from argosy.checkpoint.step_info import list_steps
from argosy.core import ConfigError
from argosy.transfer import holds_values

FORMATS = ("hf", "dcp", "torch")


def export(
    path: str | Path, kind: str, target: str | Path, step: int | None = None, *, module: str | None = None
) -> Restored:
    """Write a step in another format: `torch` and `dcp` hold everything (`nested` says how), `hf` the model's weights.

    Of several modules `hf` holds the one of the key `module`, or `model`. What is returned has the tensors that were
    written and their bytes; `unused` names what was left out.

    Raises:
        ConfigError: the format is unknown, the target exists, or there is nothing that the format could hold, or
            nobody says which module.
    """
    if kind not in FORMATS:
        raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")
    target = Path(target)
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ConfigError(f"it exists: {target}", hint="remove it, or choose another name")
    if kind == "torch" and target.is_dir():
        raise ConfigError(f"it is a directory: {target}", hint="torch.save writes a file: name one")
    try:
        found = restore(path, step=step)  # Also one that only a keeper has yet.
    except StepNotFound as error:
        raise StepNotFound(str(error), hint=error.hint or ELSEWHERE) from None
    chosen = found.stored
    assert chosen is not None
    if kind == "hf":
        weights = _weights(chosen, found.tensors, module)
        written = {id(tensor) for tensor in weights.values()}
        found.unused = sorted(name for name, tensor in found.tensors.items() if id(tensor) not in written)
        found.unused += [name for name in found.values if name != CONFIG and holds_values(found.values[name])]
        found.tensors = weights
    with _whole_or_not(target) as place:
        if kind == "hf":
            place.mkdir()
            write_hf(found.tensors, chosen.values.get(CONFIG), place)
        elif kind == "torch":
            torch.save(nested(chosen, found.tensors), place)
        else:
            place.mkdir()
            write_dcp(nested(chosen, found.tensors), place)
    found.bytes = sum({id(tensor): tensor.nbytes for tensor in found.tensors.values()}.values())
    return found


@contextmanager
def _whole_or_not(target: Path) -> Generator[Path, None, None]:
    """Where to write what becomes `target` when it is whole; of what is not, nothing stays."""
    target.parent.mkdir(parents=True, exist_ok=True)
    place = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        yield place
        place.rename(target)
    except BaseException:
        shutil.rmtree(place, ignore_errors=True)
        place.unlink(missing_ok=True)
        raise


def _weights(step: Step, tensors: Mapping[str, Any], module: str | None) -> dict[str, Any]:
    """What a model consists of, tied weights once: a module's tensors, else those of a dict that is called so."""
    found = of_modules(step, tensors)
    if module is not None or len(step.modules) > 1:
        prefix = step.modules.get(module or MODELS[0])
        if prefix is None:
            there = ", ".join(step.modules) or "none by a key"
            raise ConfigError(
                f"which module is exported? There are {there}" if module is None else f"no module is called {module!r}",
                hint=f"--module, or module=, one of {there}",
            )
        found = {name.removeprefix(prefix): each for name, each in found.items() if name.startswith(prefix)}
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


def read_foreign(kind: str, source: Path) -> tuple[Any, list[str]]:
    """What files of another format hold, tensors in nested dicts, and the names of what was not read.

    Raises:
        ConfigError: they are not of this format, or not whole.
    """
    if kind == "hf":
        return read_hf(source)
    if kind == "torch":
        return _read_torch(source), []
    if kind == "dcp":
        return read_dcp(source)
    raise ConfigError(f"unknown format: {kind}", hint=f"one of {', '.join(FORMATS)}")


def _read_torch(source: Path) -> Any:
    if source.is_dir():
        raise ConfigError(f"torch.save writes a file, this is a directory: {source}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # Of sparse tensors, which cannot be imported anyway.
            return torch.load(source, map_location="cpu", weights_only=True, mmap=zipfile.is_zipfile(source))
    except OSError:
        raise
    except Exception as error:  # Torn or foreign bytes make it raise anything.
        raise ConfigError(
            f"{source} cannot be read as tensors and plain values: {reason_of(error)}",
            hint="objects of other classes are never unpickled: save a state_dict and plain values",
        ) from None


def import_(
    kind: str,
    source: str | Path,
    path: str | Path,
    step: int | None = None,
    *,
    say: Callable[[str], None] = warn,
) -> int:
    """Make a committed step (0 if not given) of another format's files; returns how many tensors it has.

    `say` is told what could not be kept.

    Raises:
        ConfigError: they are not of this format, not whole, hold nothing that can be kept, or there is a step 0 and no
            other was asked for.
    """
    if step is not None and not 0 <= step <= STEP_MAX:
        raise ConfigError(f"no such step can be: {step}", hint="steps are counted from 0, in up to twelve digits")
    if step is None and any(each.step == 0 for each in list_steps(path)):
        raise ConfigError(f"step 0 is there already: {path}", hint="say which step it becomes: --step, or step=")
    content, unread = read_foreign(kind, Path(source))
    state, notes = state_of(content)
    if kind == "hf":
        state.values |= read_config(Path(source))
    for note in (*(f"skipped {name}" for name in unread), *notes):
        say(note)
    count = sum(len(unit.members) + len(unit.aliases) for unit in state.units.values())
    if not count and (kind == "hf" or not state.values):
        raise ConfigError(f"no tensor in {source}" if kind == "hf" else f"neither a tensor nor a value in {source}")
    with Saver(path, keep=[KeepEvery(1)]) as saver:  # Nothing that is there goes for it.
        saver.save(state, step or 0).wait()
    return count
