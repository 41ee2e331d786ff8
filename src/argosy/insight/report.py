"""The report of a run: one HTML page that needs nothing else. It holds no script and sends no request."""

import time
from collections.abc import Iterable
from html import escape
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from argosy.insight.charts import COLOURS, class_legend, heat_map, line_chart, stacked_band, stacked_bars
from argosy.insight.lanes import Class
from argosy.insight.ledger import LaunchLedger
from argosy.insight.opened import OpenedRun
from argosy.insight.verdicts import saving

RANKS_SHOWN = 64
BAND_PARTS = 120
HEAT_STEPS = 480
MAD_DEAD_ZONE = 3.0
SCALARS_SHOWN = 12

STYLE = """
:root{--back:#fff;--text:#212529;--faint:#868e96;--line:#dee2e6;--card:#f8f9fa;--bad:#e03131;--good:#2f9e44;
--startup:#ced4da;--idle:#dee2e6}
@media(prefers-color-scheme:dark){:root{--back:#16181b;--text:#e9ecef;--faint:#868e96;--line:#343a40;--card:#212529;
--startup:#495057;--idle:#343a40}}
body{font:15px/1.5 system-ui,sans-serif;background:var(--back);color:var(--text);max-width:1000px;margin:24px auto;
padding:0 20px}h1{font-size:24px;margin:0}h2{font-size:17px;margin:36px 0 8px}
p{margin:6px 0}.faint,.axis{color:var(--faint)}svg{width:100%;height:auto;display:block}
svg text{font-size:11px;fill:var(--faint)}.grid{stroke:var(--line)}.mark{stroke:var(--bad);stroke-dasharray:4 3}
polyline{fill:none;stroke-width:1.5}.card{background:var(--card);border-left:4px solid var(--bad);padding:10px 14px;
margin:10px 0;border-radius:4px}.good{border-color:var(--good)}.card b{font-size:16px}
code{background:var(--line);padding:1px 5px;border-radius:3px;font-size:13px;overflow-wrap:anywhere}
table{border-collapse:collapse;font-size:13px;width:100%}td,th{padding:3px 8px;text-align:right;
border-bottom:1px solid var(--line)}th:first-child,td:first-child{text-align:left}.scroll{overflow-x:auto}
.legend span{margin-right:14px;font-size:13px;white-space:nowrap}.legend i{display:inline-block;width:10px;height:10px;
border-radius:2px;margin-right:5px}.heat{width:100%;image-rendering:pixelated;border-radius:3px}
.numbers{display:flex;flex-wrap:wrap;gap:10px;margin:14px 0}.numbers div{background:var(--card);padding:8px 16px;
border-radius:4px}.numbers b{display:block;font-size:20px}
"""
LINES = ("#1971c2", "#e8590c", "#2f9e44", "#9c36b5", "#0c8599", "#c2255c")


def write_report(run: OpenedRun, path: Path) -> Path:
    """Write the page and return its path.

    Raises:
        OSError: there is no room, or no permission.
    """
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_text(report_page(run))
    temporary.replace(path)
    return path


def report_page(run: OpenedRun) -> str:
    """The page as text."""
    record = run.data.record
    state = "running" if record.state == "running" else "finished" if record.code == 0 else f"failed ({record.code})"
    began = time.strftime("%Y-%m-%d %H:%M", time.localtime(record.started_at))
    size = f"{record.size} rank{'s' * (record.size > 1)}"
    head = (
        f"<h1>{escape(run.name)}</h1><p>{escape(state)} · {size} on {escape(record.host)} · {began}</p>"
        f'<p class="faint"><code>{escape(" ".join(record.argv))}</code></p>'
    )
    damage = [f'<p class="faint">not complete: {escape(line)}</p>' for line in run.damage[:20]]
    return page(run.name, [head, *_sections(run), *damage])


def page(title: str, body: Iterable[str]) -> str:
    """A page that holds no script and may load nothing."""
    lines = "".join(
        f".s{n}{{stroke:{colour}}}circle.s{n}{{fill:{colour}}}span.key.s{n}{{color:{colour}}}"
        for n, colour in enumerate(LINES)
    )
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1"><link rel="icon" href="data:,">'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        f"<title>{escape(title)} · Argosy</title><style>{STYLE}{lines}</style></head>"
        f"<body>{''.join(body)}</body></html>\n"
    )


def _sections(run: OpenedRun) -> list[str]:
    found: list[str] = []
    if run.has_steps:
        found += [_numbers(run), "<h2>What holds it back</h2>", _verdicts(run)]
    found += _scalars(run)
    if run.has_steps:
        last = run.ledgers[-1]
        found += ["<h2>Steps per second</h2>", _throughput(last)]
        found += ["<h2>Where the time went</h2>", _band(last), "<h2>By rank</h2>", *_rows(last)]
        if len(last.rows) > 1:
            found += ["<h2>Who waits for whom</h2>", _waits(last)]
            found += ["<h2>Slow steps: ranks by steps</h2>", _heat(last)]
            found += _bandwidth(run)
    else:
        found.append("<p>No training step was recorded: the run did not use torch, or ended before its first step.</p>")
    return found


def _numbers(run: OpenedRun) -> str:
    speed = run.speed()
    cells = [("steps", f"{speed.steps:,}"), ("goodput", f"{speed.goodput:.1%}")]
    if speed.step_s is not None and speed.steps_per_s is not None:
        cells += [("per step", f"{speed.step_s * 1e3:.4g} ms"), ("steps/s", f"{speed.steps_per_s:.4g}")]
    if speed.tokens_per_s is not None:
        cells.append(("tokens/s", f"{speed.tokens_per_s:,.0f}"))
    if speed.mfu is not None:
        cells.append(("MFU", f"{speed.mfu:.1%}"))
    if speed.hfu is not None:
        cells.append(("HFU", f"{speed.hfu:.1%}"))
    if speed.tokens_per_s is None and speed.samples_per_s is not None:
        cells.append(("samples/s", f"{speed.samples_per_s:,.4g}"))
    if speed.parameters is not None:
        cells.append(("parameters", f"{speed.parameters:,}"))
    note = (
        f'<p class="faint">MFU: {escape(speed.mfu_source)}; causal attention counted in full</p>' if speed.mfu else ""
    )
    if speed.memory:
        roles = ", ".join(f"{role} {size / 1e6:,.1f} MB" for role, size in speed.memory.items())
        note += f'<p class="faint">memory of a rank: {escape(roles)}</p>'
    return boxes(cells) + note


def boxes(cells: Iterable[tuple[str, str]]) -> str:
    """Numbers with their names below."""
    found = "".join(f"<div><b>{escape(value)}</b>{escape(name)}</div>" for name, value in cells)
    return f'<div class="numbers">{found}</div>'


def _verdicts(run: OpenedRun) -> str:
    verdicts = run.verdicts()
    if not verdicts:
        text = "nothing holds it back" if run.measures is not None else "too few steps for a verdict"
        return f'<div class="card good">{text}</div>'
    cards: list[str] = []
    for verdict in verdicts:
        gain = ""
        if verdict.gain and run.measures is not None:
            gain = f"<p>gain: {escape(saving(run.measures, verdict.gain))}</p>"
        cards.append(
            f'<div class="card"><b>{escape(verdict.what)}</b><p>{escape(verdict.why)}</p>{gain}'
            f'<p>do: {escape(verdict.do)}</p><p class="faint">argosy sql {escape(run.name)} '
            f"<code>{escape(verdict.query)}</code></p></div>"
        )
    return "".join(cards)


def _scalars(run: OpenedRun) -> list[str]:
    names = sorted(run.scalar_names(), key=lambda name: ("loss" not in name, name))[:SCALARS_SHOWN]
    if not names:
        return []
    found = ["<h2>Scalars</h2>"]
    marks = _incident_steps(run)
    for name in names:
        steps, values = run.scalars(name)
        found.append(line_chart({name: (steps.astype(np.float64), values)}, "steps", marks))
    if marks:
        found.append(f'<p class="faint">dashed: {escape("; ".join(text for _, text in marks[:6]))}</p>')
    return found


def _incident_steps(run: OpenedRun) -> list[tuple[float, str]]:
    """At which step a process failed: the last one of its rank that was done before."""
    found: list[tuple[float, str]] = []
    for launch, ledger in zip(run.data.launches, run.ledgers, strict=True):
        for life in launch.lives:
            if not life.ok:
                before = (ledger.steps.rank == life.rank) & (ledger.steps.end <= life.end)
                step = int(ledger.steps.step[before].max()) if before.any() else 0
                found.append((float(step), f"rank {life.rank} failed after step {step}: {life.how}"))
    return found


def _throughput(ledger: LaunchLedger) -> str:
    steps = ledger.steps
    first = int(steps.rank.min())
    mine = steps.rank == first
    end = (steps.end[mine] - ledger.rows[0].begin) / 1e9
    # Groups of as many steps each: intervals of time would hold one step more or less, which is no change of speed.
    groups = np.array_split(np.arange(1, len(end)), max(1, min(200, len(end) // 3)))
    middle, rate = [float(end[:1].sum())], [0.0]
    if len(end) > 1:
        spans = [(float(end[group[0] - 1]), float(end[group[-1]]), len(group)) for group in groups]
        middle = [(begin + until) / 2 for begin, until, _ in spans]
        rate = [count / max(until - begin, 1e-9) for begin, until, count in spans]
    return line_chart({f"rank {first}": (np.array(middle), np.array(rate))}, "seconds since the launch")


def _used(ledger: LaunchLedger) -> list[Class]:
    totals = ledger.totals()
    return [kind for kind in COLOURS if kind in totals]


def _band(ledger: LaunchLedger) -> str:
    begin, end = ledger.rows[0].begin, ledger.rows[0].end
    edges = np.linspace(begin, end, BAND_PARTS + 1).astype(np.int64)
    sums = np.zeros((BAND_PARTS, len(Class)))
    for row in ledger.rows:
        part = row.segments.split(edges)
        place = np.clip(np.searchsorted(edges, part.begin, "right") - 1, 0, BAND_PARTS - 1)
        np.add.at(sums, (place, part.kind), part.end - part.begin)
    shares = sums / np.maximum(sums.sum(axis=1, keepdims=True), 1)
    return stacked_band((edges - begin) / 1e9, shares) + class_legend(_used(ledger))


def _rows(ledger: LaunchLedger) -> list[str]:
    rows = ledger.rows
    note = ""
    if len(rows) > RANKS_SHOWN:
        rows = sorted(rows, key=lambda row: row.totals().get(Class.PEER_WAIT, 0))[:RANKS_SHOWN]
        note = f'<p class="faint">the {RANKS_SHOWN} of {len(ledger.rows)} ranks that wait least for others</p>'
    seconds = [(f"rank {row.rank}", {kind: ns / 1e9 for kind, ns in row.totals().items()}) for row in rows]
    kinds = _used(ledger)
    header = "".join(f"<th>{kind.name.lower()}</th>" for kind in kinds)
    lines = [
        f"<tr><td>{escape(name)}</td>{''.join(f'<td>{values.get(kind, 0.0):.3f}</td>' for kind in kinds)}"
        f"<td>{sum(values.values()):.3f}</td></tr>"
        for name, values in seconds
    ]
    table = f'<div class="scroll"><table><tr><th>seconds</th>{header}<th>all</th></tr>{"".join(lines)}</table></div>'
    return [note, stacked_bars(seconds), class_legend(kinds), table]


def _waits(ledger: LaunchLedger) -> str:
    pairs = sorted(ledger.blame().items(), key=lambda each: -each[1])
    if not pairs:
        return "<p>no rank waited for another</p>"
    lines: list[str] = []
    for (rank, culprit, cause), ns in pairs[:20]:
        name = Class(cause).name.lower() if 0 <= cause < len(Class) else "unresolved"
        lines.append(f"<tr><td>rank {rank} waited for rank {culprit}</td><td>{name}</td><td>{ns / 1e9:.3f}</td></tr>")
    more = f'<p class="faint">{len(pairs) - 20} more in the table waits</p>' if len(pairs) > 20 else ""
    head = "<tr><th>who</th><th>what that one did</th><th>seconds</th></tr>"
    return f"<table>{head}{''.join(lines)}</table>{more}"


def _bandwidth(run: OpenedRun) -> list[str]:
    lines = [
        f"<tr><td>{escape(row.op)}, group {escape(row.group)}</td><td>{row.count:,}</td>"
        f"<td>{row.median_bytes / 1e6:,.3f}</td><td>{row.bus_bytes_per_s / 1e9:.3f}</td></tr>"
        for row in run.bandwidth()[:12]
    ]
    head = "<tr><th>collective</th><th>count</th><th>median MB</th><th>bus GB/s</th></tr>"
    return ["<h2>Bus bandwidth</h2>", f"<table>{head}{''.join(lines)}</table>"] if lines else []


def slowness(ledger: LaunchLedger) -> NDArray[np.uint8]:
    """Ranks by steps: own work of a step against the others', in MADs beyond a dead zone, as a byte."""
    steps = ledger.steps
    numbers, column = np.unique(steps.step, return_inverse=True)
    grid = np.full((len(ledger.rows), len(numbers)), np.nan)
    waits = steps.spent[:, Class.PEER_WAIT] + steps.spent[:, Class.COMM]
    grid[steps.rank, column] = (steps.lasted - waits) / 1e9
    with np.errstate(all="ignore"):
        middle = np.nanmedian(grid, axis=0)
        mad = np.nanmedian(np.abs(grid - middle), axis=0)
    floor = np.maximum(mad, 0.02 * middle)
    away = (grid - middle) / np.maximum(floor, 1e-9) - MAD_DEAD_ZONE
    return np.clip(np.nan_to_num(away) * 24, 0, 255).astype(np.uint8)


def _heat(ledger: LaunchLedger) -> str:
    levels = slowness(ledger)
    if levels.shape[1] > HEAT_STEPS:  # Of several steps the worst is shown.
        levels = np.stack([part.max(axis=1) for part in np.array_split(levels, HEAT_STEPS, axis=1)], axis=1)
    first, last = int(ledger.steps.step.min()), int(ledger.steps.step.max())
    title = f"ranks 0 to {len(ledger.rows) - 1} from top to bottom, steps {first} to {last} from left to right"
    return f'{heat_map(levels, title)}<p class="faint">{title}; red: own work took longer than the others\'</p>'
