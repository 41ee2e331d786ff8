"""What listings share: tables (rich in a terminal, plain text in a pipe), JSON, times and sizes as people read them."""

import sys
import time
from collections.abc import Iterable, Sequence

STYLES = {
    **dict.fromkeys(("ok", "running"), "green"),
    **dict.fromkeys(("warn", "starting", "stopping", "restarting", "stopped"), "yellow"),
    **dict.fromkeys(("fail", "failed", "lost", "damaged"), "red"),
}
"""The colour of a cell in a terminal, by its first word."""


def print_table(
    header: Sequence[str], rows: Iterable[Sequence[str]], *, right: Sequence[int] = (), indent: int = 0
) -> None:
    """Print a table; an empty `header` is not shown. Columns in `right` are aligned there.

    In a terminal long cells are wrapped.
    """
    rows = list(rows)
    if not rows and not header:
        return
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0), show_header=bool(header))
        for column, name in enumerate(header or rows[0]):
            table.add_column(name, justify="right" if column in right else "left", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell, STYLES.get(cell.partition(" ")[0], "")) for cell in row))
        Console(highlight=False).print(Padding(table, (0, 0, 0, indent), expand=False))
        return
    lines = [header, *rows] if header else rows
    columns = [
        [cell.rjust(width) if number in right else cell.ljust(width) for cell in column]
        for number, column in enumerate(zip(*lines, strict=True))
        for width in [max(map(len, column))]
    ]
    for line in zip(*columns, strict=True):
        print(f"{' ' * indent}{'  '.join(line)}".rstrip())


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
