"""DcpWriter and DcpReader in `dcp.save` and `dcp.load`: whole or not at all, and only bytes that were written."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from crew import crew

from argosy.checkpoint import CorruptShard, DcpReader, DcpWriter

pytestmark = pytest.mark.filterwarnings("ignore")


def state(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.full((64, 8), value), "bias": torch.arange(8.0) * value}


def save(path: Path, value: float) -> None:
    dcp.save(state(value), storage_writer=DcpWriter(path), no_dist=True)


def load(path: Path) -> dict[str, torch.Tensor]:
    found = state(0.0)
    dcp.load(found, storage_reader=DcpReader(path), no_dist=True)
    return found


def test_what_was_saved_last_is_loaded(tmp_path: Path):
    for value in (1.0, 2.0):
        save(tmp_path / "step", value)
        assert torch.equal(load(tmp_path / "step")["weight"], state(value)["weight"])
    assert [path.name for path in tmp_path.iterdir()] == ["step"]


def test_a_flipped_byte_is_refused_before_a_tensor_changes(tmp_path: Path):
    save(tmp_path / "step", 1.0)
    shard = next((tmp_path / "step").glob("*.distcp"))
    data = bytearray(shard.read_bytes())
    data[len(data) // 2] ^= 1
    shard.write_bytes(data)
    found = state(0.0)
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(found, storage_reader=DcpReader(tmp_path / "step"), no_dist=True)
    assert any(isinstance(failure, CorruptShard) for failure, _ in error.value.failures.values())
    assert not found["weight"].any()


def test_no_checkpoint_is_said(tmp_path: Path):
    with pytest.raises(dcp.CheckpointException) as error:
        load(tmp_path / "none")
    assert "no whole checkpoint" in str(error.value)


KILLED = """
import os, signal, sys, torch, torch.distributed.checkpoint as dcp
from argosy.checkpoint import dcp_storage
place = sys.argv[2]
whole = getattr(dcp_storage, place)
def die(*words):
    if place != "_sync" or not str(words[0]).endswith(".new"):
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(*words)
setattr(dcp_storage, place, die)
dcp.save({"weight": torch.full((64, 8), 2.0), "bias": torch.arange(8.0) * 2.0},
         storage_writer=dcp_storage.DcpWriter(sys.argv[1]), no_dist=True)
"""


@pytest.mark.system
@pytest.mark.parametrize(("place", "value"), [("_digest", 1.0), ("_write", 1.0), ("_sync", 2.0)])
def test_a_kill_leaves_the_checkpoint_before_or_the_new_one(tmp_path: Path, place: str, value: float):
    save(tmp_path / "step", 1.0)
    command = [sys.executable, "-W", "ignore", "-c", KILLED, str(tmp_path / "step"), place]
    assert subprocess.run(command, env=os.environ, timeout=300).returncode == -signal.SIGKILL
    assert torch.equal(load(tmp_path / "step")["weight"], state(value)["weight"])
    save(tmp_path / "step", 3.0)
    assert torch.equal(load(tmp_path / "step")["bias"], state(3.0)["bias"])


RANKS = """
from argosy.checkpoint import DcpReader, DcpWriter
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor
import torch.distributed.checkpoint as dcp
form("gloo")
mesh = init_device_mesh("cpu", (size,))
whole = torch.arange(32.0).reshape(8, 4)
dcp.save({"weight": distribute_tensor(whole, mesh, [Shard(0)])}, storage_writer=DcpWriter("PATH"))
found = {"weight": distribute_tensor(torch.zeros(8, 4), mesh, [Shard(1)])}
dcp.load(found, storage_reader=DcpReader("PATH"))
print("equal", torch.equal(found["weight"].full_tensor(), whole))
dist.barrier()
"""


@pytest.mark.system
def test_two_ranks_save_shards_and_load_others(tmp_path: Path):
    assert [text.split() for text in crew(RANKS.replace("PATH", str(tmp_path / "step")), 2)] == [["equal", "True"]] * 2
