"""A Hugging Face model of several files is imported whole or not at all."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from argosy.checkpoint import Saver, import_, restore
from argosy.core import ConfigError

FILES = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
INDEX = "model.safetensors.index.json"


def model_of(directory: Path, homes: dict[str, str] | None = None) -> Path:
    """Two files with `a` and `b`, and `homes` as their index."""
    directory.mkdir()
    for number, (name, file) in enumerate(zip("ab", FILES, strict=True)):
        save_file({name: torch.full((2,), float(number))}, directory / file)
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
    hint = refused(source, tmp_path / "run", f"{INDEX} names tensors that are not there: b in {FILES[1]}")
    assert "nothing was imported" in hint


def test_h1_a_tensor_that_is_not_where_the_index_says_is_refused(tmp_path: Path):
    lost = model_of(tmp_path / "lost", {"a": FILES[0], "b": FILES[1], "c": FILES[1]})
    refused(lost, tmp_path / "run", f"names tensors that are not there: c in {FILES[1]}\n")
    moved = model_of(tmp_path / "moved", {"a": FILES[0], "b": FILES[0]})
    (moved / FILES[1]).unlink()
    refused(moved, tmp_path / "run", f"names tensors that are not there: b in {FILES[0]}\n")
    swapped = model_of(tmp_path / "swapped", {"a": FILES[1], "b": FILES[0]})
    refused(swapped, tmp_path / "run", f"a in {FILES[1]}, b in {FILES[0]}")


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
    save_file({"a": torch.ones(2), "b": torch.ones(2), "more": torch.zeros(1)}, source / FILES[1])
    save_file({"theirs": torch.ones(2)}, source / "consolidated.safetensors")
    found, said = imported(source, tmp_path / "run")
    assert found == {"a": [0, 0], "b": [1, 1], "more": [0]}
    assert said == [f"skipped consolidated.safetensors ({INDEX} does not name it)"]


def test_two_models_in_a_directory_must_be_told_apart(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    (source / "config.json").write_text('{"layers": 2}')
    save_file({"a": torch.full((2,), 7.0)}, source / "model.safetensors")
    found, said = imported(source, tmp_path / "both")
    assert (found, said) == ({"a": [0, 0], "b": [1, 1]}, [f"skipped model.safetensors ({INDEX} does not name it)"])
    assert imported(source / "model.safetensors", tmp_path / "one")[0] == {"a": [7, 7]}
    assert imported(source / INDEX, tmp_path / "two")[0] == {"a": [0, 0], "b": [1, 1]}
    assert restore(tmp_path / "two").values["$config"] == {"layers": 2}
    (source / INDEX).unlink()
    refused(source, tmp_path / "run", "two files hold a: model.safetensors is the second")
    for name in ("x", "y"):
        (source / f"{name}.safetensors.index.json").write_text("{}")
    refused(source, tmp_path / "run", "several indexes in .*: x.safetensors.index.json, y.safetensors.index.json")


def test_an_index_that_is_none_is_refused(tmp_path: Path):
    source = model_of(tmp_path / "hf")
    for content in (b"", b"{}", b"\xff", b'{"weight_map": {"a": 3}}'):
        (source / INDEX).write_bytes(content)
        refused(source, tmp_path / "run", "not an index of safetensors files")


def test_a_step_of_our_own_is_not_taken_for_a_model(tmp_path: Path):
    """Its segments are safetensors files, but a tensor may be cut over several of them."""
    with Saver(tmp_path / "ours") as saver:
        saver.save({"w": torch.ones(2)}, 1).wait(300)
    (step,) = (tmp_path / "ours/checkpoints").glob("step-*")
    refused(step, tmp_path / "run", "a step of Argosy, not of Hugging Face")
