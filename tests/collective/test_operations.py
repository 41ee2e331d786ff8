"""Every operation is equal to Gloo's, on both engines."""

from pathlib import Path

import pytest
from crew import crew

SCRIPTS = Path(__file__).parent / "scripts"
ENGINES = pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])


@ENGINES
@pytest.mark.parametrize("size", [2, *(pytest.param(size, marks=pytest.mark.soak) for size in (3, 4))])
def test_every_operation_is_equal_to_gloos(size: int, compiled: bool):
    said = crew(SCRIPTS / "operations.py", size, compiled=compiled)
    assert [text.splitlines()[-1] for text in said] == ["good"] * size  # Gloo logs of its own errors


def numbers(text: str) -> list[tuple[str, list[float]]]:
    """Lines of a name and numbers, without the one that tells the backend, and without logs."""
    found: list[tuple[str, list[float]]] = []
    for line in (line for line in text.splitlines() if not line.startswith("[rank")):
        words = line.split()
        values = [word for word in words if word.replace(".", "").replace("-", "").replace("e", "").isdigit()]
        if values:
            found.append((" ".join(words[: -len(values)]), [float(value) for value in values]))
    return found


@pytest.mark.soak
@pytest.mark.parametrize("size", [2, 4])
def test_what_is_built_on_groups_gets_the_numbers_of_gloo(size: int, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BACKEND", "gloo")
    expected = crew(SCRIPTS / "frameworks.py", size)
    monkeypatch.setenv("BACKEND", "argosy")
    actual = crew(SCRIPTS / "frameworks.py", size)
    for rank in range(size):
        theirs, ours = numbers(expected[rank]), numbers(actual[rank])
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        for (name, mine), (_, other) in zip(ours, theirs, strict=True):
            assert mine == pytest.approx(other, rel=1e-4, abs=1e-5), name
        assert "backend argosy" in actual[rank]
