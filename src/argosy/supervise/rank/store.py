"""The store through which the ranks of an unmodified script find each other: torch's own, in a process of its own.

One per generation, so that no address of a dead rank is ever read again. It gets a listening socket that was bound
to loopback; torch would listen on every interface, and look each peer's name up.
"""

import os
import signal
from functools import partial
from pathlib import Path

import setproctitle

from argosy.supervise.lifeline import tie_lifeline
from argosy.supervise.messages import ForkStore


def serve_store(runtime: Path, message: ForkStore, listener: int) -> int:
    """Serve until killed."""
    os.setpgid(0, 0)
    log = os.open(message.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.dup2(listener, 3)
    os.closerange(4, 1 << 16)
    tie_lifeline(runtime)
    setproctitle.setproctitle(f"argosy: store of {message.run}, generation {message.generation}")
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

    place = partial(TCPStore, message.address, message.port, is_master=True, wait_for_workers=False, master_listen_fd=3)
    try:
        store = place(use_libuv=True)
    except NotImplementedError:  # Older torch takes a listening socket only in its older server.
        store = place(use_libuv=False)
    while True:  # It serves from a thread of its own; a signal ends this process.
        signal.pause()
        store.num_keys()  # Keeps the server referenced.
