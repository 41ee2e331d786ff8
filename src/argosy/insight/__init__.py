"""Where every second of a run went: its records, the ledger, verdicts, reports, comparisons.

Pure functions over what `observe` recorded; nothing here is part of a training. Names are imported when first used.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.insight.compare import Comparison as Comparison
    from argosy.insight.compare import Forecast as Forecast
    from argosy.insight.compare import compare_runs as compare_runs
    from argosy.insight.exports import export_run as export_run
    from argosy.insight.exports import send_otlp as send_otlp
    from argosy.insight.live_trace import trace_ranks as trace_ranks
    from argosy.insight.opened import OpenedRun as OpenedRun
    from argosy.insight.opened import open_run as open_run
    from argosy.insight.prometheus import MetricsEndpoint as MetricsEndpoint
    from argosy.insight.prometheus import metric_samples as metric_samples
    from argosy.insight.prometheus import metrics_text as metrics_text
    from argosy.insight.speed_text import speed_lines as speed_lines
    from argosy.insight.trace_report import report_trace as report_trace
    from argosy.insight.trace_report import trace_lines as trace_lines
    from argosy.insight.verdicts import Verdict as Verdict

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
