"""Which packages a script imports: what a zygote loads before it forks ranks.

Reads source, imports nothing: a client calls it at every launch.

I1  A module of the user's tree is followed and never an entry: an edited file must be seen.
I2  Equal trees give equal lists: torch and its companions first, the rest sorted.
I3  A package sees the environment at import that the script would have given it.
I4  What cannot be read, parsed or found is passed over; the rank itself will report it.
"""

import os
import re
import sys
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from hashlib import blake2b
from typing import NamedTuple

import msgspec

from argosy.control import DYNAMO, TORCH
from argosy.supervise.imports.finder import Finder, FoundModule, is_site
from argosy.supervise.imports.source import PythonSource, Statement, read_source, top, variable

_FORMAT = 3
"""Of what is remembered of parsed files: grows when something else is read from them."""
FILES_MAX = 2_000
BYTES_MAX = 16 << 20
FILE_BYTES_MAX = 2 << 20

# Read by torch's and numpy's libraries in C while they are loaded, where no record can see it.
_NATIVE = re.compile(
    r"\$(OMP|GOMP|GOTO|KMP|OPENBLAS|MKL|MKLDNN|DNNL|ONEDNN|NPY|TRITON|KINETO|NVRTC)_"
    r"|\$(PYTORCH_|TORCH_(CPP|SHOW_CPP|BLAS|LINALG|ALLOW|SYMMMEM|DISTRIBUTED_DEBUG))"
)
# Parts of torch that `import torch` imports.
_WITH_TORCH = re.compile(r"torch\.((nn|optim|distributions|multiprocessing)\b|utils(\.data\b|$))")
# These packages ask for their rank, so each rank imports them; this part of what they import needs no rank.
_ASK_FOR_RANK = frozenset(("lightning", "pytorch_lightning", "torchmetrics"))
_BROUGHT = {
    "fsspec": ("fsspec.core", "fsspec.implementations.local"),
    "packaging": ("packaging.requirements",),
    "transformers": ("transformers:AutoModel", "transformers:AutoTokenizer"),
}
_LAZY = re.compile(r"^def __getattr__|^__getattr__\b|LazyModule|lazy_loader|lazy_import", re.MULTILINE)
_REQUIRES = re.compile(r"^Requires-Dist: *([A-Za-z0-9._-]+)([^\n]*)$", re.MULTILINE)


class Read(NamedTuple):
    """A file as it was parsed: good for as long as time and size stay. No source: it is no Python."""

    mtime_ns: int
    size: int
    source: PythonSource | None


def _parse(text: bytes) -> PythonSource | None:
    try:
        return read_source(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None


class _Scan:
    """One walk through the user's tree."""

    def __init__(self, finder: Finder, known: dict[str, Read]) -> None:
        self.finder = finder
        self.known = known
        self.read: dict[str, Read] = {}
        self.entries: set[str] = set()
        self.settings: dict[str, str] = {}
        self.torch = self.trains = False
        self._has_begun = False
        self._todo: deque[tuple[str, str, bool]] = deque()
        self._queued: set[str] = set()
        self._bytes = 0
        self._lazy: dict[str, bool] = {}

    def follow(self, file: str, package: str, is_main: bool = False) -> None:
        """Queue a file of the user's tree; `package` is what its relative imports start from."""
        if file not in self._queued and len(self._queued) < FILES_MAX:
            self._queued.add(file)
            self._todo.append((file, package, is_main))

    def enter(self, module: str) -> None:
        """Begin with `-m module`: its parents are imported, the module itself runs as `__main__`."""
        found = self.finder.find(module)
        if found is not None and found.roots:
            module += ".__main__"
            found = self.finder.find(module)
        package = module.rpartition(".")[0]
        if package:
            self.add(package)
        if found is not None and found.file:
            self.follow(found.file, package, is_main=True)

    def run(self) -> None:
        while self._todo:
            file, package, is_main = self._todo.popleft()
            source = self._read(file)
            if source is None:
                continue
            self.torch = self.torch or source.torch
            self.trains = self.trains or source.trains
            statements = list(source.statements)
            while is_main and statements and statements[-1].module.startswith("$"):
                statements.pop()  # Nothing is imported after it.
            for statement in statements:
                if statement.main_only and not is_main:
                    continue
                if statement.module.startswith("$"):
                    self._set(statement.module, is_main)
                else:
                    self._meet(statement, package)

    def _read(self, file: str) -> PythonSource | None:
        try:
            stat = os.stat(file)
            if stat.st_size > FILE_BYTES_MAX or self._bytes + stat.st_size > BYTES_MAX:
                return None
            self._bytes += stat.st_size
            known = self.known.get(file)
            if known is None or (known.mtime_ns, known.size) != (stat.st_mtime_ns, stat.st_size):
                with open(file, "rb") as source:
                    known = Read(stat.st_mtime_ns, stat.st_size, _parse(source.read()))
        except OSError:
            return None
        self.read[file] = known
        return known.source

    def _set(self, setting: str, is_main: bool) -> None:
        """Take a setting as it is only if nothing but the standard library can have been imported before."""
        name = variable(setting)
        is_certain = is_main and not self._has_begun and self.settings.get(name, setting) == setting
        self.settings[name] = setting if is_certain else name

    def _meet(self, statement: Statement, package: str) -> None:
        module = statement.module
        if statement.level:
            parts = package.split(".")
            if not package or statement.level > len(parts):
                return
            base = ".".join(parts[: len(parts) - statement.level + 1])
            module = f"{base}.{module}" if module else base
        if module.startswith("argosy.") and module != "argosy.core":  # Rooms open their names on demand.
            self.entries |= {f"{module}:{name}" for name in statement.names if name != "*"}
            return
        found = self.add(module)
        if found is None:
            return
        for name in statement.names:
            if self.finder.find(f"{module}.{name}") is not None:
                self.add(f"{module}.{name}")
            elif found.kind == "site" and name != "*" and module != "torch" and self._is_lazy(found):
                self.entries.add(f"{module}:{name}")

    def add(self, module: str) -> FoundModule | None:
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
            self._has_begun = self._has_begun or found.kind != "stdlib"
            if found.kind != "user" or parts[0] == "torch":
                self.entries.add(found.name)
                if found.name in _ASK_FOR_RANK:
                    self._add_brought()
            elif found.file:
                self.follow(found.file, found.name if found.roots else found.name.rpartition(".")[0])
        return found

    def _add_brought(self) -> None:
        for package, parts in _BROUGHT.items():
            found = self.finder.find(package)
            if found is not None and found.kind == "site":
                self.entries.update(parts)

    def _is_lazy(self, found: FoundModule) -> bool:
        """Tell whether names of a module may be loaded only when asked for: others need no entry."""
        if found.file is None:
            return False
        if found.file not in self._lazy:
            self._lazy[found.file] = _LAZY.search(_text(found.file)) is not None
        return self._lazy[found.file]


def scan(
    entry: str | os.PathLike[str],
    module: bool,
    path: Sequence[str],
    cache: str | os.PathLike[str] | None = None,
) -> list[str]:
    """Return what to preload for a script (or, if `module`, for `-m entry`).

    `path` is the interpreter's `sys.path`; the script's directory, or the working directory for a
    module, is searched before it. An entry is `package.module`, or `package.module:name` where a
    package loads names when they are asked for; `$NAME…` is a variable that the script sets itself (see
    `Statement`). Parsed files are remembered in the directory `cache`.
    """
    own = os.getcwd() if module else os.path.dirname(os.path.realpath(entry))
    name = blake2b(f"{_FORMAT}\0{own}\0{entry}".encode(), digest_size=16).hexdigest()
    memory = None if cache is None else os.path.join(os.fspath(cache), name)
    walk = _Scan(Finder(own, path), _recall(memory) if memory else {})
    if module:
        walk.enter(os.fspath(entry))
    else:
        walk.follow(os.path.realpath(entry), "", is_main=True)
    walk.run()
    if memory and walk.read != walk.known:
        _remember(memory, walk.read)
    if any(_NATIVE.match(setting) and setting == name for name, setting in walk.settings.items()):
        return []
    trains = _needs_torch(walk.finder, {top(entry) for entry in walk.entries} - {"torch"})
    trains = trains or (walk.torch and walk.trains)
    first: tuple[str, ...] = ()
    entries = walk.entries
    if (walk.torch or trains) and walk.finder.find("torch") is not None:
        first = (*TORCH, DYNAMO) if trains else TORCH
        entries = {entry for entry in entries.difference(first) if not _comes_with_torch(entry)}
    return [*sorted(walk.settings.values()), *first, *sorted(entries)]


def _recall(memory: str) -> dict[str, Read]:
    try:
        with open(memory, "rb") as file:
            return msgspec.msgpack.decode(file.read(), type=dict[str, Read])
    except (OSError, msgspec.MsgspecError):
        return {}


def _remember(memory: str, read: dict[str, Read]) -> None:
    # Another launch may write it too: a rename leaves one of them whole. Without it a scan is only slower.
    with suppress(OSError):
        os.makedirs(os.path.dirname(memory), exist_ok=True)
        part = f"{memory}.{os.getpid()}"
        with open(part, "wb") as file:
            file.write(msgspec.msgpack.encode(read))
        os.replace(part, memory)


def _text(file: str) -> str:
    try:
        with open(file, encoding="utf-8", errors="replace") as text:
            return text.read()
    except OSError:
        return ""


def _comes_with_torch(entry: str) -> bool:
    """Whether torch imports it, or most of its like: one more such import in a script must not cost a new zygote."""
    return top(entry) in sys.stdlib_module_names or _WITH_TORCH.match(entry) is not None


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
        head = _text(infos[name]).partition("\n\n")[0]
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
        if not is_site(root):
            continue
        try:
            with os.scandir(root) as names:
                kept = [entry for entry in names if entry.name.endswith((".pth", ".dist-info", "_finder.py"))]
            facts = sorted((entry.name, (stat := entry.stat()).st_mtime_ns, stat.st_size) for entry in kept)
            facts.append((root, os.stat(root).st_mtime_ns, 0))
        except OSError as error:
            facts = [(root, error.errno or 0, 0)]
        digest.update(repr(facts).encode())
    return digest.hexdigest()
