"""What the Trainer of transformers remembers of its steps, as something that a run tracks."""
# pyright: reportMissingTypeStubs=false, reportMissingImports=false, reportUnknownMemberType=false
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

import json
from dataclasses import asdict
from typing import Any

from transformers import TrainerState


class TrainerProgress:
    """Equal on all ranks, since losses are averaged first."""

    def __init__(self) -> None:
        self.state = TrainerState()
        self.total = self.window = 0.0
        """Sums of losses: of all steps, and of those since the last log."""
        self.steps = self.logged = 0
        self._text, self._entries = "", -1

    def state_dict(self) -> dict[str, Any]:
        if self._entries != len(self.state.log_history):
            self._text, self._entries = json.dumps(asdict(self.state)), len(self.state.log_history)
        counts = [self.steps, self.logged, self.state.num_input_tokens_seen]
        return {"sums": [self.total, self.window], "counts": counts, "state": self._text}

    def load_state_dict(self, said: dict[str, Any]) -> None:
        self.total, self.window = said["sums"]
        self.steps, self.logged, self.state.num_input_tokens_seen = said["counts"]
        known = json.loads(said["state"])
        for name in ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "total_flos"):
            setattr(self.state, name, known[name])
