"""A Hugging Face Trainer that survives the kill of any rank, and ends with the same bits.

    argosy run -n 2 examples/survive_trainer.py [directory]

Three lines make it survive: they are marked. Takes 10 seconds. Expect "loss" and "weights", equal in every run.
"""

import hashlib
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed

import argosy
from argosy.train.adapters.huggingface import surviving  # 1

out = sys.argv[1] if len(sys.argv) > 1 else "runs/survive_trainer"
run = argosy.Run(out)  # 2
set_seed(7)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_dropout=0.1,
    max_position_embeddings=32,
)
rows = torch.randint(64, (96, 16), generator=torch.Generator().manual_seed(3))
args = TrainingArguments(
    output_dir=out,
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    num_train_epochs=4,
    learning_rate=1e-2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=4,
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = surviving(Trainer, run)(model=LlamaForCausalLM(config), args=args, train_dataset=data)  # 3
outcome = trainer.train()

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.state_dict().values())).hexdigest()
print(f"rank {run.rank}  loss {outcome.training_loss:.6f}  weights {digest[:16]}", flush=True)
