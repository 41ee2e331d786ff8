"""A rank whose accelerator reported an error: it says so, and ends so that another process takes its place.

Which device that process gets is decided in `control/device_faults.py`.
"""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from argosy.core import PeerLost
from argosy.observe import Flag
from argosy.transfer import DeviceFailed

if TYPE_CHECKING:
    from argosy.train.run import Run


def lose_device(run: "Run", error: DeviceFailed) -> NoReturn:
    """End this process for another one.

    Raises:
        DeviceFailed: no rank is replaced here.
    """
    run.tell(f"rank {run.rank}: {error}")
    if run.page is not None:
        run.page.set_flag(Flag.DEVICE_FAILED)
    if run.crew.kind != "replaceable":
        raise error
    if path := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # There is no traceback to read the cause from.
        with suppress(OSError):
            Path(path).write_text(json.dumps({"message": error.cause}))
    run.crew.group.give_up(PeerLost(f"rank {run.rank}", str(error)))
    run.begin_anew()
