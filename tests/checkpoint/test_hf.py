"""A Hugging Face model of several files is imported whole or not at all."""

import json
from pathlib import Path

import pytest
import torch

from argosy.checkpoint import Saver, import_, restore
from argosy.checkpoint.hf import write_hf, write_safetensors
from argosy.core import ConfigError

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def model_of(directory: Path, homes: dict[str, str] | None = None) -> Path:
    """Two files with `a` and `b`, and `homes` as their index."""
    directory.mkdir()
    for number, (name, file) in enumerate(zip("ab", FILES, strict=True)):
        write_safetensors(directory / file, {name: torch.full((2,), float(number))})
    weight_map = dict(zip("ab", FILES, strict=True)) if homes is None else homes
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return directory


def imported(source: Path, run: Path) -> tuple[dict[str, list[float]], list[str]]:
    """The tensors that came in, and what was said."""
    said: list[str] = []
    import_("hf", source, run, say=said.append)
    return {name: tensor.tolist() for name, tensor in restore(run).tensors.items()}, said


def refused(source: Path, run: Path, words: str) -> str:
    """Nothing is committed; returns the hint."""
    with pytest.raises(ConfigError, match=words) as caught:
        import_("hf", source, run)
    assert not run.exists()
    return caught.value.hint


def test_h1_a_file_that_the_index_names_and_nobody_has_is_refused(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    (source / FILES[1]).unlink()
    hint = refused(source, tmp_path / "run", f"{INDEX} names files that are not there: {FILES[1]}")
    assert "nothing was imported" in hint


def test_h1_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path: Path):
    lost = model_of(tmp_path / "lost", {"a": FILES[0], "b": FILES[1], "c": FILES[1]})
    refused(lost, tmp_path / "run", f"names tensors that are not there: c in {FILES[1]}\n")
    moved = model_of(tmp_path / "moved", {"a": FILES[0], "b": FILES[0]})
    (moved / FILES[1]).unlink()
    refused(moved, tmp_path / "run", f"names tensors that are not there: b in {FILES[0]}\n")
    swapped = model_of(tmp_path / "swapped", {"a": FILES[1], "b": FILES[0]})
    refused(swapped, tmp_path / "run", rf"a in {FILES[1]} \(it is in {FILES[0]}\), b in ")


def test_h1_without_an_index_the_names_of_files_say_what_is_missing(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    (source / INDEX).unlink()
    assert imported(source, tmp_path / "both")[0] == {"a": [0, 0], "b": [1, 1]}
    (source / FILES[0]).unlink()
    refused(source, tmp_path / "run", f"files are missing in {source}: {FILES[0]}")
    assert imported(source / FILES[1], tmp_path / "run") == ({"b": [1, 1]}, [])


def test_what_the_index_does_not_name_comes_along_or_is_said(tmp_path: Path):
    """Tensors that a file has besides are taken, as transformers does; whole other files are not."""
    source = model_of(tmp_path / "hf")
    write_safetensors(source / FILES[1], {"a": torch.ones(2), "b": torch.ones(2), "more": torch.zeros(1)})
    write_safetensors(source / "consolidated.safetensors", {"theirs": torch.ones(2)})
    found, said = imported(source, tmp_path / "run")
    assert found == {"a": [0, 0], "b": [1, 1], "more": [0]}
    assert said == [
        f"left out a of {FILES[1]} (the index takes that of {FILES[0]})",
        f"left out consolidated.safetensors ({INDEX} does not name it)",
    ]


def test_two_models_in_a_directory_must_be_told_apart(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    (source / "config.json").write_text('{"layers": 2}')
    write_safetensors(source / "model.safetensors", {"a": torch.full((2,), 7.0)})
    assert "by its own name" in refused(source, tmp_path / "run", f"model.safetensors and {INDEX} are both a model")
    assert imported(source / "model.safetensors", tmp_path / "one")[0] == {"a": [7, 7]}
    assert imported(source / INDEX, tmp_path / "two")[0] == {"a": [0, 0], "b": [1, 1]}
    assert restore(tmp_path / "two").values["$config"] == {"layers": 2}
    (source / INDEX).unlink()
    refused(source, tmp_path / "run", f"two files hold a: {FILES[0]} and model.safetensors")
    for name in ("x", "y"):
        (source / f"{name}.safetensors.index.json").write_text("{}")
    refused(source, tmp_path / "run", "several indexes in .*: x.safetensors.index.json, y.safetensors.index.json")


def test_an_index_that_is_none_is_refused(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    for content in (b"", b"{}", b"\xff", b'{"weight_map": {"a": 3}}'):
        (source / INDEX).write_bytes(content)
        refused(source, tmp_path / "run", "not an index of safetensors files")


def test_what_is_exported_in_several_files_comes_back(tmp_path: Path):
    tensors = {"a": torch.arange(4.0), "b": torch.arange(3)}
    half = tmp_path / "half"
    half.mkdir()
    write_hf(tensors, None, half, shard_bytes=16)
    assert sorted(each.name for each in half.iterdir()) == [*FILES, INDEX]
    assert imported(half, tmp_path / "run") == ({"a": [0, 1, 2, 3], "b": [0, 1, 2]}, [])


def test_a_step_of_our_own_is_not_taken_for_a_model(tmp_path: Path):
    """Its segments are safetensors files, but a tensor may be cut over several of them."""
    with Saver(tmp_path / "ours") as saver:
        saver.save({"w": torch.ones(2)}, 1).wait(30)
    (step,) = (tmp_path / "ours/checkpoints").glob("step-*")
    refused(step, tmp_path / "run", "a step of Argosy, not of Hugging Face")
