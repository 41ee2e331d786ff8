"""A Trainer that resumes from its own checkpoints; ranks are killed where they are told to.   DIRECTORY [DEATH]..."""

import hashlib
import os
import signal
import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

out, *deaths = sys.argv[1:]


def die(step: int) -> None:
    """As the command line says: RANK.GENERATION:STEP."""
    if f"{os.environ['RANK']}.{os.environ['TORCHELASTIC_RESTART_COUNT']}:{step}" in deaths:
        os.kill(os.getpid(), signal.SIGKILL)


class Dying(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        die(state.global_step)


set_seed(7)
config = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=2,
    attention_dropout=0.1,
)
rows = torch.randint(64, (96, 16), generator=torch.Generator().manual_seed(3))
args = TrainingArguments(
    output_dir=out,
    use_cpu=True,
    per_device_train_batch_size=4,
    max_steps=18,
    learning_rate=1e-2,
    save_steps=4,
    report_to=[],
    disable_tqdm=True,
)
data = [{"input_ids": row, "labels": row} for row in rows]
trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data, callbacks=[Dying()])
os.makedirs(out, exist_ok=True)
trainer.train(resume_from_checkpoint=get_last_checkpoint(out))
digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.state_dict().values())).hexdigest()
if args.process_index == 0:
    print("RESULT", trainer.state.global_step, digest[:16], flush=True)
