"""Which packages a script imports: what a zygote loads before it forks ranks.

Reads source, imports nothing: a client calls it at every launch.

I1  A module of the user's tree is followed and never an entry: an edited file must be seen.
I2  Equal trees give equal lists: torch and its companions first, the rest sorted.
I3  What cannot be read, parsed or found is passed over; the rank itself will report it.
"""

import ast
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Literal, NamedTuple

Kind = Literal["user", "site", "stdlib"]

# The first optimizer imports torch._dynamo: in a forked rank that is a second of CPU and 140 MB of its own.
TORCH = ("torch", "torch.distributed", "torch._dynamo", "torch.profiler")
FILES_MAX = 2_000
BYTES_MAX = 16 << 20
FILE_BYTES_MAX = 2 << 20

_SITE_NAMES = {"site-packages", "dist-packages"}
_LAZY = re.compile(r"__getattr__|LazyModule|lazy_loader|lazy_import")
_REQUIRES = re.compile(r"^Requires-Dist: *([A-Za-z0-9._-]+)([^\n]*)$", re.MULTILINE)


class Statement(NamedTuple):
    """One import statement; `names` is empty for `import module`."""

    module: str
    names: tuple[str, ...]
    level: int
    main_only: bool


class Source(NamedTuple):
    """What one file imports when it is itself imported, and whether it names torch in any place."""

    statements: tuple[Statement, ...]
    torch: bool


def read_source(text: str | bytes) -> Source:
    """Return the imports of a file; SyntaxError or ValueError if it is no Python."""
    tree = ast.parse(text)
    statements = tuple(_statements(tree.body, main_only=False))
    named = "torch" in text if isinstance(text, str) else b"torch" in text
    return Source(statements, named and any(_is_torch(node) for node in ast.walk(tree)))


def _statements(body: Sequence[ast.stmt], main_only: bool) -> Iterator[Statement]:
    """Yield what runs when the module is imported: not functions, type checking or `except` branches."""
    for node in body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Statement(alias.name, (), 0, main_only)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield Statement(module or "", tuple(alias.name for alias in names), level, main_only)
            case ast.If(test=test, body=inner, orelse=orelse):
                if not _names(test, "TYPE_CHECKING"):
                    yield from _statements(inner, main_only or _names(test, "__name__"))
                yield from _statements(orelse, main_only)
            case ast.Try() | ast.TryStar():
                yield from _statements([*node.body, *node.orelse, *node.finalbody], main_only)
            case ast.With(body=inner) | ast.ClassDef(body=inner):
                yield from _statements(inner, main_only)
            case _:
                pass


def _names(test: ast.expr, name: str) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
        for node in ast.walk(test)
    )


def _is_torch(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(_top(alias.name) == "torch" for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return _top(module) == "torch"
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return _top(name) == "torch"
        case _:
            return False


def _top(name: str) -> str:
    return name.partition(".")[0]


@dataclass(frozen=True)
class Found:
    """Where a module lies: `file` is its source if it has one, `roots` where its submodules are."""

    name: str
    kind: Kind
    file: str | None = None
    roots: tuple[str, ...] = ()


class Finder:
    """Resolves module names along a path as the import system would, from directory listings alone."""

    def __init__(self, own: str, path: Sequence[str]) -> None:
        self._listings: dict[str, frozenset[str]] = {}
        self._found: dict[str, Found | None] = {}
        roots = dict.fromkeys([own, *(os.path.abspath(entry) for entry in path)])
        self._roots = [(root, self._kind(root, own)) for root in roots]
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
            compiled = (_top(name) + ".so" for name in names if name.endswith(".so"))
            self._listings[root] = frozenset([*names, *compiled])
        return self._listings[root]

    def find(self, name: str) -> Found | None:
        """Return where a dotted name lies, or None."""
        if name not in self._found:
            self._found[name] = self._look(name)
        return self._found[name]

    def _look(self, name: str) -> Found | None:
        parent_name, _, leaf = name.rpartition(".")
        if not parent_name:
            if name in sys.builtin_module_names:
                return Found(name, "stdlib")
            found = self._search(name, leaf, self._roots)
            if found is None or not found.file:
                return self._look_editable(name) or found
            return found
        parent = self.find(parent_name)
        if parent is None:
            return None
        return self._search(name, leaf, [(root, parent.kind) for root in parent.roots])

    def _search(self, name: str, leaf: str, roots: Sequence[tuple[str, Kind]]) -> Found | None:
        portions: list[tuple[str, Kind]] = []
        for root, kind in roots:
            names = self.listing(root)
            inner = os.path.join(root, leaf)
            if leaf in names and "__init__.py" in self.listing(inner):
                return Found(name, kind, os.path.join(inner, "__init__.py"), (inner,))
            if f"{leaf}.py" in names:
                return Found(name, kind, f"{inner}.py")
            if f"{leaf}.so" in names:
                return Found(name, kind)
            if leaf in names and os.path.isdir(inner):
                portions.append((inner, kind))
        if not portions:
            return None
        kinds = {kind for _, kind in portions}
        return Found(name, "user" if "user" in kinds else portions[0][1], None, tuple(root for root, _ in portions))

    def _look_editable(self, name: str) -> Found | None:
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
        return self._search(name, os.path.basename(where), [(os.path.dirname(where), "user")])

    def _kind(self, root: str, own: str) -> Kind:
        if root == own and os.path.basename(root) not in _SITE_NAMES:
            return "user"
        if not _SITE_NAMES.isdisjoint(root.split(os.sep)):
            return "site"
        standard = os.path.basename(root) == "lib-dynload" or root.endswith(".zip") or "os.py" in self.listing(root)
        return "stdlib" if standard else "user"


def _editable_mapping(hook: str) -> dict[str, str]:
    try:
        for node in ast.parse(Path(hook).read_bytes()).body:
            match node:
                case ast.AnnAssign(target=ast.Name(id="MAPPING"), value=ast.expr() as value):
                    return {str(name): str(where) for name, where in ast.literal_eval(value).items()}
                case _:
                    pass
    except (OSError, SyntaxError, ValueError):
        pass
    return {}


class _Scan:
    """One walk through the user's tree."""

    def __init__(self, finder: Finder) -> None:
        self.finder = finder
        self.entries: set[str] = set()
        self.torch = False
        self._todo: deque[tuple[str, str, bool]] = deque()
        self._queued: set[str] = set()
        self._bytes = 0
        self._lazy: dict[str, bool] = {}

    def follow(self, file: str, package: str, is_main: bool = False) -> None:
        """Queue a file of the user's tree; `package` is what its relative imports start from."""
        if file not in self._queued and len(self._queued) < FILES_MAX:
            self._queued.add(file)
            self._todo.append((file, package, is_main))

    def run(self) -> None:
        while self._todo:
            file, package, is_main = self._todo.popleft()
            source = self._read(file)
            if source is None:
                continue
            self.torch = self.torch or source.torch
            for statement in source.statements:
                if is_main or not statement.main_only:
                    self._meet(statement, package)

    def _read(self, file: str) -> Source | None:
        try:
            size = os.stat(file).st_size
            if size > FILE_BYTES_MAX or self._bytes + size > BYTES_MAX:
                return None
            self._bytes += size
            return read_source(Path(file).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return None

    def _meet(self, statement: Statement, package: str) -> None:
        module = statement.module
        if statement.level:
            parts = package.split(".")
            if not package or statement.level > len(parts):
                return
            base = ".".join(parts[: len(parts) - statement.level + 1])
            module = f"{base}.{module}" if module else base
        found = self.add(module)
        if found is None:
            return
        for name in statement.names:
            if self.finder.find(f"{module}.{name}") is not None:
                self.add(f"{module}.{name}")
            elif found.kind == "site" and name != "*" and module != "torch" and self._is_lazy(found):
                self.entries.add(f"{module}:{name}")

    def add(self, module: str) -> Found | None:
        """Take a module in with its parents: as an entry, or to be followed."""
        found = None
        parts = module.split(".")
        if parts[0] == "argosy":
            return None
        if parts[0] == "torch":
            self.torch = True
        for end in range(1, len(parts) + 1):
            found = self.finder.find(".".join(parts[:end]))
            if found is None:
                return None
            if found.kind != "user" or parts[0] == "torch":
                self.entries.add(found.name)
            elif found.file:
                self.follow(found.file, found.name if found.roots else found.name.rpartition(".")[0])
        return found

    def _is_lazy(self, found: Found) -> bool:
        """Tell whether names of a module may be loaded only when asked for: others need no entry."""
        if found.file is None:
            return False
        if found.file not in self._lazy:
            try:
                text = Path(found.file).read_text(encoding="utf-8", errors="replace")
            except OSError:
                text = ""
            self._lazy[found.file] = _LAZY.search(text) is not None
        return self._lazy[found.file]


def scan(entry: Path | str, module: bool, path: Sequence[str]) -> list[str]:
    """Return what to preload for a script (or, if `module`, for `-m entry`).

    `path` is the interpreter's `sys.path`; the script's directory, or the working directory for a
    module, is searched before it. An entry is `package.module`, or `package.module:name` where a
    package loads names when they are asked for.
    """
    own = os.getcwd() if module else os.path.dirname(os.path.realpath(entry))
    finder = Finder(own, path)
    walk = _Scan(finder)
    if module:
        name = str(entry)
        found = finder.find(name)
        if found is not None and found.roots:
            walk.add(name)
            name = f"{name}.__main__"
            found = finder.find(name)
        package = name.rpartition(".")[0]
        if package:
            walk.add(package)
        if found is not None and found.file:
            walk.follow(found.file, package, is_main=True)
    else:
        walk.follow(os.path.realpath(entry), "", is_main=True)
    walk.run()
    has_torch = walk.torch or _needs_torch(finder, {_top(entry) for entry in walk.entries})
    if not has_torch or finder.find("torch") is None:
        return sorted(walk.entries)
    return [*TORCH, *sorted(walk.entries.difference(TORCH))]


def _needs_torch(finder: Finder, packages: set[str]) -> bool:
    """Tell from installed metadata whether a package depends on torch, directly or through others."""
    infos: dict[str, str] = {}
    for site in finder.sites:
        for name in finder.listing(site):
            if name.endswith(".dist-info"):
                infos.setdefault(_normal(name.partition("-")[0]), os.path.join(site, name, "METADATA"))
    seen = {_normal(package) for package in packages}
    todo = list(seen)
    while todo:
        name = todo.pop()
        if name == "torch":
            return True
        if name not in infos:
            continue
        try:
            head = Path(infos[name]).read_text(encoding="utf-8", errors="replace").partition("\n\n")[0]
        except OSError:
            continue
        for required, condition in _REQUIRES.findall(head):
            if "extra" not in condition and _normal(required) not in seen:
                seen.add(_normal(required))
                todo.append(_normal(required))
    return False


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def fingerprint(path: Sequence[str]) -> str:
    """Return a digest that changes when packages are installed, removed or relinked along `path`."""
    digest = blake2b(digest_size=16)
    for root in dict.fromkeys(os.path.abspath(entry) for entry in path):
        if _SITE_NAMES.isdisjoint(root.split(os.sep)):
            continue
        try:
            with os.scandir(root) as entries:
                kept = [entry for entry in entries if entry.name.endswith((".pth", ".dist-info", "_finder.py"))]
            facts = sorted((entry.name, (stat := entry.stat()).st_mtime_ns, stat.st_size) for entry in kept)
            facts.append((root, os.stat(root).st_mtime_ns, 0))
        except OSError as error:
            facts = [(root, error.errno or 0, 0)]
        digest.update(repr(facts).encode())
    return digest.hexdigest()
