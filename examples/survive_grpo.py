"""TRL's GRPOTrainer on a tiny random model: it survives the kill of any rank, and ends with the same bits.

    argosy run -n 2 examples/survive_grpo.py [directory]

Three lines make it survive: they are marked. Takes 30 seconds. Expect "loss" and "weights", equal in every run.
"""

import hashlib
import sys

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, set_seed
from trl import GRPOConfig, GRPOTrainer

import argosy
from argosy.train.adapters.huggingface import surviving  # 1

out = sys.argv[1] if len(sys.argv) > 1 else "runs/survive_grpo"
run = argosy.Run(out)  # 2
set_seed(7)
letters = ["<pad>", "<eos>", *"abcdefghijklmnopqrstuvwxyz"]
raw = Tokenizer(models.WordLevel({letter: number for number, letter in enumerate(letters)}, unk_token="a"))
raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
tokenizer = PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>", eos_token="<eos>")
config = LlamaConfig(vocab_size=28, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2)


def vowels(completions: list[str], **_: object) -> list[float]:
    """May be a judge that answers differently each time: what it says of a step is kept until the step counts."""
    return [sum(letter in "aeiou" for letter in text) for text in completions]


args = GRPOConfig(
    output_dir=out,
    use_cpu=True,
    bf16=False,
    per_device_train_batch_size=4,
    num_generations=4,
    steps_per_generation=2,  # Each set of rollouts is used in four steps.
    num_iterations=2,
    max_completion_length=8,
    max_steps=12,
    learning_rate=1e-2,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
    logging_steps=4,
)
trainer = surviving(GRPOTrainer, run)(
    model=LlamaForCausalLM(config),
    args=args,
    train_dataset=Dataset.from_dict({"prompt": [letters[2 + number % 26] * 4 for number in range(32)]}),
    processing_class=tokenizer,
    reward_funcs=vowels,
)  # 3
outcome = trainer.train()

digest = hashlib.sha256(b"".join(each.numpy().tobytes() for each in trainer.model.state_dict().values())).hexdigest()
print(f"rank {run.rank}  loss {outcome.training_loss:.6f}  weights {digest[:16]}", flush=True)
