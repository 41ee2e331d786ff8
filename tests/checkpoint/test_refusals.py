"""What could be lost in silence is refused by name, or kept: names, ties, moments, values, steps, savers."""

import math
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from argosy.checkpoint import (
    Cadence,
    DirectoryInUse,
    KeepBest,
    KeepEvery,
    Keeping,
    KeepLast,
    Saver,
    StepNotFound,
    list_steps,
    restore,
)
from argosy.core import ConfigError
from argosy.transfer import describe


def saved(path: Path, state: object, step: int = 1, **options: object) -> Path:
    with Saver(path, sample=1) as saver:
        saver.save(state, step, **options).wait(300)
    return path


def adam(model: nn.Module, *, steps: int = 1) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for _ in range(steps):
        sum(p.sum() for p in model.parameters()).backward()
        optimizer.step()
    return optimizer


class Tying(nn.Module):
    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.a, self.b = nn.Embedding(4, 3), nn.Linear(3, 4, bias=False)
        if tied:
            self.b.weight = self.a.weight


def test_keys_that_look_like_marks_come_back_as_they_were(tmp_path: Path):
    into: dict[str, object] = {"$tensor": 0}
    saved(tmp_path, {"note": {"$tensor": "x", "$float": "nan"}})
    restore(tmp_path, into={"note": into})
    assert into == {"$tensor": "x", "$float": "nan"}


WRONG = [
    {"step": -1},
    {"step": True},
    {"step": 3.0},
    {"step": "3"},
    {"step": 10**12},
    {"step": torch.ones(2, dtype=torch.int64)},
    {"metrics": {"val": "x"}},
    {"metrics": {"val": torch.ones(2)}},
    {"metrics": [1]},
    {"roles": {"weights"}},
    {"roles": "parameter"},
    {"tag": 3},
]


@pytest.mark.parametrize("wrong", WRONG, ids=str)
def test_odd_words_of_a_save_are_refused_and_cost_no_memory(tmp_path: Path, wrong: dict[str, object]):
    """More often than there are arenas: none is kept by a save that was refused."""
    with Saver(tmp_path) as saver:
        for _ in range(3):
            with pytest.raises(ConfigError):
                saver.save({"a": torch.ones(3)}, **{"step": 4, **wrong})
        saver.save({"a": torch.ones(3)}, 5).wait(300)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("every_steps", each) for each in (0, -3, 2.5)),
        *(("failures_per_day", each) for each in (-1.0, math.nan, "1")),
    ],
)
def test_a_cadence_that_says_nothing_is_refused(name: str, value: object):
    with pytest.raises(ConfigError, match=name):
        Cadence(**{name: value})


def test_memory_comes_back_from_saves_that_fail_while_they_are_copied(tmp_path: Path):
    class Odd:
        """An array whose memory cannot be reached."""

        data_ptr = property(lambda _: 1 / 0)

        def detach(self) -> "Odd":
            raise RuntimeError("gone")

    state = describe(others={"a": torch.ones(3)})
    member = state.units["a"].members["value"]
    broken = type(member)("value", member.role, member.dtype, member.layout, Odd())
    with Saver(tmp_path) as saver:
        for _ in range(3):
            state.units["a"].members["value"] = broken
            with pytest.raises((RuntimeError, ZeroDivisionError)):
                saver.save(state, 4)
        state.units["a"].members["value"] = member
        saver.save(state, 5).wait(300)


def test_numbers_of_any_kind_are_numbers(tmp_path: Path):
    with Saver(tmp_path) as saver:
        metrics = {"a": torch.tensor(0.5), "b": np.float32(2), "c": 3}
        saver.save({"n": np.int64(7), "flag": np.bool_(True)}, np.int64(3), metrics=metrics).wait(300)
        saver.save({"n": 1}, torch.tensor(4)).wait(300)
    assert [each.step for each in list_steps(tmp_path)] == [4, 3]
    assert list_steps(tmp_path)[1].metrics == {"a": 0.5, "b": 2.0, "c": 3.0}
    assert restore(tmp_path, step=np.int64(3)).values == {"n": 7, "flag": True}
    with pytest.raises(ConfigError, match="whole number"):
        restore(tmp_path, step="4")


def test_tied_weights_fill_modules_that_are_apart(tmp_path: Path):
    source = Tying(tied=True)
    optimizer = adam(source)
    saved(tmp_path, {"model": source, "optimizer": optimizer})
    into = Tying(tied=False)
    second = adam(into, steps=0)
    restore(tmp_path, into={"model": into, "optimizer": second})
    for parameter in (into.a.weight, into.b.weight):
        assert torch.equal(parameter, source.a.weight)
        assert torch.equal(second.state[parameter]["exp_avg"], optimizer.state[source.a.weight]["exp_avg"])
    assert into.a.weight.data_ptr() != into.b.weight.data_ptr()


def test_weights_that_were_apart_are_tied_only_if_they_are_equal(tmp_path: Path):
    apart, into = Tying(tied=False), Tying(tied=True)
    before = into.a.weight.detach().clone()
    saved(tmp_path / "apart", apart)
    with pytest.raises(ConfigError, match=r"a\.weight and b\.weight are one tensor here"):
        restore(tmp_path / "apart", into=into)
    assert torch.equal(into.a.weight, before)
    with torch.no_grad():
        apart.b.weight.copy_(apart.a.weight)
    saved(tmp_path / "equal", apart)
    restore(tmp_path / "equal", into=into)
    assert torch.equal(into.b.weight, apart.a.weight)


@pytest.mark.parametrize("options", [{}, {"roles": {"parameter"}}], ids=["no optimizer", "only parameters"])
def test_moments_begin_anew_only_if_that_is_asked_for(tmp_path: Path, options: dict[str, object]):
    source, into = nn.Linear(3, 3), nn.Linear(3, 3)
    state = {"model": source, "optimizer": adam(source)} if options else {"model": source}
    saved(tmp_path, state, **options)
    optimizer = adam(into)
    with pytest.raises(ConfigError, match=r"stored without moments.*bias, weight") as caught:
        restore(tmp_path, into={"model": into, "optimizer": optimizer})
    assert "fresh=True" in caught.value.hint
    assert set(optimizer.state) == set(into.parameters())
    assert not torch.equal(into.weight, source.weight)
    restore(tmp_path, into={"model": into, "optimizer": optimizer}, fresh=True)
    assert torch.equal(into.weight, source.weight)
    assert not optimizer.state


def test_an_optimizer_that_had_made_no_state_yet_is_restored_without(tmp_path: Path):
    source, into = nn.Linear(3, 3), nn.Linear(3, 3)
    saved(tmp_path, {"model": source, "optimizer": adam(source, steps=0)})
    optimizer = adam(into)
    restore(tmp_path, into={"model": into, "optimizer": optimizer})
    assert not optimizer.state


def test_buffers_that_were_not_saved_are_missed(tmp_path: Path):
    saved(tmp_path, nn.BatchNorm1d(3), roles={"parameter"})
    with pytest.raises(ConfigError, match="not stored: num_batches_tracked, running_mean, running_var"):
        restore(tmp_path, into=nn.BatchNorm1d(3))


@pytest.mark.parametrize("steps", [0, 1])
def test_state_of_another_kind_of_optimizer_is_refused(tmp_path: Path, steps: int):
    source, into = nn.Linear(3, 3), nn.Linear(3, 3)
    saved(tmp_path, {"model": source, "optimizer": adam(source)})
    sgd = torch.optim.SGD(into.parameters(), lr=0.1, momentum=0.9)
    for _ in range(steps):
        into(torch.ones(1, 3)).sum().backward()
        sgd.step()
    with pytest.raises(ConfigError, match="bias was saved with Adam, here its optimizer is SGD"):
        restore(tmp_path, into={"model": into, "optimizer": sgd})
    restore(tmp_path, into={"model": into, "optimizer": sgd}, roles={"parameter"}, fresh=True)
    assert torch.equal(into.weight, source.weight)


def test_values_are_put_back_into_the_dict(tmp_path: Path):
    history = [0]
    saved(tmp_path, {"model": nn.Linear(2, 2), "epoch": 7, "hist": [1, 2], "pair": (1, 2), "best": float("inf")})
    into = {"model": nn.Linear(2, 2), "epoch": 0, "hist": history, "pair": (), "best": None}
    restore(tmp_path, into=into)
    assert {name: into[name] for name in ("epoch", "hist", "pair", "best")} == {
        "epoch": 7,
        "hist": [1, 2],
        "pair": (1, 2),
        "best": float("inf"),
    }
    assert into["hist"] is history


def test_a_value_that_was_not_saved_is_missed(tmp_path: Path):
    saved(tmp_path, {"model": nn.Linear(2, 2)})
    into = {"model": nn.Linear(2, 2), "epoch": 3}
    with pytest.raises(ConfigError, match="not stored: epoch"):
        restore(tmp_path, into=into)
    assert restore(tmp_path, into=into, partial=True).kept == ["epoch"]
    assert into["epoch"] == 3


def test_conjugate_and_negative_views_are_what_they_say(tmp_path: Path):
    z = torch.complex(torch.arange(3.0), torch.arange(3.0) + 1)
    saved(tmp_path, {"plain": z, "turned": z.conj(), "minus": z.conj().imag, "real": z.real})
    found = restore(tmp_path).tensors
    assert torch.equal(found["turned"], z.conj().resolve_conj())
    assert torch.equal(found["minus"], -z.imag)
    memory = torch.zeros(3, dtype=torch.complex64)
    into = {"plain": memory, "turned": memory.conj(), "minus": torch.zeros(3)._neg_view(), "real": torch.zeros(3)}
    restore(tmp_path, into=into)
    assert torch.equal(memory, z)
    assert torch.equal(into["turned"].resolve_conj(), z.conj().resolve_conj())
    assert torch.equal(into["minus"].resolve_neg(), -z.imag)


def test_wishes_that_match_nothing_are_refused(tmp_path: Path):
    saved(tmp_path, nn.Linear(2, 2))
    into = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="'weights'") as caught:
        restore(tmp_path, into=into, roles={"weights"})
    assert "parameter, master, moment" in caught.value.hint
    with pytest.raises(ConfigError, match="nothing that is stored has a place here: not bias, weight"):
        restore(tmp_path, into={"other": {"q": torch.ones(2)}}, partial=True)
    with pytest.raises(ConfigError, match="names what is not stored: nope"):
        restore(tmp_path, into=into, rename={"nope": "weight"})
    with pytest.raises(ConfigError, match="a dict or a function of names: list"):
        restore(tmp_path, into=into, rename=["weight"])
    with pytest.raises(StepNotFound, match=f"no step was committed in {tmp_path}/none"):
        restore(tmp_path / "none")


def threads_of_savers() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("argosy-")}


@pytest.mark.parametrize("in_a_cycle", [False, True])
def test_a_saver_that_nobody_has_any_more_ends_its_saves_and_lets_go(tmp_path: Path, in_a_cycle: bool):
    """Though an optimizer still waits for its last snapshot, and that is not yet written."""
    before = threads_of_savers()
    model = nn.Linear(300, 300)
    optimizer = adam(model)
    for step in range(1, 4):
        saver = Saver(tmp_path, keep=[KeepLast(9)])
        if in_a_cycle:
            saver.me = saver
        saver.save({"m": model, "o": optimizer}, step)
        optimizer.step()
        del saver
    Saver(tmp_path).close()
    assert [each.step for each in list_steps(tmp_path)] == [3, 2, 1]
    assert threads_of_savers() <= before
    assert not (tmp_path / "checkpoints" / "owner.json").exists()


def test_a_second_saver_in_one_process_is_refused_until_the_first_is_closed(tmp_path: Path):
    with Saver(tmp_path) as first:
        with pytest.raises(DirectoryInUse, match=r"made at .*test_refusals\.py:\d+\nhint: .*close\(\)"):
            Saver(tmp_path)
        first.save({"a": 1}, 1).wait(300)
    with Saver(tmp_path) as second:
        second.save({"a": 2}, 2).wait(300)


def test_a_saver_that_cannot_let_go_of_its_directory_says_so_and_is_closed(tmp_path: Path):
    said: list[str] = []
    saver = Saver(tmp_path, say=said.append)
    saver.save({"a": 1}, 1).wait(300)
    owner = tmp_path / "checkpoints/owner.json"
    text = owner.read_bytes()
    owner.unlink()
    owner.mkdir()  # What cannot be removed, also by root: a directory that is not empty.
    (owner / "x").write_bytes(text)
    saver.close()
    assert "could not be released" in said[-1]


@pytest.mark.parametrize(
    "keep",
    [lambda: 3, lambda: [3], lambda: KeepLast(3), lambda: [KeepBest("val", 0)], lambda: [KeepEvery(0)]],
)
def test_odd_policies_are_refused(tmp_path: Path, keep: Callable[[], object]):
    with pytest.raises(ConfigError):
        Saver(tmp_path, keep=keep())
    with Saver(tmp_path):
        pass


def test_pins_and_tags_can_be_removed(tmp_path: Path):
    with Saver(tmp_path, keep=[KeepLast(1)]) as saver:
        handle = saver.save({"a": torch.ones(3)}, 1, tag="release")
        saver.pin(1)
        handle.wait(300)
        with pytest.raises(StepNotFound, match="step 999 was not committed") as caught:
            saver.pin(999)
        assert caught.value.hint == "there are 1"
        with pytest.raises(StepNotFound, match="no step is tagged 'other'"):
            saver.untag("other")
        saver.untag("release")
        saver.save({"a": torch.ones(3)}, 2).wait(300)
        assert restore(tmp_path, step=1).step == 1
        saver.unpin(1)
        saver.save({"a": torch.zeros(3)}, 3).wait(300)
    assert [each.step for each in list_steps(tmp_path)] == [3]


def test_without_a_step_it_is_the_one_last_told(tmp_path: Path):
    with Saver(tmp_path) as saver:
        with pytest.raises(ConfigError, match="which step is saved is not known"):
            saver.save({"a": 1}, tag="first")
        saver.due(6)
        assert saver.save({"a": 1}, tag="first").durable.result(30) == 6
    assert [(each.step, each.tags) for each in list_steps(tmp_path)] == [(6, ["first"])]


def test_what_is_described_is_a_module():
    with pytest.raises(ConfigError, match="a module or a dict of modules: int"):
        describe(3)
    with pytest.raises(ConfigError, match="not an optimizer: int"):
        describe(nn.Linear(2, 2), 3)


def shared_rows(kind: str) -> object:
    """Six cells in less memory than that, or in memory that is not ours to write to."""
    if kind == "bytes":
        return np.frombuffer(bytes(24), dtype="<f4").reshape(2, 3)
    if kind == "broadcast":
        return np.broadcast_to(np.zeros(3, "<f4"), (2, 3))
    return torch.zeros(3).expand(2, 3) if kind == "expanded" else torch.zeros(4).as_strided((2, 3), (1, 1))


@pytest.mark.parametrize("kind", ["expanded", "windows", "bytes", "broadcast"])
@pytest.mark.parametrize("of_numpy", [False, True])
def test_memory_that_cannot_hold_each_cell_is_refused_before_anything_is_written(
    tmp_path: Path, kind: str, of_numpy: bool
):
    """Among arrays alone, and among tensors."""
    odd, plain = shared_rows(kind), torch.zeros(4)
    if of_numpy:
        odd, plain = odd.numpy() if isinstance(odd, torch.Tensor) else odd, plain.numpy()
    saved(tmp_path, {"a": plain + 1, "b": torch.arange(6.0).view(2, 3).numpy()})
    with pytest.raises(ConfigError, match=r"b cannot be restored into: (its cells share memory|it is read-only)"):
        restore(tmp_path, into={"a": plain, "b": odd})
    assert not plain.any()
    assert not np.asarray(odd).any()


def test_strided_memory_with_a_place_for_each_cell_is_written(tmp_path: Path):
    rows = torch.arange(6.0).view(2, 3)
    saved(tmp_path, {"a": rows, "b": rows})
    into = {"a": torch.zeros(3, 2).t(), "b": torch.zeros(2, 6)[:, ::2]}
    restore(tmp_path, into=into)
    assert all(torch.equal(tensor, rows) for tensor in into.values())


class Frozen:
    """Gives its state as arrays that nobody may write to, and takes it back by load_state_dict."""

    def __init__(self, *numbers: float) -> None:
        self.numbers = numbers

    def state_dict(self) -> dict[str, object]:
        return {"numbers": np.frombuffer(np.array(self.numbers, float).tobytes())}

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.numbers = tuple(state["numbers"].tolist())


def test_arrays_stay_arrays_and_read_only_ones_go_through_load_state_dict(tmp_path: Path):
    saved(tmp_path, {"x": {"a": np.arange(3.0), "all": [np.ones(2)]}, "frozen": Frozen(1, 2)})
    here, frozen = np.zeros(3), Frozen(0, 0)
    into = {"x": {"a": here, "all": [np.zeros(2)]}, "frozen": frozen}
    restore(tmp_path, into=into)
    assert into["x"]["a"] is here
    assert here.tolist() == [0, 1, 2]
    assert isinstance(into["x"]["all"][0], np.ndarray)
    assert frozen.numbers == (1, 2)


def test_what_does_not_fit_ends_the_reading_that_had_begun(tmp_path: Path):
    """A restore by one process reads ahead, while it looks for places: what is refused leaves no thread behind."""
    saved(tmp_path, nn.Linear(1024, 1024))
    threads, other = threading.active_count(), nn.Linear(1024, 1023)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    with pytest.raises(ConfigError, match="here it is"):
        restore(tmp_path, into=other)
    assert threading.active_count() <= threads
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("remap", [[], {}, 3])
def test_what_is_no_remap_cadence_or_place_is_refused(tmp_path: Path, remap: object):
    saved(tmp_path, {"a": torch.ones(2)})
    with pytest.raises(ConfigError, match="remap= is a function"):
        restore(tmp_path, {"a": torch.ones(2)}, remap=remap)
    with pytest.raises(ConfigError, match="cadence= is a Cadence: 5"):
        Saver(tmp_path, cadence=5)
    with pytest.raises(ConfigError, match="has a name"):
        Saver("")
    with pytest.raises(ConfigError, match="has a name, a path or URL: None"):
        Saver(None)
    with pytest.raises(ConfigError, match="keeping= is a Keeping: True"):
        Saver(tmp_path, keeping=True)
    with pytest.raises(ConfigError, match="bytes_max must be a whole number from 1 on: '1G'"):
        Keeping(bytes_max="1G")
