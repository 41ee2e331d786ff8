"""Copies between devices are spans; calls that only change the dtype are none."""

from pathlib import Path

from ranks import run_script


def test_copies_between_devices_are_spans_and_nothing_else_is(tmp_path: Path):
    printed = run_script(
        """
import sys
import torch
from argosy.observe import Page, Ring, install, read_spans, record_spans
record_spans(Ring.create(sys.argv[1] + "/ring"))
install(Page.create(sys.argv[1] + "/page"))

def copies():
    return sum(span.name == "copy" for span in read_spans(sys.argv[1] + "/ring"))

x = torch.ones(4)
torch.nn.Linear(4, 4)(x)
x.to("meta")
print(copies(), hasattr(torch.Tensor.to, "__wrapped__"))
torch.nn.Linear(4, 4, device="meta")(x.to("meta"))
x.to("meta"), x.to(device=torch.device("meta")), x.to(torch.empty(1, device="meta"))
x.to(torch.float64), x.to("cpu"), x.cpu(), x.copy_(torch.zeros(4)), x.to(torch.zeros(1))
print(copies())
""",
        str(tmp_path),
    )
    assert printed == "0 False\n3\n"
