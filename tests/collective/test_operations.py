"""Every operation is equal to Gloo's, on both engines."""

from pathlib import Path

import pytest
from crew import crews

SCRIPTS = Path(__file__).parent / "scripts"
FRAMEWORKS = ["torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.pipelining"]
ENGINES = pytest.mark.parametrize("compiled", [True, False], ids=["native", "reference"])


@ENGINES
def test_every_operation_is_equal_to_gloos(compiled: bool):
    sizes = (2, 3, 4) if compiled else (2, 3)
    for said in crews(SCRIPTS / "operations.py", [(size, "") for size in sizes], compiled=compiled):
        assert {text.splitlines()[-1] for text in said} == {"good"}  # Gloo logs of its own errors


def numbers(text: str) -> list[tuple[str, list[float]]]:
    """Lines of a name and numbers, without the one that tells the backend, and without logs."""
    found: list[tuple[str, list[float]]] = []
    for line in (line for line in text.splitlines() if not line.startswith("[rank")):
        words = line.split()
        values = [word for word in words if word.replace(".", "").replace("-", "").replace("e", "").isdigit()]
        if values:
            found.append((" ".join(words[: -len(values)]), [float(value) for value in values]))
    return found


@pytest.mark.system
def test_what_is_built_on_groups_gets_the_numbers_of_gloo():
    parties = [(size, backend) for size in (2, 3, 4) for backend in ("gloo", "argosy")]
    told = crews(SCRIPTS / "frameworks.py", parties, preload=FRAMEWORKS)
    for expected, actual in zip(told[::2], told[1::2], strict=True):
        for theirs, ours in zip(expected, actual, strict=True):
            assert "backend argosy" in ours
            assert [name for name, _ in numbers(ours)] == [name for name, _ in numbers(theirs)]
            for (name, mine), (_, other) in zip(numbers(ours), numbers(theirs), strict=True):
                assert mine == pytest.approx(other, rel=1e-4, abs=1e-5), name
