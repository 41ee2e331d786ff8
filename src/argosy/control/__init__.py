"""Every decision about processes, pure: runs, restarts, hosts."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
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
    from argosy.control.launch import Launch as Launch
    from argosy.control.launch import arguments as arguments
    from argosy.control.launch import command as command
    from argosy.control.launch import rank_defaults as rank_defaults
    from argosy.control.launch import rank_variables as rank_variables
    from argosy.control.restart import Failure as Failure
    from argosy.control.restart import GiveUp as GiveUp
    from argosy.control.restart import Restart as Restart
    from argosy.control.restart import decide_restart as decide_restart
    from argosy.control.restart import parse_restart as parse_restart

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
