"""No class of the shells grows into a knot."""

import ast
from pathlib import Path

ROOM = Path(__file__).resolve().parents[2] / "src/argosy/supervise"
METHODS_MAX, ATTRIBUTES_MAX = 20, 15


def test_no_class_of_the_shells_grows_into_a_knot():
    classes = [
        (path.name, node)
        for path in ROOM.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef)
    ]
    assert classes
    sizes = {f"{name}:{node.name}": (methods(node), len(own_attributes(node))) for name, node in classes}
    assert {name: size for name, size in sizes.items() if size[0] > METHODS_MAX or size[1] > ATTRIBUTES_MAX} == {}


def methods(node: ast.ClassDef) -> int:
    return sum(isinstance(each, ast.FunctionDef) for each in node.body)


def own_attributes(node: ast.ClassDef) -> set[str]:
    """What the methods of a class assign to `self`."""
    stored = [each for each in ast.walk(node) if isinstance(each, ast.Attribute) and isinstance(each.ctx, ast.Store)]
    return {each.attr for each in stored if isinstance(each.value, ast.Name) and each.value.id == "self"}
