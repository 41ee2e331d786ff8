"""The distributed OS of one host: warden, agent, zygotes, ranks, and what is known about them.

The names below are all that other rooms use; each is imported when first asked for.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.process.checkup import Check as Check
    from argosy.process.checkup import Measured as Measured
    from argosy.process.checkup import judge_machine as judge_machine
    from argosy.process.cleaning import Leftover as Leftover
    from argosy.process.cleaning import Removal as Removal
    from argosy.process.cleaning import RunRemains as RunRemains
    from argosy.process.cleaning import Selection as Selection
    from argosy.process.cleaning import format_bytes as format_bytes
    from argosy.process.cleaning import parse_age as parse_age
    from argosy.process.cleaning import parse_size as parse_size
    from argosy.process.cleaning import plan_cleaning as plan_cleaning
    from argosy.process.client import ask as ask
    from argosy.process.client import connect_agent as connect_agent
    from argosy.process.client import list_runs as list_runs
    from argosy.process.client import reach_agent as reach_agent
    from argosy.process.environment import open_environment as open_environment
    from argosy.process.environment import seal_environment as seal_environment
    from argosy.process.foreground import Foreground as Foreground
    from argosy.process.imports import fingerprint as fingerprint
    from argosy.process.imports import scan as scan
    from argosy.process.incident import Incident as Incident
    from argosy.process.incident import read_incidents as read_incidents
    from argosy.process.launch import Launch as Launch
    from argosy.process.launch import rank_defaults as rank_defaults
    from argosy.process.launch import zygote_key as zygote_key
    from argosy.process.measuring import measure_machine as measure_machine
    from argosy.process.messages import Environment as Environment
    from argosy.process.messages import GetEnvironment as GetEnvironment
    from argosy.process.messages import Happened as Happened
    from argosy.process.messages import LaunchRun as LaunchRun
    from argosy.process.messages import RankInfo as RankInfo
    from argosy.process.messages import Refused as Refused
    from argosy.process.messages import Runs as Runs
    from argosy.process.messages import Shutdown as Shutdown
    from argosy.process.messages import Stacks as Stacks
    from argosy.process.messages import StopRun as StopRun
    from argosy.process.messages import TakeStacks as TakeStacks
    from argosy.process.messages import ToClient as ToClient
    from argosy.process.messages import WatchRun as WatchRun
    from argosy.process.messages import Welcome as Welcome
    from argosy.process.remains import find_leftovers as find_leftovers
    from argosy.process.remains import find_runs as find_runs
    from argosy.process.remains import look_at_run as look_at_run
    from argosy.process.removing import remove as remove
    from argosy.process.removing import remove_empty as remove_empty
    from argosy.process.restart import Restart as Restart
    from argosy.process.restart import parse_restart as parse_restart
    from argosy.process.rundir import RunRecord as RunRecord
    from argosy.process.rundir import default_name as default_name
    from argosy.process.rundir import find_run as find_run
    from argosy.process.rundir import forget_run as forget_run
    from argosy.process.rundir import indexed_runs as indexed_runs
    from argosy.process.rundir import logs_directory as logs_directory
    from argosy.process.rundir import read_facts as read_facts
    from argosy.process.rundir import read_record as read_record
    from argosy.process.stacks import find_py_spy as find_py_spy
    from argosy.process.stream import Merger as Merger
    from argosy.process.stream import Stream as Stream
    from argosy.process.tail import Tail as Tail
    from argosy.process.why import RunView as RunView
    from argosy.process.why import explain as explain
    from argosy.process.why import render as render

_HOMES = {
    name: f"argosy.process.{module}"
    for module, names in {
        "checkup": "Check Measured judge_machine",
        "cleaning": "Leftover Removal RunRemains Selection format_bytes parse_age parse_size plan_cleaning",
        "client": "ask connect_agent list_runs reach_agent",
        "environment": "open_environment seal_environment",
        "foreground": "Foreground",
        "imports": "fingerprint scan",
        "incident": "Incident read_incidents",
        "launch": "Launch rank_defaults zygote_key",
        "measuring": "measure_machine",
        "messages": "Environment GetEnvironment Happened LaunchRun RankInfo Refused Runs Shutdown Stacks StopRun "
        "TakeStacks ToClient WatchRun Welcome",
        "remains": "find_leftovers find_runs look_at_run",
        "removing": "remove remove_empty",
        "restart": "Restart parse_restart",
        "rundir": "RunRecord default_name find_run forget_run indexed_runs logs_directory read_facts read_record",
        "stacks": "find_py_spy",
        "stream": "Merger Stream",
        "tail": "Tail",
        "why": "RunView explain render",
    }.items()
    for name in names.split()
}

__getattr__, __all__ = lazy(__name__, _HOMES)  # pyright: ignore[reportUnsupportedDunderAll]
