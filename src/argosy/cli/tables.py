"""What listings share: aligned columns, JSON, times that a person reads."""

import time
from collections.abc import Sequence


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print aligned columns."""
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def print_json(value: object) -> None:
    """Print a value of structs, dicts and lists."""
    import msgspec

    print(msgspec.json.format(msgspec.json.encode(value), indent=2).decode())


def ago(at: float) -> str:
    """`40 s ago`, `12 min ago`, `3 h ago`, `5 days ago`."""
    seconds = max(0.0, time.time() - at)
    for limit, unit, name in ((120, 1, "s"), (7200, 60, "min"), (172800, 3600, "h")):
        if seconds < limit:
            return f"{seconds / unit:.0f} {name} ago"
    return f"{seconds / 86400:.0f} days ago"
