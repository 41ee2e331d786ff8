"""TRL's SFTTrainer on a tiny random model: it survives the kill of any rank, and ends with the same bits.

    argosy run -n 2 examples/survive_trl.py [directory]

Three lines make it survive: they are marked. Takes 20 seconds. Expect "loss" and "weights", equal in every run.
"""

import hashlib
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import SFTConfig, SFTTrainer

import argosy
from argosy.train.adapters.huggingface import surviving  # 1

out = sys.argv[1] if len(sys.argv) > 1 else "runs/survive_trl"
run = argosy.Run(out)  # 2
set_seed(7)
letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
raw = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="a"))
raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(vocab_size=32, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)
draw = torch.randint(26, (64, 12), generator=torch.Generator().manual_seed(3))
data = Dataset.from_dict({"text": ["".join(letters[2 + number] for number in row) for row in draw.tolist()]})
args = SFTConfig(
    output_dir=out,
    use_cpu=True,
    bf16=False,
    max_length=16,
    per_device_train_batch_size=4,
    num_train_epochs=3,
    learning_rate=1e-2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=4,
)
trainer = surviving(SFTTrainer, run)(
    model=LlamaForCausalLM(config), args=args, train_dataset=data, processing_class=tokenizer
)  # 3
outcome = trainer.train()

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.state_dict().values())).hexdigest()
print(f"rank {run.rank}  loss {outcome.training_loss:.6f}  weights {digest[:16]}", flush=True)
