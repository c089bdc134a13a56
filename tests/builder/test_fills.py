"""builder/fills.py: activations stay finite with the weights of `--dummy-weights`."""

import numpy as np
import pytest

from trtc.builder.fills import dummy_fill
from trtc.plugins.registry import REGISTRY


@pytest.mark.parametrize("operator", ["gated_delta", "mamba1", "mamba2"])
def test_states_decay(operator: str) -> None:
    """A state is multiplied by exp(rate * softplus(...)) for each token: the gain of 10,000."""
    (rate,) = (one for one in REGISTRY[operator].inputs if one.name == "rate")
    fill = dummy_fill(rate.name, "f32", {}, {})
    largest = fill.center + fill.spread
    assert np.exp(largest * np.log1p(np.exp(1.0))) ** 10_000 < 1e-300
