"""The processes of a host: warden, agent, zygotes, ranks, their output, and evidence about them."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.supervise.cgroup import find_parent as find_parent
    from argosy.supervise.cgroup import own_cgroup as own_cgroup
    from argosy.supervise.client.agent_client import ask as ask
    from argosy.supervise.client.agent_client import connect_agent as connect_agent
    from argosy.supervise.client.agent_client import end_daemons as end_daemons
    from argosy.supervise.client.agent_client import find_living as find_living
    from argosy.supervise.client.agent_client import list_runs as list_runs
    from argosy.supervise.client.agent_client import reach_agent as reach_agent
    from argosy.supervise.client.agent_client import rejoin as rejoin
    from argosy.supervise.client.agent_client import submit as submit
    from argosy.supervise.client.launch_builder import build_launch as build_launch
    from argosy.supervise.client.launch_builder import check_ranks as check_ranks
    from argosy.supervise.client.member_host import clear_dead_hosts as clear_dead_hosts
    from argosy.supervise.client.member_host import clear_host as clear_host
    from argosy.supervise.client.member_host import refuse_to_serve as refuse_to_serve
    from argosy.supervise.client.member_host import serve_as_host as serve_as_host
    from argosy.supervise.client.runs_without_agent import ending_of as ending_of
    from argosy.supervise.client.standalone import record_standalone as record_standalone
    from argosy.supervise.daemons import is_runtime_file as is_runtime_file
    from argosy.supervise.environment import open_environment as open_environment
    from argosy.supervise.environment import own_limits as own_limits
    from argosy.supervise.environment import seal_environment as seal_environment
    from argosy.supervise.evidence.incident import is_connection_error as is_connection_error
    from argosy.supervise.evidence.incident import read_incidents as read_incidents
    from argosy.supervise.evidence.log_excerpt import exception_line as exception_line
    from argosy.supervise.evidence.log_excerpt import last_traceback as last_traceback
    from argosy.supervise.evidence.stacks import find_py_spy as find_py_spy
    from argosy.supervise.evidence.why import Report as Report
    from argosy.supervise.evidence.why import RunView as RunView
    from argosy.supervise.evidence.why import explain as explain
    from argosy.supervise.evidence.why import sections as sections
    from argosy.supervise.imports.scan import scan as scan
    from argosy.supervise.messages import Environment as Environment
    from argosy.supervise.messages import GetEnvironment as GetEnvironment
    from argosy.supervise.messages import GiveHostsBack as GiveHostsBack
    from argosy.supervise.messages import Happened as Happened
    from argosy.supervise.messages import HostEnded as HostEnded
    from argosy.supervise.messages import HostTickets as HostTickets
    from argosy.supervise.messages import ListRuns as ListRuns
    from argosy.supervise.messages import Notice as Notice
    from argosy.supervise.messages import OpenTunnel as OpenTunnel
    from argosy.supervise.messages import ProvideHosts as ProvideHosts
    from argosy.supervise.messages import RankInfo as RankInfo
    from argosy.supervise.messages import Refused as Refused
    from argosy.supervise.messages import RunInfo as RunInfo
    from argosy.supervise.messages import Runs as Runs
    from argosy.supervise.messages import Shutdown as Shutdown
    from argosy.supervise.messages import SignalRun as SignalRun
    from argosy.supervise.messages import Stacks as Stacks
    from argosy.supervise.messages import StopRun as StopRun
    from argosy.supervise.messages import TakeStacks as TakeStacks
    from argosy.supervise.messages import ToClient as ToClient
    from argosy.supervise.messages import TunnelClosed as TunnelClosed
    from argosy.supervise.messages import TunnelData as TunnelData
    from argosy.supervise.messages import TunnelTook as TunnelTook
    from argosy.supervise.messages import Welcome as Welcome
    from argosy.supervise.output.follower import Follower as Follower
    from argosy.supervise.output.stream import Out as Out
    from argosy.supervise.output.stream import Stream as Stream
    from argosy.supervise.records.membership import HostNeeds as HostNeeds
    from argosy.supervise.records.membership import Membership as Membership
    from argosy.supervise.records.membership import decode_membership as decode_membership
    from argosy.supervise.records.owner import Owner as Owner
    from argosy.supervise.records.owner import is_inhabited as is_inhabited
    from argosy.supervise.records.owner import lock_runtime as lock_runtime
    from argosy.supervise.records.owner import read_owner as read_owner
    from argosy.supervise.records.rundir import RunRecord as RunRecord
    from argosy.supervise.records.rundir import default_name as default_name
    from argosy.supervise.records.rundir import find_run as find_run
    from argosy.supervise.records.rundir import forget_run as forget_run
    from argosy.supervise.records.rundir import indexed_runs as indexed_runs
    from argosy.supervise.records.rundir import logs_directory as logs_directory
    from argosy.supervise.records.rundir import read_facts as read_facts
    from argosy.supervise.records.rundir import read_record as read_record
    from argosy.supervise.records.rundir import started_ranks as started_ranks
    from argosy.supervise.records.rundir import write_atomically as write_atomically

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
