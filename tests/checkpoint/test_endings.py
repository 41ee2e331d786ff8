"""What is begun is kept: programs that end without `close`, and state that changes right after `save`."""

import copy
import multiprocessing as mp
import socket
import subprocess
import sys
import warnings
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel

from argosy.checkpoint import DirectoryInUse, KeepEvery, Saver, TornSnapshot, owner, restore
from argosy.checkpoint.commit_step import Committer
from argosy.checkpoint.format import Draft
from argosy.checkpoint.owner import take
from argosy.checkpoint.stores import open_store
from argosy.core import DeadlinePassed

ENDING = """
import os
import sys
import numpy as np
from argosy.checkpoint import Saver

codes = []
for how in ("held", "dropped", "raises"):
    if not (pid := os.fork()):
        break
    codes.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
else:
    print(*codes)
    sys.exit()


def train():  # Each of the forks ends as a program does.
    saver = Saver(f"{sys.argv[1]}/{how}")
    for step in range(3):
        saver.save({"w": np.full(3_000_000, step)}, step)
    if how == "raises":
        raise ValueError("a bug")
    return saver


if how == "dropped":
    train()
else:
    saver = train()
"""


def test_a_program_that_ends_without_close_loses_no_save(tmp_path: Path):
    command = [sys.executable, "-c", ENDING, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ended.stdout == "0 0 1\n", ended.stderr
    for how in ("held", "dropped", "raises"):
        place = tmp_path / how / "checkpoints"
        whole = [step for step in place.iterdir() if (step / "root.json").exists()]
        assert sorted(int(step.name[5:17]) for step in whole) == [0, 1, 2], how
        assert not (place / "owner.json").exists(), how


def test_what_no_optimizer_steps_may_change_right_after_save(tmp_path: Path):
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    average = AveragedModel(model)
    with Saver(tmp_path, keep=[KeepEvery(1)]) as saver:
        for step in range(3):
            model(torch.randn(4, 256)).sum().backward()
            optimizer.step()
            wanted = [each.detach().clone() for each in average.parameters()]
            state = {"model": model, "optimizer": optimizer, "average": average}
            handle = saver.save(state, step)
            average.update_parameters(model)
            handle.wait(300)
            found = copy.deepcopy(average)
            other = copy.deepcopy(model)
            restore(tmp_path, into={"model": other, "average": found}, step=step, partial=True, fresh=True)
            assert all(torch.equal(a, b) for a, b in zip(found.parameters(), wanted, strict=True))


@pytest.mark.system
def test_a_write_before_the_copy_is_complete_is_found(tmp_path: Path):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.Adam(model.parameters())
    with Saver(tmp_path, keep=[KeepEvery(1)], say=lambda _: None) as saver:
        for step in range(5):
            model(torch.randn(4, 1024)).sum().backward()
            optimizer.step()
            wanted = {name: each.detach().clone() for name, each in model.named_parameters()}
            handle = saver.save({"model": model, "optimizer": optimizer}, step)
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.999)
            try:
                handle.wait(300)
            except TornSnapshot:
                continue
            tensors = restore(tmp_path, step=step).tensors
            assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def test_a_write_that_torch_counts_after_the_copy_is_found(tmp_path: Path):
    """An operation that began during the copy may last longer than it; torch counts its writes at its end."""
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(4, 1024)).sum().backward()
    optimizer.step()
    last, other = optimizer.state[model[-1].weight]["momentum_buffer"], torch.zeros(1 << 22)
    with Saver(tmp_path, keep=[KeepEvery(1)], say=lambda _: None) as saver:
        handle = saver.save({"model": model, "optimizer": optimizer}, 0)
        torch._foreach_add_([last] + [other] * 50, 1.0)
        with pytest.raises(TornSnapshot):
            handle.wait(300)


GROUPS, ROUNDS = 4, 3


def heir(path: str, session: int, together: "mp.synchronize.Barrier", answers: "mp.Queue[tuple[str, bool]]") -> None:
    for number in range(ROUNDS):
        store = open_store(f"{path}/{number}", new=True)
        together.wait(300)
        try:
            take(store, f"s{session}")
            answers.put((store.name, True))
        except DirectoryInUse:
            answers.put((store.name, False))
        together.wait(300)


@pytest.mark.parametrize("is_orphan", [True, False])
def test_of_many_that_come_at_once_one_owns_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_orphan: bool
):
    """It is new, or its owner is dead."""
    monkeypatch.setattr(owner, "GRACE_S", 0.3)  # So long who comes too late waits for the owner to let go.
    gone = f'{{"host":"{socket.gethostname()}","pid":1,"started_at":0,"session":"s"}}'
    places = [tmp_path / f"{group}/{number}/checkpoints" for group in range(GROUPS) for number in range(ROUNDS)]
    for place in places if is_orphan else []:
        place.mkdir(parents=True)
        (place / "owner.json").write_text(gone)
    context = mp.get_context("fork")
    answers, heirs = context.Queue(), list[mp.Process]()
    for group in range(GROUPS):
        together = context.Barrier(3)
        args = [(str(tmp_path / f"{group}"), n, together, answers) for n in range(3)]
        heirs += [context.Process(target=heir, args=each) for each in args]
    with warnings.catch_warnings():  # Python 3.12 warns of forks beside threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for each in heirs:
            each.start()
    owners = Counter(
        number for number, is_owner in (answers.get(timeout=100) for _ in range(3 * len(places))) if is_owner
    )
    for each in heirs:
        each.join(300)
    assert owners == dict.fromkeys(map(str, places), 1)
    assert [path.name for path in places[0].iterdir()] == ["owner.json"]


def test_who_waits_long_for_another_rank_says_for_which_part(tmp_path: Path):
    said: list[str] = []
    committer = Committer(open_store(tmp_path, new=True), 0, 2, (KeepEvery(1),), said.append)
    committer.say_after_s, committer.ranks_timeout_s = 0.05, 0.5
    name = "step-000000000006-aaaaaaaa0001"
    draft = Draft(step=6, name=name, rank=0, size=2, entries=[], border=0, bytes=0, room=4096)
    with pytest.raises(DeadlinePassed):
        committer.commit(draft, memoryview(bytearray(4096)))
    assert said == [f"step 6 waits for {name}/rank-00001.json, up to 0.5 s"]
