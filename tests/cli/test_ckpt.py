"""`argosy ckpt` finds a run by its directory or its name, and does not take what is not there for an empty one."""

from pathlib import Path

import pytest
from console import Console

from argosy.cli.ckpt import command
from argosy.core import ConfigError

COMMANDS = [["ls"], ["show"], ["verify"], ["diff", "1", "2"], ["export", "hf", "out"], ["prune"]]


@pytest.mark.parametrize("words", COMMANDS, ids=[words[0] for words in COMMANDS])
def test_a_directory_that_is_not_there_is_an_error_with_a_hint(tmp_path: Path, words: list[str]):
    name, *rest = words
    with pytest.raises(ConfigError, match=f"no such directory: {tmp_path}/nosuch") as caught:
        command.main([name, f"{tmp_path}/nosuch", *rest], standalone_mode=False)
    assert "argosy ps --all" in caught.value.hint


def test_a_run_is_known_by_its_name_before_it_has_a_checkpoint(console: Console):
    assert console.argosy("run", "--name", "young", "--", "true").code == 0
    unknown = console.argosy("ckpt", "ls", "nosuch")
    assert (unknown.code, unknown.text.splitlines()[0]) == (2, "argosy: no such run: nosuch")
    listed = console.argosy("ckpt", "ls", "young")
    assert (listed.code, listed.text) == (0, "no step was committed here\n")


def test_what_is_no_checkpoint_is_refused_in_words(console: Console, tmp_path: Path):
    """Every line begins with `argosy:`; nobody sees a traceback."""
    (tmp_path / "noise").write_bytes(b"\x10" + bytes(7) + b"\xff" * 40)
    (tmp_path / "dcp").mkdir()
    (tmp_path / "dcp/.metadata").write_bytes(b"noise")
    words = [
        ["ls", f"{tmp_path}/noise"],
        ["ls", "foo://x", "--json"],
        ["import", "hf", f"{tmp_path}/noise", f"{tmp_path}/run"],
        ["import", "torch", f"{tmp_path}/noise", f"{tmp_path}/run"],
        ["import", "torch", f"{tmp_path}/dcp", f"{tmp_path}/run"],
        ["import", "dcp", f"{tmp_path}/dcp", f"{tmp_path}/run"],
    ]
    for each in words:
        ended = console.argosy("ckpt", *each)
        assert (ended.code, ended.text.partition(" ")[0]) == (2, "argosy:"), (each, ended.text)
    assert not (tmp_path / "run").exists()
