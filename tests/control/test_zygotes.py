"""What the next zygote imports when the last one was spoiled."""

from argosy.control.launch import DYNAMO, TORCH
from argosy.control.zygotes import without


def test_what_is_left_out_takes_its_parts_along():
    entries = ["lit", "lit.core", "lit.core:Trainer", "little", "lit:x"]
    assert without(entries, ["lit"]) == ("little",)
    assert without(entries, ["lit.core"]) == ("lit", "little", "lit:x")
    assert without(entries, ["lit.core:Trainer"]) == ("lit", "lit.core", "little", "lit:x")


def test_torch_stays_unless_it_is_torch_that_spoils():
    assert without([*TORCH, "json", "lit"], ["lit"]) == (*TORCH, "json")
    assert without(["torch", DYNAMO, "json"], [DYNAMO]) == ("torch", "json")
