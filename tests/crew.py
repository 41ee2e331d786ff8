"""Run a script as several ranks of one argosy group, forked from a process that has torch.

The script is run in each rank with `rank`, `size`, `torch`, `dist`, and `form()`, which makes the default group
with the backend `argosy`; the store lives in another process, as an agent's does. What a rank prints is returned.
"""

import os
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from warm import warm

SOURCE = Path(__file__).parents[1] / "src"

_PARENT = """
import importlib, os, pathlib, sys, traceback
import torch, torch.distributed as dist
import argosy.collective
directory, script, preload = sys.argv[1:4]
for name in preload.split():
    importlib.import_module(name)

def form(backend="argosy", **options):
    client = dist.TCPStore("127.0.0.1", port, None, False, wait_for_workers=False)
    dist.init_process_group(backend, store=client, rank=rank, world_size=size, **options)
    return dist.group.WORLD

def run(rank):
    torch.set_num_threads(1)
    out = os.open(f"{directory}/out{party}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    os.dup2(out, 1), os.dup2(out, 2)
    code = 0
    try:
        names = globals() | {"rank": rank, "__name__": "script"}
        globals()["rank"] = rank
        exec(compile(pathlib.Path(script).read_text(), script, "exec"), names)
    except BaseException:
        traceback.print_exc()
        code = 1
    sys.stdout.flush(), sys.stderr.flush()
    os._exit(code)

def open_store():
    # In a process of its own: one with the store's threads must not fork ranks.
    lifeline, told = os.pipe(), os.pipe()
    if os.fork() == 0:
        os.close(lifeline[1])
        server = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        os.write(told[1], str(server.port).encode())
        os.read(lifeline[0], 1)
        os._exit(0)
    os.close(lifeline[0])
    return int(os.read(told[0], 10)), lifeline[1]

worst = 0
for party, told in enumerate(sys.argv[4:]):
    size, round = int(told.split(":")[0]), told.split(":")[1]
    port, lifeline = open_store()
    children = []
    for rank in range(size):
        pid = os.fork()
        if not pid:
            run(rank)
        children.append(pid)
    worst = max(worst, *(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) & 255 for pid in children))
    os.close(lifeline)
sys.exit(worst)
"""


def crew(
    script: Path | str, size: int, *, compiled: bool = True, must_end_well: bool = True, rounds: Sequence[str] = ("",)
) -> list[str]:
    """Run the file, or text, as `size` ranks; returns what each printed. Nothing is left running.

    With `rounds`, new ranks run it once for each; the script knows which as `round`.
    """
    parties = [(size, round) for round in rounds]
    said = crews(script, parties, compiled=compiled, must_end_well=must_end_well)
    return ["".join(texts) for texts in zip(*said, strict=True)]


def crews(
    script: Path | str,
    parties: Sequence[tuple[int, str]],
    *,
    compiled: bool = True,
    must_end_well: bool = True,
    preload: Sequence[str] = (),
) -> list[list[str]]:
    """Run it once for each number of ranks and round, all from one process that has torch and `preload`."""
    with tempfile.TemporaryDirectory() as directory:
        if isinstance(script, str):
            Path(directory, "script.py").write_text(script)
            script = Path(directory, "script.py")
        environment = os.environ | {
            "PYTHONPATH": str(SOURCE),
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }
        if not compiled:
            environment["ARGOSY_NATIVE"] = "0"
        told = [f"{size}:{round}" for size, round in parties]
        command = [*warm(), "-c", _PARENT, directory, str(script), " ".join(preload), *told]
        parent = subprocess.Popen(command, env=environment)
        try:
            code = parent.wait(500)
        finally:
            parent.kill()  # The ranks with it.
            parent.wait()
        said = [
            [Path(directory, f"out{index}-{rank}").read_text() for rank in range(size)]
            for index, (size, _) in enumerate(parties)
        ]
        assert not must_end_well or code == 0, "\n".join(text for texts in said for text in texts)
        return said
