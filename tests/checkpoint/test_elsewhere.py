"""State that is not where torch keeps it (inner optimizers, extra state) is kept, or refused by name."""

import os
from pathlib import Path
from typing import Any

import forked_calls
import pytest
import torch
from checkpoint.scripts.elsewhere import STAGES, as_rank, network, trained
from torch import nn

from argosy.checkpoint import Saver, restore
from argosy.core import ConfigError


@pytest.mark.parametrize("what", ["zero", "own", "generators", "cursors"])
def test_other_numbers_of_ranks_go_on(tmp_path: Path, what: str):
    """ZeroRedundancyOptimizer's shards become those of other ranks; a rank gets its own parameters back; a new rank
    keeps its own generator, and has rank 0's values where each rank had others."""
    for count, work in STAGES[what]:
        forked_calls.run(as_rank, work, str(tmp_path), ranks=count)


class Lookahead(torch.optim.Optimizer):
    """Leaves the work, and the state, to another one."""

    def __init__(self, base: torch.optim.Optimizer, *, says: bool) -> None:
        super().__init__(base.param_groups, {})
        self.base = base if says else [base]

    def state_dict(self) -> dict[str, Any]:
        return (self.base if isinstance(self.base, torch.optim.Optimizer) else self.base[0]).state_dict()


class Counting(torch.optim.SGD):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": 3}


def an_inner_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.AdamW(model.parameters())
    trained(model, base, 1)
    return Lookahead(base, says=True)


def a_hidden_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    base = torch.optim.AdamW(model.parameters())
    trained(model, base, 1)
    return Lookahead(base, says=False)


def state_of_no_parameter(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(model.parameters())
    optimizer.state["global"] = {"n": 1}
    return optimizer


REFUSED = [
    (an_inner_optimizer, r"Lookahead keeps state in its base, a AdamW.*\n.*give that to the dict instead: \.base"),
    (a_hidden_optimizer, "Lookahead has state in its state_dict that is not in its .state"),
    (state_of_no_parameter, "SGD has state of 'global', which is no parameter"),
    (lambda model: Counting(model.parameters()), "Counting says 'count' in its state_dict"),
]


@pytest.mark.parametrize(("make", "words"), REFUSED)
def test_an_optimizers_state_that_nobody_would_find_is_refused(tmp_path: Path, make: Any, words: str):
    model = network(0)
    with Saver(tmp_path) as saver, pytest.raises(ConfigError, match=words):
        saver.save({"model": model, "optimizer": make(model)}, 1)


class Extra(nn.Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.seen: Any = {"n": 0, "scale": torch.zeros(2)}

    def get_extra_state(self) -> Any:
        return self.seen

    def set_extra_state(self, state: Any) -> None:
        self.seen = state


def test_extra_state_of_modules_comes_back(tmp_path: Path):
    model = nn.Sequential(nn.Linear(2, 2), Extra(), Extra())
    model[1].seen = {"n": 3, "scale": torch.ones(5)}
    with Saver(tmp_path) as saver:
        saver.save({"model": model}, 1).wait(300)
    other = nn.Sequential(nn.Linear(2, 2), Extra(), Extra())
    restore(tmp_path, into={"model": other})
    assert other[1].seen["n"] == 3
    assert torch.equal(other[1].seen["scale"], torch.ones(5))
    assert other[2].seen["n"] == 0


class Saying(nn.Linear):
    def state_dict(self, *args: Any, **options: Any) -> Any:
        return {**super().state_dict(*args, **options), "count": torch.tensor(3)}


def test_what_a_module_only_says_in_its_state_dict_is_refused(tmp_path: Path):
    with Saver(tmp_path) as saver, pytest.raises(ConfigError, match="0 has 'count' in its state_dict"):
        saver.save(nn.Sequential(Saying(2, 2)), 1)


def test_a_parameter_of_no_module_has_its_moments(tmp_path: Path):
    model, scale = network(0), nn.Parameter(torch.tensor(2.0))
    optimizer = torch.optim.AdamW([*model.parameters(), scale])
    (model(torch.ones(1, 17)).sum() * scale).backward()
    optimizer.step()
    with Saver(tmp_path) as saver:
        saver.save({"model": model, "scale": scale, "optimizer": optimizer}, 1).wait(300)
    other, new = network(1), nn.Parameter(torch.tensor(7.0))
    fresh = torch.optim.AdamW([*other.parameters(), new])
    restore(tmp_path, into={"model": other, "scale": new, "optimizer": fresh})
    assert torch.equal(new, scale)
    assert torch.equal(fresh.state[new]["exp_avg"], optimizer.state[scale]["exp_avg"])


class Grown:
    """Somebody's buffer of samples, which grows."""

    def __init__(self, count: int) -> None:
        self.samples = torch.full((count, 2), float(count))

    def state_dict(self) -> dict[str, Any]:
        return {"samples": self.samples}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.samples = state["samples"]


def test_tensors_of_others_may_have_grown(tmp_path: Path):
    with Saver(tmp_path) as saver:
        saver.save({"buffer": Grown(5)}, 1).wait(300)
    other = Grown(1)
    restore(tmp_path, into={"buffer": other})
    assert torch.equal(other.samples, Grown(5).samples)


def test_values_that_have_no_place_are_not_dropped_in_silence(tmp_path: Path):
    model = nn.Linear(1, 1)
    with Saver(tmp_path) as saver:
        saver.save({"model": model, "epoch": 3}, 1).wait(300)
    with pytest.raises(ConfigError, match="no place for stored epoch"):
        restore(tmp_path, into={"model": model})
    restored = restore(tmp_path, into={"model": model}, partial=True)
    assert "without a place here: epoch" in str(restored)


ODD_KEYS = {(1, 2): "a", 3: {(): 4}, None: 5, float("inf"): 6, "text": (7,)}


def test_keys_of_any_plain_kind_come_back_and_others_are_refused(tmp_path: Path):
    into: dict[str, Any] = {"w": torch.zeros(3), "v": None}
    with Saver(tmp_path) as saver:
        saver.save({"w": torch.ones(3), "v": ODD_KEYS}, 1).wait(300)
        with pytest.raises(ConfigError, match="one of its keys is a bytes"):
            saver.save({"v": {b"x": 1}}, 2)
        for odd in ({"v": "\ud800"}, {"\ud800": torch.ones(1)}, {"__metadata__": torch.ones(1)}):
            with pytest.raises(ConfigError):
                saver.save(odd, 2)
    restore(tmp_path, into=into)
    assert into["v"] == ODD_KEYS
    assert restore(tmp_path).values["v"] == ODD_KEYS


def test_a_fork_may_not_save(tmp_path: Path):
    with Saver(tmp_path) as saver:
        pid = os.fork()
        if pid == 0:
            try:
                saver.save({"w": torch.ones(1)}, 1)
            except ConfigError as error:
                os._exit(7 if "this is a fork of it" in str(error) else 1)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        saver.save({"w": torch.ones(1)}, 1).wait(300)
