"""The table of docs/contributing.md leads somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_where_to_change_what_names_files_that_exist():
    text = (ROOT / "docs/contributing.md").read_text()
    table = text[text.index("| to change |") : text.index("## Add a restart policy")].strip().splitlines()
    assert [line for line in table if not line.startswith("|")] == []
    rows = [line.split("|")[2:4] for line in table[2:]]
    places = ((ROOT / "src/argosy", ROOT), (ROOT / "tests", ROOT))
    named = [(base, path) for row in rows for base, cell in zip(places, row, strict=True) for path in found_paths(cell)]
    assert [path for bases, path in named if not any((base / path).exists() for base in bases)] == []


def found_paths(cell: str) -> list[str]:
    """The files that a cell of the table names."""
    return [path for path in re.findall(r"`([\w./]+)`", cell) if "/" in path]
