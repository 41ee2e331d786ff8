"""Profile this rank for a few steps when another process asks for it, by a word in the header of the rank's ring.

The rank looks at the word after each step. It writes what torch.profiler saw to `traces/<request>/<rank>.json` among
the launch's records, or why it could not to `<rank>.error`.
"""

import mmap
import os
import sys
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from argosy.observe.rank_journal import own_directory
from argosy.observe.spans import REQUEST, Ring

STEPS_MAX = 1000


def request_profile(ring: str | os.PathLike[str], request: int, steps: int) -> None:
    """Ask the rank that owns a ring for a profile of its next steps; `request` names the directory.

    Raises:
        OSError: the ring is gone, or belongs to somebody else.
    """
    with open(ring, "r+b") as file, mmap.mmap(file.fileno(), 4096) as header:
        memoryview(header).cast("Q")[REQUEST] = request << 16 | min(steps, STEPS_MAX)


class Profiler:
    """The profile of this process that is being taken, if any."""

    def __init__(self) -> None:
        self._profile: Any = None
        self._target = Path()
        self._left = 0

    def stepped(self, ring: Ring) -> None:
        """A step is done, and a profile is asked for or being taken. Never raises: a rank trains on without one."""
        try:
            if self._profile is None:
                self._begin(ring.requested >> 16, ring.requested & 0xFFFF)
                return
            self._profile.step()
            self._left -= 1
            if self._left <= 0:
                self._finish(ring)
        except Exception as error:
            self._profile, ring.requested = None, 0
            self._write(".error", f"{type(error).__name__}: {error}")

    def _begin(self, request: int, steps: int) -> None:
        folder = own_directory()
        if folder is None:
            raise RuntimeError("this process belongs to no run")
        folder = folder / "traces" / str(request)
        folder.mkdir(parents=True, exist_ok=True)
        self._target = folder / os.environ.get("RANK", "0")
        profiler = sys.modules["torch"].profiler
        # One step of warm-up: the first of a profiler is slow.
        schedule = profiler.schedule(wait=0, warmup=1, active=steps, repeat=1)
        self._profile = profiler.profile(schedule=schedule, record_shapes=True, acc_events=True)
        self._profile.start()
        self._left = steps + 1

    def _finish(self, ring: Ring) -> None:
        profile, self._profile, ring.requested = self._profile, None, 0
        profile.stop()
        unfinished = str(self._target) + ".unfinished"
        profile.export_chrome_trace(unfinished)
        os.replace(unfinished, str(self._target) + ".json")

    def _write(self, suffix: str, text: str) -> None:
        with suppress(OSError):
            Path(str(self._target) + suffix).write_text(text)


def answers(folder: Path) -> Mapping[int, Path]:
    """What ranks have answered so far: traces, and `.error` files, by rank."""
    found = [path for path in folder.glob("*") if path.suffix in (".json", ".error")]
    return {int(path.stem): path for path in found}
