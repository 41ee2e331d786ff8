"""An unchanged script of Hugging Face's Trainer: its report has loss, tokens per second and MFU."""

import json
from typing import Any

import pytest
from console import Console, until

pytestmark = pytest.mark.system
SCRIPT = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

set_seed(7)
config = LlamaConfig(
    vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    max_position_embeddings=64,
)
rows = torch.randint(64, (512, 64), generator=torch.Generator().manual_seed(3))
args = TrainingArguments(
    output_dir="out", use_cpu=True, per_device_train_batch_size=4, num_train_epochs=1000, save_strategy="no",
    report_to=[], disable_tqdm=True, logging_steps=5,
)
Trainer(LlamaForCausalLM(config), args, train_dataset=[{"input_ids": row, "labels": row} for row in rows]).train()
"""


def test_an_unchanged_trainer_script_shows_loss_tokens_and_mfu(console: Console) -> None:
    (console.cwd / "finetune.py").write_text(SCRIPT)
    console.start("run", "--name", "tuned", "finetune.py", out=console.cwd / "said")
    until(lambda: any(rank["steps"] > 20 for rank in console.ps("tuned").get("ranks", [])), "steps")

    def speed() -> dict[str, Any]:
        return json.loads(console.argosy("why", "tuned", "--json").out)["speed"] or {}

    until(lambda: speed().get("mfu"), "MFU")
    assert console.argosy("stop", "tuned").code == 0
    found = speed()
    assert found["tokens_per_s"] > 0
    assert 0 < found["mfu"] < 1.5
    assert set(found["memory"]) == {"parameter", "gradient", "moment", "activation"}
    assert console.argosy("report", "tuned").code == 0
    page = (console.cwd / "runs" / "tuned" / "report.html").read_text()
    assert all(text in page for text in ("tokens/s", "MFU", '<span class="key s0">loss</span>', "memory of a rank"))
