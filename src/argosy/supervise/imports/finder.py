"""Find where a module lies and whose it is, without importing anything.

Answers from directory listings, each read once: a finder is made for one scan and thrown away.
"""

import ast
import os
import sys
from collections.abc import Sequence
from typing import Literal, NamedTuple

Kind = Literal["user", "site", "stdlib"]

_SITE_NAMES = frozenset({"site-packages", "dist-packages"})


def is_site(root: str) -> bool:
    """Tell whether a directory holds installed packages."""
    return not _SITE_NAMES.isdisjoint(root.split(os.sep))


class ImportRoot(NamedTuple):
    """A directory that modules are looked for in."""

    where: str
    kind: Kind


class FoundModule(NamedTuple):
    """Where a module lies: `file` is its source if it has one, `roots` where its submodules are."""

    name: str
    kind: Kind
    file: str | None = None
    roots: tuple[str, ...] = ()


class Finder:
    """Resolves module names along a path as the import system would, from directory listings alone."""

    def __init__(self, own: str, path: Sequence[str]) -> None:
        self._listings: dict[str, frozenset[str]] = {}
        self._found: dict[str, FoundModule | None] = {}
        roots = dict.fromkeys([own, *(os.path.abspath(entry) for entry in path)])
        self._roots = [ImportRoot(root, self._kind(root, own)) for root in roots]
        self._editable: dict[str, str] | None = None

    @property
    def sites(self) -> list[str]:
        return [root for root, kind in self._roots if kind == "site"]

    def listing(self, root: str) -> frozenset[str]:
        """Return the names in a directory; modules in C appear by their stem plus `.so`."""
        if root not in self._listings:
            try:
                names = os.listdir(root)
            except OSError:
                names = []
            compiled = (name.partition(".")[0] + ".so" for name in names if name.endswith(".so"))
            self._listings[root] = frozenset([*names, *compiled])
        return self._listings[root]

    def find(self, name: str) -> FoundModule | None:
        """Return where a dotted name lies, or None."""
        if name not in self._found:
            self._found[name] = self._look(name)
        return self._found[name]

    def _look(self, name: str) -> FoundModule | None:
        parent_name, _, leaf = name.rpartition(".")
        if not parent_name:
            if name in sys.builtin_module_names:
                return FoundModule(name, "stdlib")
            found = self._search(name, leaf, self._roots)
            if found is None or not found.file:
                return self._look_editable(name) or found
            return found
        parent = self.find(parent_name)
        if parent is None:
            return None
        return self._search(name, leaf, [ImportRoot(root, parent.kind) for root in parent.roots])

    def _search(self, name: str, leaf: str, roots: Sequence[ImportRoot]) -> FoundModule | None:
        portions: list[ImportRoot] = []
        for root, kind in roots:
            names = self.listing(root)
            inner = os.path.join(root, leaf)
            if leaf in names and "__init__.py" in self.listing(inner):
                return FoundModule(name, kind, os.path.join(inner, "__init__.py"), (inner,))
            if f"{leaf}.py" in names:
                return FoundModule(name, kind, f"{inner}.py")
            if f"{leaf}.so" in names:
                return FoundModule(name, kind)
            if leaf in names and os.path.isdir(inner):
                portions.append(ImportRoot(inner, kind))
        if not portions:
            return None
        owner = next((portion for portion in portions if portion.kind == "user"), portions[0])
        return FoundModule(name, owner.kind, None, tuple(portion.where for portion in portions))

    def _look_editable(self, name: str) -> FoundModule | None:
        """Find a package that an editable install maps by an import hook instead of a path entry."""
        if self._editable is None:
            self._editable = {}
            for site in self.sites:
                for hook in self.listing(site):
                    if hook.startswith("__editable__") and hook.endswith("_finder.py"):
                        self._editable |= _editable_mapping(os.path.join(site, hook))
        where = self._editable.get(name)
        if where is None:
            return None
        return self._search(name, os.path.basename(where), [ImportRoot(os.path.dirname(where), "user")])

    def _kind(self, root: str, own: str) -> Kind:
        if root == own and os.path.basename(root) not in _SITE_NAMES:
            return "user"
        if is_site(root):
            return "site"
        if os.path.basename(root) == "lib-dynload" or root.endswith(".zip"):
            return "stdlib"
        return "stdlib" if "os.py" in self.listing(root) else "user"


def _editable_mapping(hook: str) -> dict[str, str]:
    try:
        with open(hook, "rb") as source:
            tree = ast.parse(source.read())
        for node in tree.body:
            match node:
                case ast.AnnAssign(target=ast.Name(id="MAPPING"), value=ast.expr() as value):
                    return {str(name): str(where) for name, where in ast.literal_eval(value).items()}
                case _:
                    pass
    except (OSError, SyntaxError, ValueError):
        pass
    return {}
