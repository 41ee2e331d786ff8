"""Every decision about processes, pure: runs, restarts, hosts."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.control import facts as facts
    from argosy.control import node as node
    from argosy.control.facts import AnyFact as AnyFact
    from argosy.control.facts import DiskTrouble as DiskTrouble
    from argosy.control.facts import GaveUp as GaveUp
    from argosy.control.facts import HangEnded as HangEnded
    from argosy.control.facts import HangSeen as HangSeen
    from argosy.control.facts import IncidentTaken as IncidentTaken
    from argosy.control.facts import LaunchEnded as LaunchEnded
    from argosy.control.facts import LaunchStarted as LaunchStarted
    from argosy.control.facts import RankExited as RankExited
    from argosy.control.facts import RankPaused as RankPaused
    from argosy.control.facts import RankStarted as RankStarted
    from argosy.control.facts import Restarting as Restarting
    from argosy.control.facts import StopAsked as StopAsked
    from argosy.control.host_events import AskKernel as AskKernel
    from argosy.control.host_events import ChildEnded as ChildEnded
    from argosy.control.host_events import ChildForked as ChildForked
    from argosy.control.host_events import ChildRefused as ChildRefused
    from argosy.control.host_events import ChildSilent as ChildSilent
    from argosy.control.host_events import EndDaemons as EndDaemons
    from argosy.control.host_events import EnvironmentLost as EnvironmentLost
    from argosy.control.host_events import ForkRanks as ForkRanks
    from argosy.control.host_events import HostTick as HostTick
    from argosy.control.host_events import HostWakeAt as HostWakeAt
    from argosy.control.host_events import ImportIn as ImportIn
    from argosy.control.host_events import KillTree as KillTree
    from argosy.control.host_events import ListenFor as ListenFor
    from argosy.control.host_events import PageRead as PageRead
    from argosy.control.host_events import RememberSpoiled as RememberSpoiled
    from argosy.control.host_events import RemoveRun as RemoveRun
    from argosy.control.host_events import RetireZygote as RetireZygote
    from argosy.control.host_events import RunRemoved as RunRemoved
    from argosy.control.host_events import SendSignal as SendSignal
    from argosy.control.host_events import SpawnZygote as SpawnZygote
    from argosy.control.host_events import StoreEnded as StoreEnded
    from argosy.control.host_events import StoreForked as StoreForked
    from argosy.control.host_events import StoreListens as StoreListens
    from argosy.control.host_events import TellUser as TellUser
    from argosy.control.host_events import WardenCame as WardenCame
    from argosy.control.host_events import WardenLost as WardenLost
    from argosy.control.host_events import ZygoteCame as ZygoteCame
    from argosy.control.host_events import ZygoteLoaded as ZygoteLoaded
    from argosy.control.host_events import ZygoteLost as ZygoteLost
    from argosy.control.host_events import ZygoteRefused as ZygoteRefused
    from argosy.control.host_events import ZygoteSpawned as ZygoteSpawned
    from argosy.control.host_state import LocalRank as LocalRank
    from argosy.control.host_state import LocalZygote as LocalZygote
    from argosy.control.launch import Launch as Launch
    from argosy.control.launch import arguments as arguments
    from argosy.control.launch import command as command
    from argosy.control.launch import imports_id as imports_id
    from argosy.control.launch import rank_defaults as rank_defaults
    from argosy.control.launch import rank_variables as rank_variables
    from argosy.control.node import Decided as Decided
    from argosy.control.node import Forgotten as Forgotten
    from argosy.control.node import ForHost as ForHost
    from argosy.control.node import ForRun as ForRun
    from argosy.control.node import Known as Known
    from argosy.control.node import Launched as Launched
    from argosy.control.node import Letter as Letter
    from argosy.control.node import LogRecord as LogRecord
    from argosy.control.node import NodeEffect as NodeEffect
    from argosy.control.node import NodeEvent as NodeEvent
    from argosy.control.node import NodeState as NodeState
    from argosy.control.node import Numbered as Numbered
    from argosy.control.node import OfHost as OfHost
    from argosy.control.node import OfRun as OfRun
    from argosy.control.node import Performed as Performed
    from argosy.control.node import ShutDown as ShutDown
    from argosy.control.node import recover as recover
    from argosy.control.node import recovered as recovered
    from argosy.control.restart import Restart as Restart
    from argosy.control.restart import parse_restart as parse_restart
    from argosy.control.run import describe as describe
    from argosy.control.run_events import ClientCame as ClientCame
    from argosy.control.run_events import ClientLeft as ClientLeft
    from argosy.control.run_events import EvidenceTaken as EvidenceTaken
    from argosy.control.run_events import Finish as Finish
    from argosy.control.run_events import Hung as Hung
    from argosy.control.run_events import Record as Record
    from argosy.control.run_events import RunEvent as RunEvent
    from argosy.control.run_events import StopWanted as StopWanted
    from argosy.control.run_events import TakeEvidence as TakeEvidence
    from argosy.control.run_events import Tick as Tick
    from argosy.control.run_events import WakeAt as WakeAt
    from argosy.control.run_state import RunState as RunState
    from argosy.control.run_state import Slot as Slot

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
