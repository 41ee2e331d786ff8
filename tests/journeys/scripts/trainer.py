"""A Hugging Face Trainer on a tiny random Llama; rank 0 prints the training loss and what it was given."""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


def main() -> None:
    set_seed(7)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
    )
    draw = torch.Generator().manual_seed(3)
    rows = torch.randint(64, (64, 16), generator=draw)
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as place:
        args = TrainingArguments(
            output_dir=place,
            use_cpu=True,
            per_device_train_batch_size=4,
            num_train_epochs=2,
            learning_rate=1e-2,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            logging_steps=4,
        )
        trainer = Trainer(model=LlamaForCausalLM(config), args=args, train_dataset=data)
        outcome = trainer.train()
        if args.process_index == 0:
            print("RESULT", f"{outcome.training_loss:.6f}", args.world_size, args.parallel_mode, flush=True)


if __name__ == "__main__":
    main()
