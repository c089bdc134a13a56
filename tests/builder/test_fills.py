"""builder/fills.py: activations stay finite with the weights of `--dummy-weights`."""

import math

import numpy as np
import pytest

from trtc.builder.fills import dummy_fill
from trtc.plugins.registry import REGISTRY
from trtc.protos.plan import Weight
from trtc.runtime.executors.dummy_weights import fill_weights


@pytest.mark.parametrize("operator", ["gated_delta", "mamba1", "mamba2"])
def test_states_decay(operator: str) -> None:
    """A state is multiplied by exp(rate * softplus(...)) for each token: the gain of 10,000."""
    (rate,) = (one for one in REGISTRY[operator].inputs if one.name == "rate")
    fill = dummy_fill(rate.name, "f32", {}, {})
    largest = fill.center + fill.spread
    assert np.exp(largest * np.log1p(np.exp(1.0))) ** 10_000 < 1e-300


@pytest.mark.parametrize(
    ("operator", "parameter", "axes", "expected"),
    [
        ("gather_columns", "columns", {"K": 8, "N": 4}, [0, 1, 2, 3]),
        ("moe", "expert_map", {"E": 6, "L": 2}, [0, 1, -1, -1, -1, -1]),
        ("moe", "gate_up_order", {"L": 2, "H": 3}, [0, 1, 2, 0, 1, 2]),
    ],
)
def test_indices_are_within_what_they_index(
    operator: str, parameter: str, axes: dict[str, int], expected: list[int]
) -> None:
    (one,) = (one for one in REGISTRY[operator].inputs if one.name == parameter)
    fill = dummy_fill(parameter, "i32", {}, axes)
    shape = tuple(axes[axis] for axis in one.axes)
    weight = Weight(
        name="w",
        dtype="i32",
        shape=shape,
        layout="row_major",
        offset=0,
        bytes=4 * math.prod(shape),
        fill=fill,
    )
    assert fill_weights([weight], 64)[: weight.bytes].view(np.int32).tolist() == expected
