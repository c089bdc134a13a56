"""The configuration struct that specialises a kernel."""

import numpy as np
import pytest

from trtc.plugins.cpu.emit import config_struct
from trtc.plugins.registry import REGISTRY


def test_struct_has_static_axes_attributes_and_types():
    struct = config_struct(
        "C3",
        REGISTRY["rms_norm"],
        axes={"M": "T", "K": 64},
        attributes={"eps": 1e-6, "out_dtype": "f8e4m3"},
        dtypes={"x": "bf16", "weight": "f32", "out": "f8e4m3"},
    )
    assert struct == (
        "struct C3 {\n"
        "  static constexpr std::int64_t K = 64;\n"
        "  static constexpr float eps = 1.0e-06f;\n"
        "  static constexpr std::int64_t centered = 0;\n"
        "  static constexpr std::int64_t scales = 0;\n"
        "  static constexpr std::int64_t hadamard = 0;\n"
        "  static constexpr auto out_dtype = trtc::DType::f8e4m3;\n"
        "  using x_t = trtc::bf16;\n"
        "  using residual_t = trtc::none;\n"
        "  using weight_t = float;\n"
        "  using bias_t = trtc::none;\n"
        "  using pre_scale_t = trtc::none;\n"
        "  using out_scale_t = trtc::none;\n"
        "  using out_t = trtc::f8e4m3;\n"
        "  using total_t = trtc::none;\n"
        "  using row_scale_t = trtc::none;\n"
        "  using normed_t = trtc::none;\n"
        "};"
    )


def test_row_axes_are_never_baked_in():
    struct = config_struct(
        "C",
        REGISTRY["gather_rows"],
        axes={"M": 4, "R": 2, "K": 8},
        attributes={},
        dtypes={"x": "f32", "rows": "i32", "out": "f32"},
    )
    assert "std::int64_t K = 8" in struct
    assert " M " not in struct
    assert " R " not in struct


def test_page_size_is_added_for_operators_with_a_pool():
    op = REGISTRY["kv_write"]
    attributes = {"num_kv_heads": 2, "head_dim": 16}
    assert "page_size = 32" in config_struct(
        "C", op, axes={}, attributes=attributes, dtypes={}, page_size=32
    )
    assert "page_size" not in config_struct(
        "C", REGISTRY["add"], axes={}, attributes={}, dtypes={}, page_size=32
    )


@pytest.mark.parametrize("eps", [1e-6, 1e-5, 0.0, 0.1, 1 / 3, 6.1e-5, 1e30])
def test_floats_read_back_exactly(eps):
    struct = config_struct(
        "C",
        REGISTRY["rms_norm"],
        axes={},
        attributes={"eps": eps, "out_dtype": "f32"},
        dtypes={},
    )
    literal = struct.split("eps = ")[1].split("f;")[0]
    assert np.float32(literal) == np.float32(eps)
