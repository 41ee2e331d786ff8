"""What `argosy compare` says about a prediction."""

import pytest

from argosy.cli.compare import show
from argosy.insight.compare import Comparison, GainRecord, StepTime


@pytest.mark.parametrize(
    ("slower", "least", "most", "came"),
    [
        (-0.04, -0.06, -0.02, "measured 4% less"),
        (0.09, 0.05, 0.12, "measured 9% more"),
        (0.09, -0.05, 0.2, "no difference measured"),
    ],
)
def test_a_prediction_is_compared_with_what_is_more_than_noise(
    slower: float, least: float, most: float, came: str, capsys: pytest.CaptureFixture[str]
):
    time = StepTime(0.1, 0.1 * (1 + slower), slower, least, most)
    gone = [GainRecord("straggler", 0.05, -slower)]
    show(Comparison(a="a", b="b", changed={}, time=time, ledger={}, scalars={}, gone=gone, new=[]))
    assert f"straggler is gone: predicted 5% less time per step, {came}\n" in capsys.readouterr().out
