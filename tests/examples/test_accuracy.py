"""The table of examples/bench/accuracy.py on a small model."""

import sysconfig
from pathlib import Path

import pytest

from examples.bench.accuracy import HELDOUT_FILES, Judge, Quantized, held_out, line, makers
from trtc.quant.calibration_text import default_calibration
from trtc.quant.reference_model import load_model

MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"


@pytest.fixture(scope="module")
def judge() -> Judge:
    return Judge(MODEL, 1024)


def test_an_unquantised_model_loses_nothing(judge: Judge) -> None:
    row = judge.row("itself", lambda: Quantized(load_model(MODEL, "float32"), 16.0))
    assert abs(row.kl) < 1e-9 and row.top1 == 1
    assert row.perplexity_ratio == pytest.approx(1)
    assert line(row).startswith("| itself | 16.000 | 0.0000 ")


def test_gptaq_costs_less_than_rounding_to_nearest(judge: Judge) -> None:
    rows = {
        name: judge.row(name, makers(MODEL)[name]) for name in ("int4", "int4_awq", "modelopt max")
    }
    assert rows["int4"].bits == rows["modelopt max"].bits == 4.125 < rows["int4_awq"].bits
    assert 0 < rows["int4"].kl < 0.8 * rows["modelopt max"].kl
    assert rows["int4"].top1 > 0.8 and all(row.kl_error < row.kl / 5 for row in rows.values())


def test_the_measured_text_is_not_in_the_calibration_text() -> None:
    (calibration,) = default_calibration().samples
    assert isinstance(calibration, str) and len(HELDOUT_FILES) > 10
    sequences = held_out(MODEL, 8192).sequences
    assert sum(map(len, sequences)) == 8192
    library = Path(sysconfig.get_path("stdlib"))
    for name in HELDOUT_FILES:
        lines = (library / f"{name}.py").read_text("utf-8").splitlines()
        long = [one for one in lines if len(one) > 60]
        assert sum(one in calibration for one in long) < 0.02 * len(long) + 1, name
