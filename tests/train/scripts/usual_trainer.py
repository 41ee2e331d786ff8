"""A Trainer as people use it: evaluations, early stopping, the best model at the end, saves, TensorBoard, workers."""

import hashlib
import os
import sys

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainingArguments,
    set_seed,
)

import argosy
from argosy.train.adapters.huggingface import surviving

run = argosy.Run(sys.argv[1])
set_seed(11)
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=1, n_head=2))
generator = torch.Generator().manual_seed(1)
rows = (torch.arange(16)[None] * torch.randint(1, 5, (80, 1), generator=generator)) % 64
data = [{"input_ids": row, "labels": row} for row in rows]
os.environ["TENSORBOARD_LOGGING_DIR"] = sys.argv[1] + "/board"
args = TrainingArguments(
    output_dir=sys.argv[1],
    use_cpu=True,
    per_device_train_batch_size=4,
    gradient_accumulation_steps=2,
    max_steps=14,
    learning_rate=1e-2,
    warmup_steps=3,
    lr_scheduler_type="cosine",
    logging_steps=2,
    eval_strategy="steps",
    eval_steps=4,
    save_strategy="steps",
    save_steps=4,
    save_total_limit=2,
    load_best_model_at_end=True,
    dataloader_num_workers=1,
    report_to=["tensorboard"],
    disable_tqdm=True,
)
stopping = EarlyStoppingCallback(
    2, early_stopping_threshold=100.0
)  # No evaluation is good enough for it but the first.
trainer = surviving(Trainer, run)(
    model=model, args=args, train_dataset=data[:64], eval_dataset=data[64:], callbacks=[stopping]
)
outcome = trainer.train()

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.state_dict().values())).hexdigest()
seen = f"{outcome.training_loss:.6f}/{trainer.state.global_step}/{trainer.evaluate()['eval_loss']:.6f}"
print(f"rank {run.rank}  loss {seen}  weights {digest[:16]}", flush=True)
