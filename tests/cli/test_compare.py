"""What `argosy compare` says about a prediction."""

import pytest
from msgspec import structs

from argosy.cli.compare import show
from argosy.insight.compare import Comparison, Forecast, GainRecord, StepTime


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


def test_a_prediction_is_shown_beside_what_happened(capsys: pytest.CaptureFixture[str]):
    made = Forecast(
        run="a",
        recipe="fsdp=2",
        chip="mine",
        step=(0.010, 0.012),
        low=0.008,
        high=0.0125,
        classes={"matmul": (0.006, 0.007), "collective": (0.004, 0.002)},
        peak_bytes=(2e6, 2.1e6),
    )
    show(Comparison(a="a", b="b", changed={}, time=None, ledger={}, scalars={}, gone=[], new=[], forecasts=[made]))
    text = capsys.readouterr().out
    assert "a, fsdp=2 on mine: measured inside the 80% interval" in text
    assert "10.000" in text
    assert "8.000-12.500" in text
    assert "predicted 2.0 MB, measured 2.1" in text
    assert not structs.replace(made, high=0.011).is_inside
