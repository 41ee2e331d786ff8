"""Charts as SVG text and PNG data, without a script: a page with them needs no other file. Pure."""

import base64
import math
import struct
import zlib
from collections.abc import Mapping, Sequence
from html import escape

import numpy as np
from numpy.typing import NDArray

from argosy.insight.lanes import Class

WIDTH, HEIGHT, LEFT, BOTTOM = 960, 220, 64, 28
POINTS_MAX = 800
FEW_POINTS = 12
"""So few are also drawn as dots: a line of one point cannot be seen."""
COLOURS = {
    Class.COMPUTE: "#2f9e44",
    Class.COMM: "#1971c2",
    Class.PEER_WAIT: "#e8590c",
    Class.DATA: "#f08c00",
    Class.COPY: "#66a80f",
    Class.CHECKPOINT: "#9c36b5",
    Class.EVALUATION: "#0c8599",
    Class.COMPILE: "#6741d9",
    Class.GC: "#c2255c",
    Class.HOST: "#868e96",
    Class.STARTUP: "var(--startup)",
    Class.RESTART: "#e03131",
    Class.LOST: "#7f1d1d",
    Class.SPARE: "#adb5bd",
    Class.IDLE: "var(--idle)",
}


def thin(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Keep the least and the greatest of every few points, so that no peak is lost."""
    if len(x) <= POINTS_MAX:
        return x, y
    parts = np.array_split(np.arange(len(x)), POINTS_MAX // 2)
    kept = sorted({int(part[pick]) for part in parts for pick in (y[part].argmin(), y[part].argmax())})
    return x[kept], y[kept]


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """About as many round numbers between two as are wanted."""
    rough = (high - low) / wanted
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def _x_labels(values: Sequence[float], begin: float, across: float, unit: str = "") -> list[str]:
    found: list[str] = []
    for value in values:
        x = LEFT + (value - begin) * across
        anchor = "end" if x > WIDTH - 40 else "middle"
        found.append(f'<text x="{x:.1f}" y="{HEIGHT - 8}" text-anchor="{anchor}">{value:.6g}{unit}</text>')
    return found


def line_chart(
    series: Mapping[str, tuple[NDArray[np.float64], NDArray[np.float64]]],
    x_name: str,
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Lines over a common axis; `marks` are vertical lines with a text."""
    finite = {name: (x[np.isfinite(y)], y[np.isfinite(y)]) for name, (x, y) in series.items()}
    finite = {name: pair for name, pair in finite.items() if len(pair[0])}
    if not finite:
        return "<p>nothing was recorded</p>"
    xs, ys = (np.concatenate([pair[axis] for pair in finite.values()]) for axis in (0, 1))
    x0, x1, y0, y1 = float(xs.min()), float(xs.max()), float(min(ys.min(), 0)), float(ys.max())
    x1, y1 = (x1 if x1 > x0 else x0 + 1), (y1 if y1 > y0 else y0 + 1)
    across = (WIDTH - LEFT - 8) / (x1 - x0)
    up = (HEIGHT - BOTTOM - 10) / (y1 - y0)
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">']
    for value in ticks(y0, y1):
        y = HEIGHT - BOTTOM - (value - y0) * up
        parts.append(f'<path class="grid" d="M{LEFT} {y:.1f}H{WIDTH - 8}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.4g}</text>')
    parts += _x_labels(ticks(x0, x1, 8), x0, across)
    for at, text in marks:
        if x0 <= at <= x1:
            x = LEFT + (at - x0) * across
            parts.append(f'<path class="mark" d="M{x:.1f} 6V{HEIGHT - BOTTOM}"><title>{escape(text)}</title></path>')
    for number, (name, pair) in enumerate(finite.items()):
        px, py = thin(*pair)
        points = " ".join(
            f"{LEFT + (a - x0) * across:.1f},{HEIGHT - BOTTOM - (b - y0) * up:.1f}"
            for a, b in zip(px.tolist(), py.tolist(), strict=True)
        )
        parts.append(f'<polyline class="s{number % 6}" points="{points}"><title>{escape(name)}</title></polyline>')
        for point in points.split() if len(px) <= FEW_POINTS else ():
            x, _, y = point.partition(",")
            parts.append(f'<circle class="s{number % 6}" cx="{x}" cy="{y}" r="3"/>')
    legend = " ".join(f'<span class="key s{number % 6}">{escape(name)}</span>' for number, name in enumerate(finite))
    return f'{"".join(parts)}</svg><p class="legend">{legend} <span class="axis">over {escape(x_name)}</span></p>'


def class_legend(kinds: Sequence[Class]) -> str:
    """A coloured name for each class."""
    keys = [f'<span><i style="background:{COLOURS[kind]}"></i>{kind.name.lower()}</span>' for kind in kinds]
    return f'<p class="legend">{" ".join(keys)}</p>'


def stacked_bars(rows: Sequence[tuple[str, Mapping[Class, float]]]) -> str:
    """One horizontal bar per row, divided by class; widths are shares of the longest."""
    longest = max((sum(parts.values()) for _, parts in rows), default=0.0) or 1.0
    tall = 18
    parts = [f'<svg viewBox="0 0 {WIDTH} {tall * len(rows) + 4}" role="img">']
    for number, (name, values) in enumerate(rows):
        x = float(LEFT)
        parts.append(f'<text x="{LEFT - 6}" y="{number * tall + 13}" text-anchor="end">{escape(name)}</text>')
        for kind in COLOURS:
            value = values.get(kind, 0.0)
            wide = (WIDTH - LEFT - 8) * value / longest
            if wide > 0.05:
                title = f"{name}: {kind.name.lower()} {value:.3f} s"
                parts.append(
                    f'<rect x="{x:.2f}" y="{number * tall + 1}" width="{wide:.2f}" height="{tall - 3}" '
                    f'fill="{COLOURS[kind]}"><title>{escape(title)}</title></rect>'
                )
            x += wide
    return f"{''.join(parts)}</svg>"


def stacked_band(edges: NDArray[np.float64], shares: NDArray[np.float64]) -> str:
    """The shares of each class (columns) in each interval between edges (rows), as a band over time."""
    span = float(edges[-1] - edges[0]) or 1.0
    left = [LEFT + (WIDTH - LEFT - 8) * float(edge - edges[0]) / span for edge in edges]
    parts = [f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" shape-rendering="crispEdges">']
    for number in range(len(edges) - 1):
        y = float(HEIGHT - BOTTOM)
        for kind in COLOURS:
            tall = (HEIGHT - BOTTOM - 6) * float(shares[number, kind])
            if tall > 0.05:
                y -= tall
                parts.append(
                    f'<rect x="{left[number]:.2f}" y="{y:.2f}" width="{left[number + 1] - left[number] + 0.3:.2f}" '
                    f'height="{tall:.2f}" fill="{COLOURS[kind]}"/>'
                )
    parts += _x_labels(ticks(float(edges[0]), float(edges[-1]), 8), float(edges[0]), (WIDTH - LEFT - 8) / span, " s")
    return f"{''.join(parts)}</svg>"


def heat_map(levels: NDArray[np.uint8], title: str) -> str:
    """Rows are ranks, columns steps; 0 is normal, 255 far slower than the others. A PNG in the page."""
    rows, columns = levels.shape
    red = np.array([240, 62, 62], np.float64)
    calm = np.array([222, 226, 230], np.float64)
    share = levels[..., None] / 255.0
    pixels = (calm * (1 - share) + red * share).astype(np.uint8)
    raw = b"".join(b"\0" + pixels[row].tobytes() for row in range(rows))
    header = struct.pack(">IIBBBBB", columns, rows, 8, 2, 0, 0, 0)
    chunks = [(b"IHDR", header), (b"IDAT", zlib.compress(raw, 9)), (b"IEND", b"")]
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    )
    data = base64.b64encode(png).decode()
    tall = max(60, min(400, rows * 16))
    return f'<img class="heat" style="height:{tall}px" alt="{escape(title)}" src="data:image/png;base64,{data}">'
