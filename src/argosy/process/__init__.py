"""The distributed OS of one host: warden, agent, zygotes, ranks, and what is known about them."""

from argosy.process import facts
from argosy.process.client import ask, connect_agent, list_runs, reach_agent
from argosy.process.environment import open_environment, seal_environment
from argosy.process.foreground import Foreground
from argosy.process.imports import fingerprint, scan
from argosy.process.launch import Launch, zygote_key
from argosy.process.messages import (
    Environment,
    GetEnvironment,
    Happened,
    LaunchRun,
    Runs,
    Shutdown,
    Stacks,
    StopRun,
    TakeStacks,
    ToClient,
    WatchRun,
    Welcome,
)
from argosy.process.restart import Restart, parse_restart
from argosy.process.rundir import default_name, find_run, forget_run, indexed_runs, read_facts, read_record
from argosy.process.stream import Merger, Stream
from argosy.process.tail import Tail

__all__ = [
    "Environment",
    "Foreground",
    "GetEnvironment",
    "Happened",
    "Launch",
    "LaunchRun",
    "Merger",
    "Restart",
    "Runs",
    "Shutdown",
    "Stacks",
    "StopRun",
    "Stream",
    "Tail",
    "TakeStacks",
    "ToClient",
    "WatchRun",
    "Welcome",
    "ask",
    "connect_agent",
    "default_name",
    "facts",
    "find_run",
    "fingerprint",
    "forget_run",
    "indexed_runs",
    "list_runs",
    "open_environment",
    "parse_restart",
    "reach_agent",
    "read_facts",
    "read_record",
    "scan",
    "seal_environment",
    "zygote_key",
]
