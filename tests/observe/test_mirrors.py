"""Scalars for other loggers are mirrored, never changed; settings are kept without secrets."""

import os
from pathlib import Path

import msgspec
from ranks import run_script

from argosy.observe import read_journal

LOGGERS = {
    "wandb/__init__.py": "",
    "wandb/sdk/__init__.py": "",
    "wandb/sdk/wandb_run.py": """
class Run:
    calls = []
    def log(self, data, step=None, commit=None):
        self.calls.append((data, step, commit))
        if "bad" in data:
            raise ValueError("refused")
        return "logged"
""",
    "tensorboardX/__init__.py": "",
    "tensorboardX/writer.py": """
class SummaryWriter:
    calls = []
    def add_scalar(self, tag, scalar_value, global_step=None, walltime=None):
        self.calls.append((tag, scalar_value, global_step))
        return 7
    def add_scalars(self, main_tag, tag_scalar_dict, global_step=None, walltime=None):
        self.calls.append((main_tag, tag_scalar_dict, global_step))
""",
}

SCRIPT = """
import argparse, os, sys
folder = sys.argv[1]
os.environ.update(ARGOSY_RUN_DIR=folder, ARGOSY_RUN="abc-1", RANK="0", ARGOSY_GENERATION="0", OMP_NUM_THREADS="1")
os.environ["AWS_SECRET_ACCESS_KEY"] = "hidden"
sys.path.insert(0, folder)
import torch
from argosy.observe import *
page = Page.create(folder + "/page")
install(page)
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float), parser.add_argument("--hf-token")
parser.parse_args(["--lr", "0.1", "--hf-token", "hf_hidden"])
from tensorboardX.writer import SummaryWriter
from wandb.sdk.wandb_run import Run
torch.nn.Linear(2, 2)(torch.ones(1, 2))
writer, run = SummaryWriter(), Run()
print(writer.add_scalar("loss", torch.tensor(2.5), 3), writer.add_scalars("both", {"a": 1, "b": 2}, 4))
print(run.log({"acc": 0.5, "text": "no", "picture": object()}, step=5), len(run.calls))
try:
    run.log({"bad": 1.0})
except ValueError as error:
    print(error)
print([call[0] for call in writer.calls])
record_config({"width": 8, "api_key": "hidden", "nested": {"password": "hidden", "depth": [1, 2]}})
if os.fork() == 0:
    run.log({"child": 1.0}, step=9)
    os._exit(0)
os.wait()
"""


def test_scalars_reach_both_and_secrets_neither(tmp_path: Path):
    for name, text in LOGGERS.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    printed = run_script(SCRIPT, str(tmp_path))
    assert printed == "7 None\nlogged 1\nrefused\n['loss', 'both']\n"
    journal = tmp_path / "metrics" / "1" / "0.0.journal"
    assert b"hidden" not in journal.read_bytes()
    entries = [msgspec.msgpack.decode(record) for record in read_journal(journal)]
    scalars = {(each["name"], each["value"], each["step"]) for each in entries if each["kind"] == "scalar"}
    assert scalars == {("loss", 2.5, 3), ("both/a", 1.0, 4), ("both/b", 2.0, 4), ("acc", 0.5, 5)}
    (start,) = [each for each in entries if each["kind"] == "start"]
    assert start["environment"]["OMP_NUM_THREADS"] == "1"
    configs = [each["config"] for each in entries if each["kind"] == "config"]
    assert configs[0] == {"lr": 0.1, "hf_token": "(masked)"}
    assert configs[1]["nested"] == {"password": "(masked)", "depth": [1, 2]}


def test_a_run_directory_that_cannot_be_written_disturbs_nothing(tmp_path: Path):
    (tmp_path / "metrics").write_text("a file")
    script = """
import os, sys
os.environ.update(ARGOSY_RUN_DIR=sys.argv[1], ARGOSY_RUN="abc-1")
from argosy.observe import rank_journal, record_config
record_config({"a": 1})
print(rank_journal.dropped)
"""
    assert run_script(script, str(tmp_path), has_torch=False) == "1\n"
    assert os.listdir(tmp_path) == ["metrics"]
