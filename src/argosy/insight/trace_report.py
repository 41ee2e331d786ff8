"""A page, and a few lines, about a profiler trace that any program wrote."""

from html import escape
from pathlib import Path

from argosy.insight.kineto import read_trace
from argosy.insight.report import boxes, page
from argosy.insight.trace_analysis import Cost, TraceSummary, judge_trace, summarise
from argosy.insight.verdicts import Verdict


def trace_lines(summary: TraceSummary, verdicts: list[Verdict]) -> list[str]:
    """What the trace shows, for a terminal."""
    total = max(summary.total_us, 1e-9)
    where = "devices" if summary.devices else "CPU operators (the trace has no kernels)"
    lines = [f"{where}: {total / 1e6:.4g} s, busy {summary.busy_us / total:.1%}, idle {summary.idle_us / total:.1%}"]
    if summary.devices:
        hidden = summary.overlap_us / summary.communication_us if summary.communication_us else 0.0
        lines.append(
            f"compute {summary.compute_us / total:.1%}, communication {summary.communication_us / total:.1%} "
            f"({hidden:.0%} of it overlapped), copies {summary.copy_us / total:.1%}"
        )
    if summary.data_us:
        lines.append(f"waiting for the DataLoader {summary.data_us / total:.1%}")
    for verdict in verdicts:
        lines += [verdict.what, f"  why: {verdict.why}", f"  do: {verdict.do}"]
    if not verdicts:
        lines.append("nothing holds it back")
    return lines


def report_trace(path: Path, output: Path | None = None) -> tuple[Path, TraceSummary, list[Verdict]]:
    """Write the page about a trace (by default beside it); returns its path and what it says.

    Raises:
        ConfigError: it is no trace.
        OSError: it cannot be read, or the page not written.
    """
    summary = summarise(read_trace(path))
    verdicts = judge_trace(summary)
    target = output or path.with_name(f"{path.name.partition('.')[0]}.report.html")
    target.write_text(trace_page(summary, verdicts))
    return target, summary, verdicts


def trace_page(summary: TraceSummary, verdicts: list[Verdict]) -> str:
    """The page as text."""
    name = Path(summary.path).name
    body = [f"<h1>{escape(name)}</h1>"]
    total = max(summary.total_us, 1e-9)
    cells = [("seconds", f"{total / 1e6:.4g}"), ("busy", f"{summary.busy_us / total:.1%}")]
    if summary.devices:
        cells += [
            ("compute", f"{summary.compute_us / total:.1%}"),
            ("communication", f"{summary.communication_us / total:.1%}"),
            ("overlapped", f"{summary.overlap_us / max(summary.communication_us, 1e-9):.1%}"),
            ("copies", f"{summary.copy_us / total:.1%}"),
        ]
    body += [boxes(cells), "<h2>What holds it back</h2>"]
    for verdict in verdicts:
        body.append(
            f'<div class="card"><b>{escape(verdict.what)}</b><p>{escape(verdict.why)}</p>'
            f"<p>do: {escape(verdict.do)}</p></div>"
        )
    if not verdicts:
        body.append('<div class="card good">nothing holds it back</div>')
    for title, costs in (("Kernels", summary.kernels), ("Operators, by own time", summary.operators)):
        if costs:
            body += [f"<h2>{title}</h2>", _table(costs, total)]
    body += [f'<p class="faint">not complete: {escape(line)}</p>' for line in summary.damage]
    return page(name, body)


def _table(costs: list[Cost], total: float) -> str:
    lines = [
        f"<tr><td>{escape(cost.name[:120])}</td><td>{cost.count:,}</td><td>{cost.total_us / 1e3:,.3f}</td>"
        f"<td>{cost.total_us / total:.1%}</td><td>{cost.median_us:,.1f}</td></tr>"
        for cost in costs
    ]
    head = "<tr><th>name</th><th>count</th><th>total ms</th><th>share</th><th>median us</th></tr>"
    return f'<div class="scroll"><table>{head}{"".join(lines)}</table></div>'
