"""Names of modules' tensors begin with the module's key where a dict has several, and without it where it has one.

So a dict to which a module is added, or of which one is taken, has other names for the same tensors: who restores it
finds them all the same.
"""

from collections.abc import Mapping

from argosy.checkpoint.step_index import Step
from argosy.core import ConfigError
from argosy.transfer import Adoption, State, references

EXTRA = "_extra_state"
"""Where torch keeps what a module's `get_extra_state` says."""


def aligned_names(found: Step, stored: State, live: State) -> dict[str, str]:
    """The names that stored tensors and extra state of modules have here, by those that they were stored with, where
    these differ."""
    prefixes = {key: _prefix_of(key, found.modules, stored, live) for key in live.modules}
    changed = [(key, there) for key, there in prefixes.items() if there not in (None, live.modules[key])]
    if not changed:
        return {}
    beside = [name for name in stored.values if not name.endswith(EXTRA)]
    loose = {each for name in beside for each in references(stored.values[name])}
    every = [each for unit in stored.units.values() for each in (unit.name, *unit.aliases)]
    every += [name for name in stored.values if name.endswith(EXTRA) and name not in stored.units]
    names: dict[str, str] = {}
    for key, there in changed:
        here, there = live.modules[key], there or ""
        # A dict of tensors may have been called as the module is.
        kept = loose if not there or key in found.modules else set[str]()
        for name in (each for each in every if each.startswith(there) and each not in kept):
            new = here + name.removeprefix(there)
            # Without a prefix a module's tensors cannot be told from single parameters, but by what is here.
            if there or new in live.units or name not in live.units:
                names[name] = new
    taken = set(names.values())
    # Another module's may have such a name already: it goes out of the way.
    return names | {name: f"{name} (as stored)" for name in every if name in taken and name not in names}


def _prefix_of(key: str, known: Mapping[str, str], stored: State, live: State) -> str | None:
    """What the names of a module began with when it was stored; None: nobody knows."""
    if key in known:
        return known[key]
    if _is_stored(key, f"{key}.", stored, live):
        return f"{key}."
    if not live.modules[key]:
        return ""
    if known:
        return None
    alone = [each for each in live.modules if not _is_stored(each, f"{each}.", stored, live)]
    return "" if [each for each in alone if _is_stored(each, "", stored, live)] == [key] else None


def _is_stored(key: str, prefix: str, stored: State, live: State) -> bool:
    """Whether there is everything that a module here has, by names that begin so."""
    here = live.modules[key]
    own = [name for name, unit in live.units.items() if "parameter" in unit.members and name.startswith(here)]
    return bool(own) and all(prefix + name.removeprefix(here) in stored.units for name in own)


def check_prefixes(adoption: Adoption, live: State) -> None:
    """Refuse to leave a whole module as it was where its tensors are stored, it seems, by other names."""
    kept = set(adoption.kept)
    for key, prefix in live.modules.items() if adoption.unused else ():
        own = {name for name, unit in live.units.items() if name.startswith(prefix) and "parameter" in unit.members}
        if not own or own - kept:
            continue
        twins = [each for each in adoption.unused if prefix + each in own or each.partition(".")[2] in own]
        if twins:
            raise ConfigError(
                f"nothing is stored for {key or 'the module'}, but {twins[0]} is, which may be {min(own)} or the like",
                hint="names begin with a module's key where there are several: rename=lambda name: ... changes them",
            )
