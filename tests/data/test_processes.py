"""Worker processes: the same batches, whoever dies, hangs, raises or runs out of memory."""

import gc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from samples import Greedy, Leaving, Numbers, Secretive, Threaded

from argosy.core import ConfigError
from argosy.data import Loader, Processes, SampleError, Shuffle, Skip, WorkerLost
from argosy.data.processes import ProcessMaker

PATIENCE_S = 60.0


def load(loader: Loader) -> list[tuple[list[int], list[float]]]:
    with loader:
        return [(index.tolist(), draws.flatten().tolist()) for index, draws in loader]


def maker_of(loader: Loader) -> ProcessMaker:
    maker = loader._held.maker
    assert isinstance(maker, ProcessMaker)
    return maker


@pytest.mark.parametrize("count", [1, 3])
def test_workers_make_the_same_batches(count: int):
    alone = load(Loader(Numbers(50), 12, 3, epochs=2))
    assert load(Loader(Numbers(50), 12, 3, epochs=2, workers=count)) == alone


@pytest.mark.parametrize("how", ["kill", "exit", "fork", "fork and kill"])
def test_p1_a_dead_worker_is_replaced_and_its_work_asked_again(tmp_path: Path, how: str):
    for index in (5, 17, 30):
        (tmp_path / str(index)).write_text(how)
    alone = load(Loader(Numbers(50), 12, 3, epochs=2))
    assert load(Loader(Numbers(50, tmp_path), 12, 3, epochs=2, workers=2)) == alone
    assert list(tmp_path.iterdir()) == []


def test_p1_a_hung_worker_is_replaced(tmp_path: Path):
    (tmp_path / "5").write_text("hang")
    alone = load(Loader(Numbers(20), 10, 5, epochs=1))
    assert load(Loader(Numbers(20, tmp_path), 10, 5, epochs=1, workers=Processes(1, hang_s=1.0, tries=9))) == alone


def test_a_sample_that_kills_every_worker_is_named(tmp_path: Path):
    (tmp_path / "5").write_text("always kill")
    with pytest.raises(WorkerLost) as caught:
        load(Loader(Numbers(20, tmp_path), 10, 5, epochs=1, workers=1))
    assert str(caught.value).count("at sample 5 of epoch 0 (Numbers[5]) a worker ended: killed by SIGKILL") == 3
    assert "memory" in caught.value.hint


def test_an_error_names_sample_and_line_and_keeps_its_class(tmp_path: Path):
    (tmp_path / "5").write_text("always broken disk")
    with pytest.raises(SampleError, match=r"sample 5 of epoch 0 \(Numbers\[5\]\): OSError: cannot read 5") as caught:
        load(Loader(Numbers(20, tmp_path), 10, 5, epochs=1, workers=1))
    assert isinstance(caught.value.__cause__, OSError)
    assert "in misbehave" in str(caught.value)
    assert "in a worker process:" in "\n".join(caught.value.__notes__)


@pytest.mark.parametrize("workers", [1, Processes(1, hang_s=60.0)])
def test_a_sample_that_ends_the_interpreter_is_named(workers: int | Processes):
    with pytest.raises(SampleError, match=r"sample 3 .*SystemExit: 7"):
        load(Loader(Leaving(20), 10, 5, epochs=1, shuffle=Shuffle.none(), workers=workers))


def test_skipped_samples_are_recorded_by_the_loader(tmp_path: Path):
    (tmp_path / "5").write_text("always broken disk")
    loader = Loader(Numbers(20, tmp_path), 10, 5, epochs=1, workers=2, skip=Skip())
    seen = sorted(index for indices, _ in load(loader) for index in indices)
    assert seen == sorted(set(range(20)) - {5})
    assert [each.identity.index for each in loader.skipped] == [5]


def test_a_source_that_keeps_a_lock_is_refused_with_a_remedy():
    with pytest.raises(ConfigError, match="cannot be sent to worker processes") as caught:
        load(Loader(Secretive(10), 2, workers=1, epochs=1))
    assert "Threads" in caught.value.hint


def test_a_worker_out_of_memory_names_the_sample():
    with pytest.raises(SampleError, match=r"sample 3 .*Unable to allocate 1\.00 GiB"):
        load(Loader(Greedy(10, limited=True), 2, workers=1, epochs=1))


EATS = """
import os, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from argosy.data import Loader, WorkerLost
from samples import Greedy
try:
    for _ in Loader(Greedy(10), 2, workers=1, epochs=1):
        pass
except WorkerLost as error:
    print(error, error.hint)
"""


@pytest.mark.system
def test_a_worker_that_the_kernel_kills_for_its_memory_names_the_sample(small_memory: Path, tmp_path: Path):
    (tmp_path / "eats.py").write_text(EATS)
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    words = [sys.executable, str(tmp_path / "eats.py"), str(small_memory)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=PATIENCE_S, env=env)
    assert done.stdout.count("at sample 3 of epoch 0 (Greedy[3]) a worker ended: killed by SIGKILL") == 3, done.stderr
    assert "when memory runs out" in done.stdout


def test_batches_come_where_address_space_is_scarce(tmp_path: Path):
    """As under `ulimit -v`: a slab takes what it can get."""
    code = (
        "import resource; from argosy.data import Loader\n"
        "resource.setrlimit(resource.RLIMIT_AS, (3 << 30, 3 << 30))\n"
        "print(sorted(int(x) for batch in Loader(list(range(10)), 4, workers=1, epochs=1) for x in batch))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == str(list(range(10))), done.stderr


def rows(index: int) -> dict[str, Any]:
    return {"big": np.full((256, 256), index, np.float32), "tensor": torch.full((100,), index), "text": "x" * 100_000}


class Big(Numbers):
    def __getitem__(self, index: int) -> Any:
        return rows(index)


def test_b1_batches_that_are_kept_are_not_overwritten():
    with Loader(Big(24), 2, 1, epochs=1, workers=2) as loader:
        kept = list(loader)
        order = [index for batch in kept for index in batch["tensor"][:, 0].tolist()]
        assert sorted(order) == list(range(24))
        for batch, index in zip(kept, order, strict=True):
            assert (batch["big"] == index).all()
            assert len(batch["text"][0]) == 100_000
    assert [int(batch["big"][0, 0, 0]) for batch in kept] == order


class Halves(Numbers):
    def __getitem__(self, index: int) -> Any:
        return {"half": torch.full((3,), index, dtype=torch.bfloat16), "one": torch.tensor(index, dtype=torch.bfloat16)}


@pytest.mark.parametrize("workers", [0, 1])
def test_tensors_that_numpy_does_not_know_come_as_they_are(workers: int):
    with Loader(Halves(8), 4, epochs=1, workers=workers) as loader:
        for batch in loader:
            assert batch["half"].dtype == batch["one"].dtype == torch.bfloat16
            assert batch["half"][:, 0].tolist() == batch["one"].tolist() == loader.handed.ids


def test_p2_slabs_are_used_again_when_batches_are_dropped():
    with Loader(Big(24), 2, 1, workers=Processes(1, ahead=2)) as loader:
        for _, batch in zip(range(100), loader, strict=False):
            del batch
        (worker,) = maker_of(loader)._workers
        assert len(worker._slabs) <= 8


def test_a_rolled_back_step_comes_again_untouched():
    with Loader(Numbers(50), 8, 4, workers=2) as loader, Loader(Numbers(50), 8, 4) as alone:
        for _ in range(5):
            expected = [draws.clone() for _, draws in alone.batches()]
            for _ in range(3):
                attempt = list(loader.batches())
                assert all(torch.equal(draws, right) for (_, draws), right in zip(attempt, expected, strict=True))
                for _, draws in attempt:
                    draws.zero_()
            loader.commit()
            alone.commit()


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def test_nothing_is_left_of_a_closed_or_forgotten_loader():
    gc.collect()
    before = open_files()
    for closed in (True, False):
        loader = Loader(Numbers(50), 8, 4, workers=2)
        next(iter(loader))
        processes = [psutil.Process(pid) for pid in maker_of(loader).pids]
        if closed:
            loader.close()
        del loader
        gc.collect()
        assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []
    assert open_files() == before


def test_a_loader_that_is_used_after_its_end_can_be_closed_again():
    loader = Loader(Numbers(8), 4, epochs=1, workers=1)
    first = list(loader)
    loader.close()
    assert list(loader) == []
    loader.rewind()
    again = list(loader)
    assert all(torch.equal(left[1], right[1]) for left, right in zip(first, again, strict=True))
    processes = [psutil.Process(pid) for pid in maker_of(loader).pids]
    loader.close()
    loader.close()
    assert psutil.wait_procs(processes, timeout=PATIENCE_S)[1] == []


ORPHANING = """
import os, sys
from argosy.data import Loader
class Endless:
    def __len__(self): return 100
    def __getitem__(self, index):
        if index == 0:
            while True: pass
        return index
loader = Loader(Endless(), 4, 2, workers=2)
next(loader.batches())
print("loading", flush=True)
input()
"""


def test_w1_workers_end_with_their_loader_even_while_they_work():
    with subprocess.Popen(
        [sys.executable, "-c", ORPHANING], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout
        assert process.stdout.readline()
        workers = psutil.Process(process.pid).children(recursive=True)
        assert len(workers) >= 2  # The template, and a worker.
        process.kill()
    assert psutil.wait_procs(workers, timeout=PATIENCE_S)[1] == []


def test_classes_of_the_script_itself_travel_and_no_main_guard_is_needed(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "import numpy\nfrom argosy.data import Loader\n"
        "class Squares:\n    def __len__(self): return 10\n    def __getitem__(self, i): return i * i\n"
        "print(sorted(int(x) for batch in Loader(Squares(), 4, workers=2, epochs=1) for x in batch))\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.strip() == str([i * i for i in range(10)]), done.stderr
    assert done.stderr == ""


def test_large_arrays_of_a_source_are_shared_by_all_workers():
    source = np.arange(1 << 20).reshape(-1, 1024)
    with Loader(source, 64, 16, epochs=1, workers=2) as loader:
        batches = torch.cat(list(loader))
    assert sorted(batches[:, 0].tolist()) == source[:, 0].tolist()


def test_microbatches_that_are_dropped_are_not_kept_until_the_commit():
    with Loader(Big(24), 24, 1, workers=Processes(1, ahead=2)) as loader:
        for batch in loader.batches():
            del batch
        (worker,) = maker_of(loader)._workers
        assert len(worker._slabs) <= 8


def test_a_template_that_is_killed_is_started_again():
    alone = load(Loader(Numbers(60), 6, 3, epochs=1))
    with Loader(Numbers(60), 6, 3, epochs=1, workers=2) as loader:
        result: list[tuple[list[int], list[float]]] = []
        for number, (index, draws) in enumerate(loader):
            result.append((index.tolist(), draws.flatten().tolist()))
            if number in (3, 9):
                maker_of(loader)._template.kill()
                for pid in maker_of(loader).pids:
                    psutil.Process(pid).kill()
    assert result == alone


def test_t1_a_source_that_starts_threads_is_loaded_by_each_worker_itself():
    alone = load(Loader(Numbers(20), 4, 2, epochs=1))
    assert load(Loader(Threaded(20), 4, 2, epochs=1, workers=2)) == alone
