"""The table of examples/bench/accuracy.py on a small model."""

import argparse
import sys
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch

from examples.bench.accuracy import (
    HELDOUT_FILES,
    Judge,
    Quantized,
    calibration,
    held_out,
    line,
    makers,
    mean_squares,
    of_rival,
    rival,
)
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
        name: judge.row(name, makers(MODEL, {})[name])
        for name in ("int4", "int4_awq", "modelopt max")
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


RIVAL = """#!{python}
import sys
script, *sys.argv[1:] = sys.argv[1:]
sys.path.insert(0, {root!r})
from examples.bench import accuracy_rivals as rivals
assert script == rivals.__file__

def halved(checkpoint, ids):
    assert ids.shape == {shape}
    model, tokenizer = rivals._opened(checkpoint)
    return {{name: weight * 0.5 for name, weight in rivals._linears(model).items()}}

rivals.LIBRARIES["auto-round"] = halved
rivals.main()
"""
"""A Python whose auto-round halves all weights."""


def test_a_rival_gets_the_calibration_text_and_its_weights_are_measured(tmp_path: Path) -> None:
    windows = np.stack(calibration(MODEL).sequences)
    python = tmp_path / "python"
    root = str(Path(__file__).parents[2])
    python.write_text(RIVAL.format(python=sys.executable, root=root, shape=tuple(windows.shape)))
    python.chmod(0o755)
    made = of_rival(MODEL, "auto-round", str(python))
    exact = load_model(MODEL, "float32").get_submodule("model.layers.1.mlp.up_proj").weight
    found = made.model.get_submodule("model.layers.1.mlp.up_proj").weight
    torch.testing.assert_close(found, exact * 0.5)
    assert made.bits == 4.125


def test_rivals_that_are_not_given_or_not_there() -> None:
    with pytest.raises(ImportError) as caught:
        makers(MODEL, {})["auto-round 200"]()
    assert caught.value.name == "give --rival auto-round=PYTHON"
    assert rival(f"llm-compressor={sys.executable}") == ("llm-compressor", sys.executable)
    for given in ("auto-round", "auto-round=/nowhere/python", f"autoround={sys.executable}"):
        with pytest.raises(argparse.ArgumentTypeError, match="is not NAME=FILE"):
            rival(given)


def test_mean_squares_are_those_of_the_inputs() -> None:
    """Of the first layer, whose inputs are the embeddings after its norm."""
    model, tokens = load_model(MODEL, "float32"), calibration(MODEL)
    found = mean_squares(model, tokens)["model.layers.0.self_attn.q_proj"]
    ids = torch.from_numpy(np.stack(tokens.sequences).astype(np.int64))
    with torch.inference_mode():
        x = model.model.layers[0].input_layernorm(model.model.embed_tokens(ids))
    torch.testing.assert_close(found, x.square().mean((0, 1)), rtol=1e-4, atol=1e-6)
