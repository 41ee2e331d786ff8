"""Where the hosts of a run come from. An engine owns them; this room has it start one agent on each."""

from typing import TYPE_CHECKING

from argosy._lazy import lazy

if TYPE_CHECKING:
    from argosy.hosts.by_hand import engine_text as engine_text
    from argosy.hosts.engines import HostEngine as HostEngine
    from argosy.hosts.engines import find_engine as find_engine
    from argosy.hosts.handover import JoinRequest as JoinRequest
    from argosy.hosts.host_checks import check_host as check_host
    from argosy.hosts.slurm import in_allocation as in_allocation
    from argosy.hosts.slurm import reason_to_end as reason_to_end
    from argosy.hosts.slurm import requeue_preempted as requeue_preempted
    from argosy.hosts.slurm_job import ERR as ERR
    from argosy.hosts.slurm_job import OUT as OUT
    from argosy.hosts.slurm_job import SCRIPT as SCRIPT
    from argosy.hosts.slurm_job import BatchJob as BatchJob
    from argosy.hosts.slurm_job import JobStatus as JobStatus
    from argosy.hosts.slurm_job import batch_script as batch_script
    from argosy.hosts.slurm_job import cancel_job as cancel_job
    from argosy.hosts.slurm_job import job_status as job_status
    from argosy.hosts.slurm_job import parse_options as parse_options
    from argosy.hosts.slurm_job import submit_script as submit_script

__getattr__, __all__ = lazy(__name__)  # pyright: ignore[reportUnsupportedDunderAll]
