"""What the Trainer of transformers remembers of its steps, as something that a run tracks."""
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownParameterType=false

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback, TrainerState
from transformers.trainer_callback import CallbackHandler, ExportableState


class TrainerProgress:
    """Equal on all ranks, since losses are averaged first, and since what callbacks count comes from them."""

    def __init__(self, callbacks: CallbackHandler) -> None:
        self.state = TrainerState()
        self._callbacks = callbacks
        self.total = self.window = 0.0
        """Sums of losses: of all steps, and of those since the last log."""
        self.steps = self.logged = 0
        self._text, self._entries = "", -1

    def add(self, loss: float) -> None:
        """A step has this mean loss over all ranks."""
        self.total, self.window = self.total + loss, self.window + loss
        self.steps, self.logged = self.steps + 1, self.logged + 1

    def fill(self, logs: dict[str, float]) -> None:
        """Put losses into `logs` that a replaced rank knows as well as the others."""
        if "loss" in logs and self.logged:
            logs["loss"] = self.window / self.logged
            self.window, self.logged = 0.0, 0
        if "train_loss" in logs and self.steps:
            logs["train_loss"] = self.total / self.steps

    def state_dict(self) -> dict[str, Any]:
        if self._entries != len(self.state.log_history):
            self._text, self._entries = json.dumps(asdict(self.state)), len(self.state.log_history)
        counts = [self.steps, self.logged, self.state.num_input_tokens_seen]
        counted = json.dumps([each.state()["attributes"] for each in self.stateful()])
        return {"sums": [self.total, self.window], "counts": counts, "state": self._text, "callbacks": counted}

    def load_state_dict(self, said: dict[str, Any]) -> None:
        self.total, self.window = said["sums"]
        self.steps, self.logged, self.state.num_input_tokens_seen = said["counts"]
        known = json.loads(said["state"])
        for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos", "epoch"):
            setattr(self.state, name, known[name])
        for callback, counted in zip(self.stateful(), json.loads(said["callbacks"]), strict=True):
            for name, value in counted.items():
                setattr(callback, name, value)

    def stateful(self) -> list[Any]:
        """Callbacks that a checkpoint of the Trainer has the state of, such as EarlyStoppingCallback."""
        found: list[TrainerCallback] = self._callbacks.callbacks
        return [each for each in found if isinstance(each, ExportableState)]

    def write_entry(self, trainer: Any, place: Path, step: int) -> str:
        """A checkpoint that brings the Trainer to `step`; its weights are those that the script made."""
        stateful = [*self.stateful(), trainer.control]
        size = trainer.args.train_batch_size
        state = TrainerState(global_step=step, train_batch_size=size, stateful_callbacks=stateful)
        state.compute_steps(trainer.args, trainer.args.max_steps)
        state.save_to_json(str(place / "trainer_state.json"))
        if hasattr(trainer.model, "peft_config"):
            trainer.model.save_pretrained(place)
        else:
            torch.save(trainer.model.state_dict(), place / "pytorch_model.bin")
        return str(place)
