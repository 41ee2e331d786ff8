"""Plans carried out between living ranks, tensors that change shape on their way, and the lower bound."""

import os
import subprocess
from pathlib import Path

import pytest
from warm import warm

import argosy
from argosy.core import ConfigError
from argosy.transfer import (
    Box,
    Fused,
    Layout,
    Piece,
    Remap,
    Renamed,
    Split,
    SplitUp,
    Stacked,
    Tensor,
    Transposed,
    Uncovered,
    replicated,
    reshard,
    sharded,
)


def test_four_ranks_move_split_fuse_stack_and_transpose(tmp_path: Path):
    """Bitwise gather-then-slice, within the staging budget, sending exactly the lower bound."""
    env = os.environ | {
        "PYTHONPATH": str(Path(argosy.__file__).parents[1]),
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("movers.py")
    ended = subprocess.run([*warm(), str(script), str(tmp_path)], env=env, capture_output=True, text=True, timeout=100)
    assert ended.returncode == 0, ended.stderr


def one(*names: str, shape: tuple[int, ...] = (4, 2)) -> dict[str, Tensor]:
    return {name: Tensor(replicated(shape), 4, "F32") for name in names}


@pytest.mark.parametrize(
    ("rule", "source", "fault"),
    [
        (Renamed("x", "y"), one("a"), "does not have: x"),
        (SplitUp("a", ("b", "c"), (1, 2)), one("a"), r"a has 4 cells along 0, not \[1, 2\]"),
        (Fused(("a", "b"), "c"), {**one("a"), **one("b", shape=(4, 3))}, r"b is \[4, 3\], which does not go behind"),
        (Stacked(("a", "b"), "c"), {**one("a"), **one("b", shape=(4, 3))}, r"b is \[4, 3\], a is \[4, 2\]"),
        (Transposed("a", "b", (0, 0)), one("a"), r"\[0, 0\] is no order"),
        (Renamed("a", "b"), one("a", "b"), "two rules make the same tensor: b"),
    ],
)
def test_rules_that_do_not_fit_are_errors(rule: object, source: dict[str, Tensor], fault: str):
    with pytest.raises(ConfigError, match=fault):
        reshard(source, {}, remap=Remap((rule,)))  # type: ignore[arg-type]


def test_a_mapped_tensor_is_still_covered_exactly_once():
    with pytest.raises(Uncovered, match="not in the destination: c"):
        reshard(one("a"), one("b", shape=(1, 2)), remap=Remap((SplitUp("a", ("b", "c"), (1, 3)),)))


def test_the_lower_bound_is_counted_from_the_layouts():
    """Two overlapping boxes of a rank: what it holds in either of them need not be sent."""
    strides = (1,)
    old = Layout((8,), (Piece(0, Box((0,), (5,)), 0, strides), Piece(1, Box((3,), (5,)), 0, strides)))
    new = replicated((8,), (0, 1))
    explained = reshard({"a": Tensor(old, 4)}, {"a": Tensor(new, 4)}).explain()
    assert explained.bytes_bound == (3 + 3) * 4
    assert explained.bytes_sent == explained.bytes_bound
    fewer = reshard({"a": Tensor(sharded((8,), (4,), (Split(0),)), 4)}, {"a": Tensor(replicated((8,)), 4)}).explain()
    assert fewer.bytes_bound == 6 * 4
