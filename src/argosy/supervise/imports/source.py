"""Read from a file's source what it imports, and what it sets in the environment, when it is imported."""

import ast
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

# The first optimizer, a wrapper of a model or a compile imports torch._dynamo, half of torch's import time.
_TRAINS = re.compile(rb"optim|compile|backward|[Pp]arallel|fsdp|shard|dynamo|inductor|[Tt]rainer")
# The package itself opens its names on demand.
_RUNS = re.compile(rb"\bargosy\.Run\b|from argosy import [^\n]*\bRun\b")

# The first compiled call imports torch's compiler, two seconds of CPU, which a replaced rank would spend again.
_COMPILES = re.compile(rb"\btorch\.compile\b|from torch import [^\n]*\bcompile\b")
COMPILER = "torch._inductor.compile_fx"


class Statement(NamedTuple):
    """One import statement; `names` is empty for `import module`.

    `module` may also be a setting of an environment variable: `$NAME=value`, `$NAME?=value` for a
    default, or `$NAME` if the value or whether it is set cannot be told from the source.
    """

    module: str
    names: tuple[str, ...]
    level: int
    main_only: bool


class PythonSource(NamedTuple):
    """What one file imports when it is itself imported, and whether it names torch or a training in any place."""

    statements: tuple[Statement, ...]
    torch: bool
    trains: bool


def read_source(text: bytes) -> PythonSource:
    """Return the imports of a file; SyntaxError or ValueError if it is no Python."""
    tree = ast.parse(text)
    statements = tuple(_statements(tree.body, main_only=False, certain=True))
    names_torch = b"torch" in text and any(_is_torch(node) for node in ast.walk(tree))
    if _RUNS.search(text):
        statements = (*statements, Statement("argosy.train", ("Run",), 0, False))
    if _COMPILES.search(text):
        statements = (*statements, Statement(COMPILER, (), 0, False))
    return PythonSource(statements, names_torch, _TRAINS.search(text) is not None)


def _statements(body: Sequence[ast.stmt], main_only: bool, certain: bool) -> Iterator[Statement]:
    """Yield what runs when the module is imported: not functions, type checking or `except` branches."""
    for node in body:
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Statement(alias.name, (), 0, main_only)
            case ast.ImportFrom(module=module, names=names, level=level):
                yield Statement(module or "", tuple(alias.name for alias in names), level, main_only)
            case ast.If(test=test, body=inner, orelse=orelse):
                is_main = _names(test, "__name__")
                if not _names(test, "TYPE_CHECKING"):
                    yield from _statements(inner, main_only or is_main, certain and is_main)
                yield from _statements(orelse, main_only, False)
            case ast.Try() | ast.TryStar():
                yield from _statements([*node.body, *node.orelse, *node.finalbody], main_only, False)
            case ast.With(body=inner) | ast.ClassDef(body=inner):
                yield from _statements(inner, main_only, certain)
            case ast.Assign() | ast.Expr():
                for setting in _settings(node):
                    yield Statement(setting if certain else variable(setting), (), 0, main_only)
            case _:
                pass


def _settings(node: ast.Assign | ast.Expr) -> Iterator[str]:
    """Yield the environment variables that a statement sets."""
    match node:
        case ast.Assign(targets=[ast.Subscript(value=target, slice=ast.Constant(value=str(name)))], value=value) if (
            _names(target, "environ")
        ):
            text = _literal(value)
            yield f"${name}" if text is None else f"${name}={text}"
        case ast.Expr(
            value=ast.Call(
                func=ast.Attribute(value=target, attr="setdefault"),
                args=[ast.Constant(value=str(name)), value],
            )
        ) if _names(target, "environ"):
            text = _literal(value)
            yield f"${name}" if text is None else f"${name}?={text}"
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=target, attr="update" | "pop"), args=args)) if _names(
            target, "environ"
        ):
            for given in args:
                for key in given.keys if isinstance(given, ast.Dict) else [given]:
                    name = _literal(key)
                    if name is not None:
                        yield f"${name}"
        case _:
            pass


def _literal(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None


def variable(setting: str) -> str:
    """Return `$NAME` of a setting."""
    return setting.partition("=")[0].removesuffix("?")


def _names(test: ast.expr, name: str) -> bool:
    """Tell whether a condition mentions a name, also as `module.name`."""
    return any(name in (getattr(node, "id", None), getattr(node, "attr", None)) for node in ast.walk(test))


def _is_torch(node: ast.AST) -> bool:
    match node:
        case ast.Import(names=names):
            return any(top(alias.name) == "torch" for alias in names)
        case ast.ImportFrom(module=str(module), level=0):
            return top(module) == "torch"
        case ast.Call(
            func=ast.Name(id="import_module" | "__import__") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str(name)), *_],
        ):
            return top(name) == "torch"
        case _:
            return False


def top(name: str) -> str:
    """Return the package that a dotted name begins with."""
    return name.partition(".")[0]
