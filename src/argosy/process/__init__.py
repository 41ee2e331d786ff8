"""The distributed OS of one host: warden, agent, zygotes, ranks, and what is known about them.

    host      warden and agent, what they say to each other      run       a run's decisions, facts and files
    rank      zygote, fork, user code, end                       imports   what a script will import
    evidence  stacks, hangs, incidents, why                      output    log files and the merged stream
    terminal  the user's side                                    upkeep    doctor and clean
    actors    meshes of ranks that are called like objects

The names below are all that other rooms use; each is imported when first asked for.
"""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.process.actors.cluster import Cluster as Cluster
    from argosy.process.actors.cluster import connect as connect
    from argosy.process.actors.cluster import local as local
    from argosy.process.actors.cluster import serve as serve
    from argosy.process.actors.events import MeshEvent as MeshEvent
    from argosy.process.actors.handles import Actor as Actor
    from argosy.process.actors.handles import Actors as Actors
    from argosy.process.actors.host import endpoint as endpoint
    from argosy.process.actors.mesh import Mesh as Mesh
    from argosy.process.actors.readiness import Answers as Answers
    from argosy.process.actors.readiness import LogLine as LogLine
    from argosy.process.actors.readiness import Tcp as Tcp
    from argosy.process.actors.replies import Replies as Replies
    from argosy.process.actors.replies import Reply as Reply
    from argosy.process.evidence.incident import Incident as Incident
    from argosy.process.evidence.incident import read_incidents as read_incidents
    from argosy.process.evidence.stacks import find_py_spy as find_py_spy
    from argosy.process.evidence.why import Report as Report
    from argosy.process.evidence.why import RunView as RunView
    from argosy.process.evidence.why import explain as explain
    from argosy.process.evidence.why import sections as sections
    from argosy.process.host.between import ended_ranks as ended_ranks
    from argosy.process.host.messages import Environment as Environment
    from argosy.process.host.messages import GetEnvironment as GetEnvironment
    from argosy.process.host.messages import Happened as Happened
    from argosy.process.host.messages import LaunchRun as LaunchRun
    from argosy.process.host.messages import RankInfo as RankInfo
    from argosy.process.host.messages import Refused as Refused
    from argosy.process.host.messages import Runs as Runs
    from argosy.process.host.messages import Stacks as Stacks
    from argosy.process.host.messages import StopRun as StopRun
    from argosy.process.host.messages import TakeStacks as TakeStacks
    from argosy.process.host.messages import ToClient as ToClient
    from argosy.process.host.messages import WatchRun as WatchRun
    from argosy.process.host.messages import Welcome as Welcome
    from argosy.process.imports.scan import fingerprint as fingerprint
    from argosy.process.imports.scan import scan as scan
    from argosy.process.output.follower import Follower as Follower
    from argosy.process.output.stream import Out as Out
    from argosy.process.output.stream import Stream as Stream
    from argosy.process.rank.environment import open_environment as open_environment
    from argosy.process.rank.environment import own_limits as own_limits
    from argosy.process.rank.environment import seal_environment as seal_environment
    from argosy.process.run.facts import LaunchEnded as LaunchEnded
    from argosy.process.run.facts import LaunchStarted as LaunchStarted
    from argosy.process.run.facts import RankExited as RankExited
    from argosy.process.run.facts import RankStarted as RankStarted
    from argosy.process.run.launch import Launch as Launch
    from argosy.process.run.launch import rank_defaults as rank_defaults
    from argosy.process.run.restart import Restart as Restart
    from argosy.process.run.restart import parse_restart as parse_restart
    from argosy.process.run.rundir import RunRecord as RunRecord
    from argosy.process.run.rundir import default_name as default_name
    from argosy.process.run.rundir import find_run as find_run
    from argosy.process.run.rundir import forget_run as forget_run
    from argosy.process.run.rundir import indexed_runs as indexed_runs
    from argosy.process.run.rundir import logs_directory as logs_directory
    from argosy.process.run.rundir import read_facts as read_facts
    from argosy.process.run.rundir import read_record as read_record
    from argosy.process.run.zygote_key import zygote_key as zygote_key
    from argosy.process.terminal.client import ask as ask
    from argosy.process.terminal.client import end_daemons as end_daemons
    from argosy.process.terminal.client import find_living as find_living
    from argosy.process.terminal.client import list_runs as list_runs
    from argosy.process.terminal.client import reach_agent as reach_agent
    from argosy.process.terminal.client import submit as submit
    from argosy.process.terminal.foreground import Foreground as Foreground
    from argosy.process.upkeep.clean_do import remove as remove
    from argosy.process.upkeep.clean_do import remove_empty as remove_empty
    from argosy.process.upkeep.clean_find import find_items as find_items
    from argosy.process.upkeep.clean_find import look_at_run as look_at_run
    from argosy.process.upkeep.clean_plan import Item as Item
    from argosy.process.upkeep.clean_plan import Removal as Removal
    from argosy.process.upkeep.clean_plan import Selection as Selection
    from argosy.process.upkeep.clean_plan import count as count
    from argosy.process.upkeep.clean_plan import format_bytes as format_bytes
    from argosy.process.upkeep.clean_plan import parse_age as parse_age
    from argosy.process.upkeep.clean_plan import parse_size as parse_size
    from argosy.process.upkeep.clean_plan import plan_cleaning as plan_cleaning
    from argosy.process.upkeep.doctor_judge import Check as Check
    from argosy.process.upkeep.doctor_judge import Measured as Measured
    from argosy.process.upkeep.doctor_judge import judge_machine as judge_machine
    from argosy.process.upkeep.doctor_measure import measure_machine as measure_machine

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
