"""Decide which parameters are the same on all ranks, and which each rank has for itself.

O1  Ownership follows from layouts (DTensor), wrappers (DDP, `replicate`) and the user's word, never from equal values.
O2  What only some ranks have, such as the stages of a pipeline, is theirs.
O3  What no optimizer trains is the same on all ranks, if all that is known is. Otherwise it counts as each rank's own,
    which is always safe.
O4  A trained parameter of several ranks about which nothing is known is refused.
"""
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from argosy.core import ConfigError
from argosy.transfer.torch_inner import is_zero


class Declared:
    """What the user said with `own=` and `replicated=`: modules, parameters, or patterns of names."""

    def __init__(self, to: str) -> None:
        self._to = to
        """Whom it was said to, for errors."""
        self._said: dict[str, list[Any]] = {"own": [], "replicated": []}

    def add(self, how: str, what: Any) -> None:
        """Take note.

        Raises:
            ConfigError: it is no list of modules, parameters or names.
        """
        listed: list[Any] = list(what) if isinstance(what, Sequence) and not isinstance(what, str) else [what]
        for each in listed:
            if not isinstance(each, str | nn.Module | Tensor):
                raise ConfigError(
                    f"{self._to}({how}=...) takes modules, parameters or names: {each!r:.80}",
                    hint=f'for instance {how}=[model.experts] or {how}=["experts.*"]',
                )
        self._said[how] += listed

    def find(self, modules: Mapping[str, nn.Module]) -> dict[int, bool]:
        """Of each declared parameter, by identity: whether it is the same on all ranks.

        Raises:
            ConfigError: a name matches no parameter, or one is declared both ways.
        """
        found: dict[int, bool] = {}
        for how, listed in self._said.items():
            for each in listed:
                for parameter in self._matching(how, each, modules):
                    if found.setdefault(id(parameter), how == "replicated") != (how == "replicated"):
                        raise ConfigError(f"{self._to} was told both own and replicated of one parameter: {each!r:.80}")
        return found

    def _matching(self, how: str, what: Any, modules: Mapping[str, nn.Module]) -> Collection[Tensor]:
        if isinstance(what, nn.Module):
            return list(what.parameters())
        if isinstance(what, Tensor):
            return [what]
        named = [(name, parameter) for module in modules.values() for name, parameter in module.named_parameters()]
        found = [p for name, p in named if fnmatchcase(name, what) or fnmatchcase(name, f"{what}.*")]
        if not found:
            raise ConfigError(
                f"{self._to}({how}=...) names no parameter: {what!r}", hint="see model.named_parameters()"
            )
        return found


class Ownership(NamedTuple):
    """The parameters that are not the same on all ranks."""

    owned: list[Tensor]
    """Those of which each rank has its own part or copy."""
    unknown: dict[str, Tensor]
    """Those among them that are trained, and about which nothing is known, by name."""
    declared: set[int]
    """Those that the user called their own, by identity."""

    def refuse(self, shared: Collection[str], to: str = "run.track(..., ") -> None:
        """Refuse to guess about parameters whose names all ranks have (O2, O4).

        Raises:
            ConfigError: there is one.
        """
        if name := next((name for name in self.unknown if name in shared), ""):
            raise ConfigError(
                f"nothing says whether all ranks have the same {name.replace('/p/', '.', 1)}, or each its own",
                hint=f"wrap the model with DDP, fully_shard or replicate; or say it: {to}replicated=[model]) "
                "if its gradients are averaged over all ranks, own=[...] if each rank trains its own",
            )

    def apart(self, shared: Collection[str], names: Mapping[int, str]) -> list[Tensor]:
        """Those that a checkpoint keeps under the name of their rank."""
        plain = [each for each in self.owned if not hasattr(each, "placements")]
        return [each for each in plain if id(each) in self.declared or names[id(each)] in shared]


def find_owned(
    modules: Mapping[str, nn.Module], optimizers: Iterable[Any], said_of: "Declared | None", size: int
) -> Ownership:
    """Find out what each rank has for itself, of what these optimizers train. A ZeroRedundancyOptimizer keeps its
    parameters alike."""
    groups = [group for each in optimizers if not is_zero(each) for group in each.param_groups]
    trained = {id(parameter) for group in groups for parameter in group["params"]}
    declared = said_of.find(modules) if said_of is not None else dict[int, bool]()
    wrapped = dict(_wrapped(modules.values(), size))
    known: dict[int, bool] = {}
    unknown: dict[str, Tensor] = {}
    waiting: list[Tensor] = []
    everything = {f"{key}/p/{name}": each for key, m in modules.items() for name, each in m.named_parameters()}
    for name, parameter in everything.items() if size > 1 else ():
        same = declared.get(id(parameter), wrapped.get(id(parameter)))
        if same is None and hasattr(parameter, "placements"):
            same = _is_replicated(parameter, size)
        if same is not None or not parameter.requires_grad:
            known[id(parameter)] = same is not False
        elif id(parameter) in trained:
            unknown[name] = parameter
        else:
            waiting.append(parameter)
    owned = [each for each in everything.values() if not known.get(id(each), True)] + list(unknown.values())
    owned += waiting if owned else []  # O3
    said = {identity for identity, same in declared.items() if not same}
    return Ownership(list({id(each): each for each in owned}.values()), unknown, said)


def _wrapped(roots: Collection[nn.Module], size: int) -> Iterator[tuple[int, bool]]:
    """The parameters of DDP modules, and whether all ranks take part."""
    for root in roots:
        for module in root.modules():
            if isinstance(module, DistributedDataParallel):
                for parameter in module.parameters():
                    if not hasattr(parameter, "placements"):
                        yield id(parameter), cast(Any, module).process_group.size() == size


def _is_replicated(parameter: Any, size: int) -> bool:
    return parameter.device_mesh.size() == size and all(each.is_replicate() for each in parameter.placements)
