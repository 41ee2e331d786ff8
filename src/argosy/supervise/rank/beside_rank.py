"""A process beside a rank, forked from its zygote: warm, in the rank's group and cgroup, with the rank's output."""

import contextlib
import importlib
import itertools
import os
import resource
from collections.abc import Sequence

from argosy.supervise.cgroup import join
from argosy.supervise.messages import ForkBeside
from argosy.supervise.rank.boot import Inherited, prepare_path


def run_beside(inherited: Inherited, message: ForkBeside, fds: Sequence[int]) -> int:
    """Call what the rank asked for with its descriptors; whoever serves it ends when the rank lets go of them.

    The group is the rank's, so that whatever ends the rank's group ends this too.
    """
    with contextlib.suppress(OSError):  # A rank that made a session of its own cannot be joined.
        os.setpgid(0, message.group)
    join(message.cgroup)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (fds[0], 1), (fds[1], 2)):
        os.dup2(source, target)
    given = list(fds[2:])
    bounds = [2, *sorted(given), min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], 1 << 20)]
    for low, high in itertools.pairwise(bounds):
        os.closerange(low + 1, high)
    prepare_path(message.launch, inherited.fresh)
    module, _, function = message.entry.partition(":")
    getattr(importlib.import_module(module), function)(*given)
    return 0
