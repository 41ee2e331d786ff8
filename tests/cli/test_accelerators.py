"""`-n gpu` and `-n auto` count the accelerators of a host without initialising one."""

from pathlib import Path

import pytest

from argosy.cli.accelerators import count_ranks, list_accelerators, one_per_rank
from argosy.core import ConfigError


def test_the_environment_says_which_gpus_there_are_else_the_kernels_files(tmp_path: Path):
    for name in ("nvidia0", "nvidia1", "nvidia10", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert list_accelerators({}, tmp_path) == ["0", "1", "10"]
    assert list_accelerators({"CUDA_VISIBLE_DEVICES": "4, GPU-8a1b,7"}, tmp_path) == ["4", "GPU-8a1b", "7"]
    assert list_accelerators({"CUDA_VISIBLE_DEVICES": ""}, tmp_path) == []


def test_gpu_means_one_rank_per_gpu_and_auto_the_same_where_there_are_any():
    assert count_ranks("gpu", ["4", "6"], 8) == count_ranks("auto", ["4", "6"], 8) == 2
    assert count_ranks("auto", [], 8) == count_ranks("cpu", ["4"], 8) == 8
    with pytest.raises(ConfigError, match="no GPU was found"):
        count_ranks("gpu", [], 8)


def test_each_rank_sees_one_gpu_only_if_gpus_were_asked_for():
    assert one_per_rank("gpu", 2, 0, ["4", "6"]) == (["4", "6"], [])
    assert one_per_rank("2", 2, 0, ["4", "6"]) == ([], [])
    assert one_per_rank("auto", 8, 0, []) == ([], [])


def test_spare_gpus_have_no_rank():
    assert count_ranks("gpu", ["4", "6", "7"], 8, 1) == 2
    assert one_per_rank("gpu", 2, 1, ["4", "6", "7"]) == (["4", "6"], ["7"])
    for text, gpus, spare in (("2", ["4", "6", "7"], 1), ("gpu", ["4"], 1), ("auto", [], 1)):
        with pytest.raises(ConfigError, match="--spare-gpus"):
            count_ranks(text, gpus, 8, spare)
