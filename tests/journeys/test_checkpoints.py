"""A GPT with FSDP2 on 4 ranks under torchrun: killed, gone on with 2, opened without any, given to transformers."""

import os
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from console import PATIENCE_S
from people import python_of_people

import argosy

SCRIPT = Path(__file__).parent / "scripts/three_lines.py"
NOTEBOOK = """
import sys
import argosy, torch
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel
found = argosy.restore(sys.argv[1])
model = GPT2LMHeadModel(GPT2Config(**found.values["$config"]))
model.load_state_dict({name: tensor for name, tensor in found.tensors.items() if "::" not in name})
theirs = AutoModelForCausalLM.from_pretrained(sys.argv[2])
tokens = torch.arange(20).reshape(1, -1)
assert torch.equal(theirs.eval()(tokens).logits, model.eval()(tokens).logits)
assert theirs.lm_head.weight is theirs.transformer.wte.weight
print("equal", found.step, torch.distributed.is_initialized())
"""


@pytest.fixture(scope="module")
def python() -> str:
    return python_of_people()


def environment() -> dict[str, str]:
    source = {"PYTHONPATH": str(Path(argosy.__file__).parents[1]), "HF_HUB_OFFLINE": "1"}
    return os.environ | source | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}


def torchrun(python: str, ranks: int, *args: object) -> "subprocess.Popen[str]":
    command = [python, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}", str(SCRIPT)]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, *map(str, args)], env=environment(), stdout=pipe, text=True, start_new_session=True
    )


def children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


@pytest.mark.system
@pytest.mark.timeout(600)
def test_killed_on_four_ranks_gone_on_with_two_and_given_to_transformers(python: str, tmp_path: Path):
    run = tmp_path / "runs/x"
    with torchrun(python, 4, run, 2, "wait") as first:
        assert first.stdout
        try:
            assert first.stdout.readline().startswith("begins 0 ")
            lines = iter(first.stdout.readline, "")
            saved = next(line for line in lines if line.startswith("durable 2 "))
            for pid in children(first.pid):
                os.kill(pid, signal.SIGKILL)
        finally:
            os.killpg(first.pid, signal.SIGKILL)
    with torchrun(python, 2, run, 3) as second:
        assert second.stdout
        begins, durable = second.stdout.read().splitlines()
        assert second.wait(PATIENCE_S) == 0
    # Bitwise what four ranks had, and it goes on.
    assert begins == saved.strip().replace("durable", "begins")
    assert durable.startswith("durable 3 ")

    copy, out = tmp_path / "copy", tmp_path / "out"
    shutil.copytree(run, copy)
    shutil.rmtree(run)
    export = [python, "-m", "argosy", "ckpt", "export", str(copy), "hf", str(out)]
    subprocess.run(export, env=environment(), check=True, timeout=300)
    notebook = [python, "-c", NOTEBOOK, str(copy), str(out)]
    ended = subprocess.run(notebook, env=environment(), check=True, timeout=300, capture_output=True, text=True)
    assert ended.stdout.splitlines()[-1] == "equal 3 False"
