"""`argosy run --on slurm` outside an allocation: write the batch script, submit it, and show what becomes of the job.

The job runs `argosy run` again, on its first node. Its output is in two files of the run's directory, which this
command shows; the job does not depend on it.
"""

import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from argosy.cli.launch_builder import Options, check_target, choose_directory, parse_dims
from argosy.core import ArgosyError, ConfigError
from argosy.hosts import (
    ERR,
    OUT,
    SCRIPT,
    BatchJob,
    JobStatus,
    batch_script,
    cancel_job,
    job_status,
    parse_options,
    submit_script,
)
from argosy.supervise import default_name, read_record, write_atomically

ASK_S = 1.0
TURN_S = 0.2
SETTLE_S = 2.0
"""Files of a job that ended may reach this machine late."""


def run_as_job(options: Options, target: str, argv: Sequence[str], script_words: int, *, dry: bool) -> int:
    """Submit the job, and stream its output; returns the exit code of the run. `dry` prints the script.

    `argv` are the arguments of `argosy run`, of which the last `script_words` are the script and its own.

    Raises:
        ConfigError: an option is wrong, or Slurm refuses.
    """
    assert options.engine is not None
    if options.hosts is None:
        raise ConfigError("--on slurm needs --hosts outside an allocation: how many nodes to ask for", hint="--hosts 2")
    parse_dims(options, options.hosts)
    check_target("program" if "--" in argv else "module" if options.module else "script", target)
    directory, _ = choose_directory(options, target)
    fresh = options.directory is None and options.name is None
    directory = _free(directory, make=not dry) if fresh else directory
    own, of_script = argv[: len(argv) - script_words], argv[len(argv) - script_words :]
    job = BatchJob(
        name=options.name or directory.name or default_name(target),
        directory=directory,
        nodes=options.hosts + options.spares,
        options=parse_options(options.engine.partition(":")[2]),
        words=["--dir", str(directory), *_without_detach(own), *of_script],
        cwd=os.getcwd(),
    )
    if dry:
        print(batch_script(job), end="")
        return 0
    directory.mkdir(parents=True, exist_ok=True)
    write_atomically(directory / SCRIPT, batch_script(job).encode())
    watch = JobWatch(directory, submit_script(directory / SCRIPT))
    if options.detach:
        print(f"submitted job {watch.number}, whose run will be in {os.path.relpath(directory)}", flush=True)
        print(f"  tail -f {os.path.relpath(directory / OUT)}\n  scancel {watch.number}", file=sys.stderr)
        return 0
    return watch.run()


def _without_detach(words: Sequence[str]) -> list[str]:
    """The job's own `argosy run` stays in the foreground."""
    kept = [word for word in words if word not in ("-d", "--detach", "--dry-run")]
    return [word.replace("d", "") if re.fullmatch(r"-[dm]{2,}", word) else word for word in kept]


def _free(directory: Path, *, make: bool) -> Path:
    """The first of `train-x`, `train-x-2`... that does not exist."""
    number, free = 2, directory
    while True:
        with suppress(FileExistsError):
            if make:
                free.mkdir(parents=True)
            elif free.exists():
                raise FileExistsError
            return free
        free, number = directory.with_name(f"{directory.name}-{number}"), number + 1


class JobWatch:
    """Shows where a job stands and what it prints, until it is over."""

    def __init__(self, directory: Path, number: str) -> None:
        self.directory, self.number = directory, number
        self._files = {directory / OUT: sys.stdout.buffer, directory / ERR: sys.stderr.buffer}
        # An earlier job of the run may have written to them.
        self._shown = {path: path.stat().st_size if path.exists() else 0 for path in self._files}
        self._signals: list[int] = []
        self._asked = 0
        self._status: JobStatus | None = JobStatus("SUBMITTED")

    def run(self) -> int:
        """Until the job is over; returns an exit code."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._note)
        ask_at = 0.0
        while self._status is not None and not self._status.is_over:
            self._stop_if_wanted()
            if time.monotonic() >= ask_at:
                self._ask()
                ask_at = time.monotonic() + ASK_S
            self._show()
            time.sleep(TURN_S)
        quiet_at = time.monotonic() + SETTLE_S
        while time.monotonic() < quiet_at:
            if self._show():
                quiet_at = time.monotonic() + SETTLE_S
            time.sleep(TURN_S)
        return self._code()

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    def _ask(self) -> None:
        try:
            status = job_status(self.number)
        except ArgosyError as error:  # Its controller restarts; the job goes on.
            self._say(str(error))
            return
        if str(status) != str(self._status) and status is not None:
            self._show()
            self._say(f"job {self.number} {status}")
        self._status = status

    def _stop_if_wanted(self) -> None:
        """Ctrl-c ends the run as it does everywhere; a second time, the job."""
        signals, self._signals = self._signals, []
        for number in signals:
            self._asked += 1
            running = self._status is not None and self._status.state == "RUNNING"
            gently = running and self._asked == 1
            self._say(f"stopping job {self.number}" + ("" if gently else " at once"))
            try:
                cancel_job(self.number, signal.Signals(number).name.removeprefix("SIG") if gently else "")
            except ArgosyError as error:
                self._say(str(error))

    def _show(self) -> bool:
        """Print what the job has written; whether there was something."""
        found = False
        for path, stream in self._files.items():
            with suppress(OSError):
                with path.open("rb") as file:
                    file.seek(self._shown[path])
                    data = file.read()
                if data:
                    self._shown[path] += len(data)
                    stream.write(data)
                    stream.flush()
                    found = True
        return found

    def _code(self) -> int:
        """The run's own code, if it came so far; else the job's."""
        with suppress(ArgosyError):
            record = read_record(self.directory)
            if record.state == "ended" and record.code is not None:
                return record.code
        if self._status is None:
            return 1
        return self._status.code or (0 if self._status.state == "COMPLETED" else 1)

    def _say(self, text: str) -> None:
        with suppress(OSError):
            print(f"argosy: {text}", file=sys.stderr, flush=True)
