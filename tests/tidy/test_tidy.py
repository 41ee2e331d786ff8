"""The house stays in order: layers, doors, names, sizes. Each exception is listed here with its reason."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import argosy

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "argosy"

LAYERS = [
    {"cli"},
    {"sim"},
    {"hosts", "insight"},
    {"train"},
    {"actors", "collective", "checkpoint", "data", "graph"},
    {"supervise"},
    {"control", "fabric", "transfer", "cost"},
    {"kernels"},
    {"observe"},
    {"core"},
]
"""Top first. A room imports from lower lines only; rooms on one line do not import each other."""

FOLDERS = {
    "supervise": [
        {"client"},
        {"agent"},
        {"rank"},
        {"evidence"},
        {"imports", "output"},
        {"records"},
        {""},
    ],
    "train": [{"adapters"}, {""}],
    "control": [{""}, {"policies"}],
    "sim": [{""}, {"fleet"}],
}
"""The folders of a room, top first: a file imports from lower lines, or from its own folder. "" is the room itself."""

PURE = {
    *("collections", "collections.abc", "dataclasses", "enum", "functools", "hashlib", "importlib"),
    *("itertools", "math", "msgspec", "pkgutil", "signal", "typing"),
}
"""All that files of `control` import from elsewhere: decisions are functions of values."""
FLAT = {
    "checkpoint": "its writer and its keeper need each other",
    "kernels": "each operation is a folder, and none knows another",
}
"""room: why its folders are in no order."""
IMPURE_CALLS = {"open", "print", "input", "Clock"}

ROOFS = {"__init__", "__main__"}
"""Modules beside the rooms that may enter any of them, by its door."""
CELLAR = {"_exchange", "_lazy", "_native", "_reference", "_select"}
"""Modules beside the rooms that enter none."""

PUBLIC_NAMES = [
    "Answers",
    "ArgosyError",
    "Cluster",
    "ConfigError",
    "CorruptShard",
    "DeadlinePassed",
    "LogLine",
    "Mesh",
    "PeerLost",
    "RemoteError",
    "Restart",
    "Run",
    "Tcp",
    "compile",
    "connect",
    "endpoint",
    "here",
    "local",
    "open_run",
    "restore",
    "serve",
]
PUBLIC_NAMES_MAX = 25

FILE_LINES_MAX = 500
FUNCTION_LINES_MAX = 60
PARAMETERS_MAX = 6
SUBCLASS_DEPTH_MAX = 1
ERROR_DEPTH_MAX = 3

LONG_FILES: dict[str, str] = {}
"""path: reason."""
LONG_FUNCTIONS: dict[str, str] = {}
"""path:function: reason."""
MANY_PARAMETERS: dict[str, str] = {
    "src/argosy/kernels/triton_rows.py:row_slopes": "a GPU kernel takes pointers and sizes, not objects",
    "src/argosy/kernels/triton_rows.py:row_stats": "a GPU kernel takes pointers and sizes, not objects",
    "src/argosy/graph/compiled.py:compile": "what a user says of a compiled step: independent keywords with defaults",
    "src/argosy/graph/certificate.py:report": "what a certificate holds, each a different value",
    "src/argosy/checkpoint/saver.py:__init__": "what a user says of saving: independent keywords, each with a default",
    "src/argosy/train/run.py:__init__": "what a user says of a run: independent keywords, each with a default",
    "src/argosy/data/loader.py:__init__": "what a user says of the input: independent keywords, each with a default",
}
"""path:function: reason."""
DEEP_CLASSES: dict[str, str] = {}
"""path:class: reason."""
PRIVATE_TORCH: dict[str, str] = {
    "src/argosy/checkpoint/rank_exchange.py": "the store of the default group has no public name",
    "src/argosy/train/gradients.py": "a norm of many tensors at once has no public name",
    "src/argosy/observe/collective_hooks.py": "the dispatcher's keys have no public name",
    "src/argosy/observe/dynamo_skip.py": "the compiler's frame hook has no public name",
    "src/argosy/observe/flops.py": "fake tensors and dispatch modes have no public name; imported late",
    "src/argosy/transfer/torch_wrapped.py": "traceable tensor subclasses have no public test",
}
"""path: why private names of torch are used outside the room's `_torch.py`."""
SHARED_TYPE_NAMES = {
    *("Arena", "Group", "Leaving", "Left", "Line", "Message", "Options", "Owner", "Place", "Refused", "Row", "Slot"),
    *("Step", "Table", "Unreadable", "Version", "Welcome", "Wish"),
}
"""Public types of two rooms that still have one name. No others may."""
MACHINE_PATHS: dict[str, str] = {}
"""path: reason."""

HOMELESS_NAMES = {"utils", "util", "common", "helpers", "helper", "misc", "base", "manager"}
# In pieces, so that this file is not found by them.
UNNUMBERED = re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b(?!\(#\d+\))")
# Users named u, me, you and user are made up.
MACHINE_PATH = re.compile(r"(?<![\w.])/(?:root|work|home/(?!u/|me/|you/|user/)\w+|Users/\w+|tmp/(?!argosy)\w+)/\w")
DEVICE_CALL = re.compile(r"\.cpu\(\)|pin_memory|non_blocking|torch\.(cuda|accelerator|Stream|Event)|get_device_module")
DEVICE_FILE = "src/argosy/transfer/devices.py"
DEVICE_ROOMS = tuple(
    f"src/argosy/{room}/"
    for room in ("train", "actors", "collective", "checkpoint", "data", "supervise", "fabric", "transfer", "observe")
)
DEVICE_READERS = {"src/argosy/observe/flops.py"}
"""They only read names and counters of a device that is in use, and are below the room of the device file."""
HEAVY_MODULES = ["torch", "numpy", "msgspec", "click", "rich", "psutil"]


@cache
def repository_files() -> list[Path]:
    """Every file that is, or is about to be, in the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True)
    if listed.returncode == 0:
        names = listed.stdout.decode().split("\0")
        return sorted(ROOT / name for name in names if name and (ROOT / name).is_file())
    skipped = {".venv", ".git", ".cache", "target", "build", "__pycache__", "runs"}
    found = (path for path in ROOT.rglob("*") if path.is_file())
    return sorted(path for path in found if not skipped & set(path.relative_to(ROOT).parts))


def texts() -> Iterator[tuple[str, str]]:
    for path in repository_files():
        try:
            yield path.relative_to(ROOT).as_posix(), path.read_text()
        except UnicodeDecodeError:
            continue  # Not text.


@cache
def trees() -> dict[str, ast.Module]:
    """The Python files of the repository, parsed."""
    return {name: ast.parse(text) for name, text in texts() if name.endswith(".py")}


def package_trees() -> dict[str, ast.Module]:
    prefix = "src/argosy/"
    return {name.removeprefix(prefix): tree for name, tree in trees().items() if name.startswith(prefix)}


def rooms() -> set[str]:
    return {path.parent.name for path in PACKAGE.glob("*/__init__.py")}


def level_of(room: str) -> int:
    return next(level for level, line in enumerate(LAYERS) if room in line)


def imported(name: str, tree: ast.Module) -> Iterator[tuple[str, ...]]:
    """What a file of the package imports from the package: one path per imported thing, without `argosy`."""
    package = ("argosy", *Path(name).parent.parts)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found = [tuple(alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            start = package[: len(package) - node.level + 1] if node.level else ()
            origin = (*start, *(node.module.split(".") if node.module else ()))
            found = [(*origin, alias.name) for alias in node.names]
        else:
            continue
        yield from (path[1:] for path in found if path[0] == "argosy" and path[1:])


def fault(name: str, path: tuple[str, ...]) -> str | None:
    """Why the file must not import this, or None."""
    home, target = Path(name).parts[0].removesuffix(".py"), path[0]
    if target in ("_native", "_reference"):
        return None if home in CELLAR else "reach native code through _select"
    if target not in rooms():
        return (
            None if target in CELLAR or target == "__version__" else "a room takes names from rooms, not from the roof"
        )
    if home == target:
        return None
    if home in CELLAR:
        return "this lies below all rooms"
    inner = PACKAGE / target
    is_module = len(path) == 2 and ((inner / f"{path[1]}.py").exists() or (inner / path[1]).is_dir())
    if len(path) > 2 or (is_module and f" import {path[1]} as {path[1]}\n" not in (inner / "__init__.py").read_text()):
        return f"enter {target} by its door"
    if home in rooms() and level_of(target) <= level_of(home):
        return f"{target} is not below {home}"
    return None


def import_faults() -> list[str]:
    return [
        f"src/argosy/{name} imports argosy.{'.'.join(path)}: {why}"
        for name, tree in package_trees().items()
        for path in imported(name, tree)
        if (why := fault(name, path))
    ]


def test_the_map_names_the_rooms_that_exist():
    assert set().union(*LAYERS) == rooms()
    assert {path.stem for path in PACKAGE.glob("*.py")} <= ROOFS | CELLAR


def test_imports_point_down_and_enter_by_doors():
    assert import_faults() == []


def folder_of(path: tuple[str, ...]) -> str:
    """The folder of a room that a path of the package leads into."""
    return path[1] if len(path) > 1 and (PACKAGE / path[0] / path[1]).is_dir() else ""


def test_imports_point_down_between_the_folders_of_a_room():
    faults: list[str] = []
    assert {path.parent.parent.name for path in PACKAGE.glob("*/*/__init__.py")} - set(FLAT) == set(FOLDERS)
    for room, lines in FOLDERS.items():
        levels = {folder: level for level, line in enumerate(lines) for folder in line}
        assert {"", *(path.parent.name for path in (PACKAGE / room).glob("*/__init__.py"))} == set(levels)
        for name, tree in package_trees().items():
            home = folder_of(Path(name).parts[:2]) if Path(name).parts[0] == room else None
            if home is None or name == f"{room}/__init__.py":
                continue
            targets = {folder_of(path) for path in imported(name, tree) if path[0] == room}
            faults += [
                f"{name} imports {room}/{target}"
                for target in targets
                if target != home and levels[target] <= levels[home]
            ]
    assert faults == []


def test_decisions_are_pure():
    found: list[str] = []
    for name, tree in package_trees().items():
        for node in ast.walk(tree) if name.startswith("control/") else ():
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            found += [f"{name} imports {each}" for each in names if each not in PURE and not each.startswith("argosy.")]
            if isinstance(node, ast.Name) and node.id in IMPURE_CALLS:
                found.append(f"{name} names {node.id}")
    assert found == []


def test_one_file_knows_accelerators():
    """Of those that run a training; the cost model and the graph name devices without touching one."""
    found = {
        name: sorted({found.group() for found in DEVICE_CALL.finditer(text)})
        for name, text in texts()
        if name.startswith(DEVICE_ROOMS) and name not in {DEVICE_FILE, *DEVICE_READERS} and DEVICE_CALL.search(text)
    }
    assert found == {}


@pytest.mark.parametrize(
    ("name", "path"),
    [
        ("core/ids.py", ("process", "Restart")),
        ("core/ids.py", ("process",)),
        ("process/root.py", ("core", "errors", "ConfigError")),
        ("process/root.py", ("core", "errors")),
        ("process/root.py", ("_native", "punch_hole")),
        ("process/root.py", ("Restart",)),
        ("__init__.py", ("core", "errors", "ConfigError")),
        ("_select.py", ("core", "ConfigError")),
    ],
)
def test_a_wrong_import_is_seen(name: str, path: tuple[str, ...]):
    assert fault(name, path)


def test_relative_and_guarded_imports_are_seen():
    source = """
from ..core import errors
if TYPE_CHECKING:
    from .root import x
def f():
    import argosy.cli.run
"""
    assert list(imported("process/agent.py", ast.parse(source))) == [
        ("core", "errors"),
        ("process", "root", "x"),
        ("cli", "run"),
    ]


def test_no_file_has_a_homeless_name():
    words = {
        name: HOMELESS_NAMES & {word for part in Path(name).parts for word in re.split(r"[_\-.]", part.lower())}
        for name in trees()
    }
    assert {name: found for name, found in words.items() if found} == {}


def test_the_public_names_are_pinned_and_exist():
    assert sorted(argosy.__all__) == sorted(PUBLIC_NAMES)
    assert len(PUBLIC_NAMES) <= PUBLIC_NAMES_MAX
    assert not set(PUBLIC_NAMES) & rooms()
    assert [name for name in PUBLIC_NAMES if not hasattr(argosy, name)] == []


def test_importing_argosy_imports_nothing_heavy():
    program = (
        "import sys; before = set(sys.modules); import argosy, json; "
        f"print(json.dumps(sorted((set(sys.modules) - before) & set({HEAVY_MODULES!r}))))"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert json.loads(run.stdout) == []


def test_files_are_short_enough_to_read():
    long = {
        name: lines
        for name, text in texts()
        if name.endswith((".py", ".rs", ".pyi")) and (lines := text.count("\n")) > FILE_LINES_MAX
    }
    assert {name: lines for name, lines in long.items() if name not in LONG_FILES} == {}
    assert set(LONG_FILES) <= set(long), "an exception that is no longer needed"


def functions() -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    for name, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield f"{name}:{node.name}", node


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """Those that a caller passes: not `self`, and not what click or pytest fill in."""
    decorators = " ".join(ast.unparse(decorator) for decorator in node.decorator_list)
    if re.search(r"\b(click|command|option|argument|fixture)\b", decorators) or node.name.startswith("test_"):
        return []
    names = [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    return [name for name in names if name not in ("self", "cls")]


def test_functions_fit_a_screen():
    long = {
        name: lines
        for name, node in functions()
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    }
    assert {name: lines for name, lines in long.items() if name not in LONG_FUNCTIONS} == {}
    assert set(LONG_FUNCTIONS) <= set(long), "an exception that is no longer needed"


def test_functions_take_few_parameters():
    many = {name: count for name, node in functions() if (count := len(parameters(node))) > PARAMETERS_MAX}
    assert {name: count for name, count in many.items() if name not in MANY_PARAMETERS} == {}
    assert set(MANY_PARAMETERS) <= set(many), "an exception that is no longer needed"


def test_every_module_says_what_it_is_for():
    assert [name for name, tree in trees().items() if not ast.get_docstring(tree)] == []


def depths() -> dict[str, tuple[int, bool]]:
    """For each class of the package: how many classes of ours it stands on, and whether it is an error."""
    classes = {
        node.name: (
            f"src/argosy/{name}:{node.name}",
            [ast.unparse(b).split("[")[0].split(".")[-1] for b in node.bases],
        )
        for name, tree in package_trees().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
    }

    def lineage(name: str) -> list[str]:
        """The longest way up through our own classes."""
        ours = [lineage(b) for b in classes[name][1] if b in classes and b != name]
        return [name, *max(ours, key=len, default=[])]

    return {place: (len(lineage(name)) - 1, "ArgosyError" in lineage(name)) for name, (place, _) in classes.items()}


def test_classes_stand_on_few_others():
    deep = {
        place: depth
        for place, (depth, is_error) in depths().items()
        if depth > (ERROR_DEPTH_MAX if is_error else SUBCLASS_DEPTH_MAX)
    }
    assert {place: depth for place, depth in deep.items() if place not in DEEP_CLASSES} == {}
    assert set(DEEP_CLASSES) <= set(deep), "an exception that is no longer needed"


def test_no_two_public_types_share_a_name():
    places: dict[str, list[str]] = {}
    for name, tree in package_trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                places.setdefault(node.name, []).append(name)
    shared = {name: found for name, found in places.items() if len(found) > 1}
    assert {name: found for name, found in shared.items() if name not in SHARED_TYPE_NAMES} == {}


def uses_private_torch(tree: ast.Module) -> bool:
    """Whether a file names a private module, class or function of torch, also by another name or through a cast."""
    called: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            called |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}

    def whole(node: ast.expr) -> str:
        if isinstance(node, ast.Attribute):
            return f"{whole(node.value)}.{node.attr}"
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "cast":
            return whole(node.args[1])
        return called.get(node.id, node.id) if isinstance(node, ast.Name) else ""

    private = re.compile(r"torch(\.\w+)*\._(?!_)[\w.]*")
    attributes = [whole(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    return any(private.fullmatch(name) for name in [*called.values(), *attributes])


@pytest.mark.parametrize(
    "source",
    [
        "import torch._dynamo",
        "from torch._C import x",
        "import torch\ntorch._foreach_norm",
        "import torch.distributed as dist\ndist.distributed_c10d._get_default_store()",
        "import torch\ncast(Any, torch)._C.x()",
    ],
)
def test_a_private_name_of_torch_is_seen(source: str):
    assert uses_private_torch(ast.parse(source))


def test_private_names_of_torch_are_used_in_one_file_of_a_room():
    found = [
        f"src/argosy/{name}"
        for name, tree in package_trees().items()
        if Path(name).name != "_torch.py" and uses_private_torch(tree)
    ]
    assert [name for name in found if name not in PRIVATE_TORCH] == []
    places = [(Path(name).parts[0], name) for name in package_trees() if Path(name).name == "_torch.py"]
    assert len({room for room, _ in places}) == len(places), f"one file of a room: {places}"


def found_in_texts(pattern: re.Pattern[str]) -> dict[str, list[str]]:
    found = {name: [match[0] for match in pattern.finditer(text)] for name, text in texts()}
    return {name: matches for name, matches in found.items() if matches}


def test_what_is_left_to_do_has_a_number():
    assert found_in_texts(UNNUMBERED) == {}


def test_no_file_knows_the_machine_it_was_written_on():
    found = found_in_texts(MACHINE_PATH)
    assert {name: paths for name, paths in found.items() if name not in MACHINE_PATHS} == {}
    assert set(MACHINE_PATHS) <= set(found), "an exception that is no longer needed"


def test_every_exception_has_a_reason():
    for listed in (FLAT, LONG_FILES, LONG_FUNCTIONS, MANY_PARAMETERS, DEEP_CLASSES, PRIVATE_TORCH, MACHINE_PATHS):
        assert [name for name, reason in listed.items() if len(reason.split()) < 3] == []
