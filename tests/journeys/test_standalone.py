"""A run that no agent watches is recorded too: under torchrun, and where its ranks are killed."""

import json
import os
import signal
import subprocess
import textwrap
from pathlib import Path

import pytest
from console import Console, until

from argosy.supervise import read_record

pytestmark = pytest.mark.system
SCRIPT = """
    import os, sys, time
    import torch
    import argosy

    run = argosy.Run("out")
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    if run.size > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.track(model=model, optimizer=optimizer)
    for step in run.steps(until=int(sys.argv[1])):
        with step:
            loss = model(torch.ones(4, 8)).square().mean()
            loss.backward()
            optimizer.step()
            run.log(loss=loss)
        if step.number == 20:
            open(f"at20.{run.rank}", "w").write(str(os.getpid()))
        time.sleep(0.01)
"""


@pytest.fixture
def script(console: Console) -> Path:
    path = console.cwd / "train.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def shared_memory_of(console: Console) -> list[Path]:
    """What the run's recording keeps in shared memory."""
    pids = {path.read_text() for path in console.cwd.glob("at20.*")}
    rings = Path("/dev/shm").glob(f"argosy-{os.getuid()}-*-*/*.page.spans")
    return [ring for ring in rings if str(int.from_bytes(ring.read_bytes()[8:16], "little")) in pids]


def test_torchrun_records_steps_scalars_and_its_end(console: Console, script: Path) -> None:
    ended = console.torchrun("--standalone", "--nproc-per-node=2", str(script), "100")
    assert ended.code == 0, ended.text
    until(lambda: read_record(console.cwd / "out").state == "ended", "the end in run.json")
    told = json.loads(console.argosy("why", "out", "--json").out)
    assert told["speed"]["steps"] == 100
    rows = json.loads(console.argosy("sql", "out", "SELECT rank, count(*) n FROM steps GROUP BY rank", "--json").out)
    assert {row["rank"] for row in rows} == {0, 1}
    assert all(row["n"] == 100 for row in rows)
    scalars = json.loads(console.argosy("sql", "out", "SELECT count(*) n FROM scalars", "--json").out)
    assert scalars[0]["n"] == 100
    assert console.argosy("report", "out").code == 0
    assert not shared_memory_of(console)


def test_a_rank_killed_by_kill_9_loses_no_scalar_and_its_end_is_recorded(console: Console, script: Path) -> None:
    alone = console.cwd / "alone.sh"
    alone.write_text(f"exec {console.python} {script} 100000\n")
    process = subprocess.Popen(["sh", str(alone)], cwd=console.cwd, env=console.env)
    until(lambda: (console.cwd / "at20.0").exists(), "step 20")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    until(lambda: read_record(console.cwd / "out").state == "ended", "the end in run.json")
    record = read_record(console.cwd / "out")
    assert record.code == 1
    assert "killed" in record.reason
    told = json.loads(console.argosy("sql", "out", "SELECT max(step) s, count(*) n FROM scalars", "--json").out)
    done = json.loads(console.argosy("sql", "out", "SELECT max(step) s, count(*) n FROM steps", "--json").out)
    assert told[0]["n"] >= 20
    assert abs(told[0]["n"] - done[0]["n"]) <= 1
    until(lambda: not shared_memory_of(console), "shared memory is given back")
