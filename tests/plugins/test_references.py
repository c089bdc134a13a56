"""References against independent implementations: the judges are judged once, in fp32."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix

from tests.support.operands import AttentionShape, attention_call, random_array, random_sequence
from trtc.plugins.registry import REGISTRY


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(22)


def test_rms_norm(rng):
    x, residual, weight = (random_array(rng, *shape) for shape in ((3, 40), (3, 40), (40,)))
    out, total, _, _ = REGISTRY["rms_norm"].reference(
        x,
        residual,
        weight,
        None,
        None,
        None,
        eps=1e-5,
        centered=0,
        scales=0,
        hadamard=0,
        out_dtype="f32",
    )
    expected = F.rms_norm(torch.tensor(x + residual), (40,), torch.tensor(weight), 1e-5)
    np.testing.assert_allclose(out, expected.numpy(), atol=1e-6)
    assert np.array_equal(total, x + residual)


def test_rms_norm_of_rows_that_ranks_share(rng):
    x, weight = random_array(rng, 3, 40), random_array(rng, 40)
    squares = np.sum(x**2, axis=1, keepdims=True)
    parts = [
        REGISTRY["rms_scale"].reference(x[:, own], squares, weight[own], width=40, eps=1e-5)[0]
        for own in (slice(0, 16), slice(16, 40))
    ]
    expected = F.rms_norm(torch.tensor(x), (40,), torch.tensor(weight), 1e-5)
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected.numpy(), atol=1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
def test_layer_norm(rng, has_bias):
    x, weight = random_array(rng, 3, 40) + 5, random_array(rng, 40)
    bias = random_array(rng, 40) if has_bias else None
    out, *_ = REGISTRY["rms_norm"].reference(
        x,
        None,
        weight,
        bias,
        None,
        None,
        eps=1e-5,
        centered=1,
        scales=0,
        hadamard=0,
        out_dtype="f32",
    )
    expected = F.layer_norm(
        torch.tensor(x),
        (40,),
        torch.tensor(weight),
        None if bias is None else torch.tensor(bias),
        1e-5,
    )
    np.testing.assert_allclose(out, expected.numpy(), atol=2e-6)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh", "relu2"])
def test_an_activation_without_a_gate(rng, activation):
    x = random_array(rng, 3, 40, spread=4)
    out, _ = REGISTRY["swiglu"].reference(
        x, None, None, None, activation=activation, scales=0, hadamard=0, out_dtype="f32"
    )
    wide = torch.tensor(x)
    expected = {
        "silu": F.silu(wide),
        "gelu_tanh": F.gelu(wide, approximate="tanh"),
        "relu2": F.relu(wide) ** 2,
    }
    np.testing.assert_allclose(out, expected[activation].numpy(), atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_swiglu(rng, activation):
    gate, up = random_array(rng, 3, 40, spread=4), random_array(rng, 3, 40)
    out, _ = REGISTRY["swiglu"].reference(
        gate, up, None, None, activation=activation, scales=0, hadamard=0, out_dtype="f32"
    )
    x = torch.tensor(gate)
    activated = F.silu(x) if activation == "silu" else F.gelu(x, approximate="tanh")
    np.testing.assert_allclose(out, (activated * torch.tensor(up)).numpy(), atol=1e-5)


@pytest.mark.parametrize("dtype", ["f8e4m3", "bf16"])
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear(rng, activation, dtype):
    """Every result is one of the two numbers of its type around the exact value."""
    x, weight = (random_array(rng, *shape, dtype=dtype) for shape in ((3, 24), (80, 24)))
    scale, by, out_scale = rng.uniform(0.1, 0.3, (80, 1)).astype(np.float32), 0.7, 0.05
    is_quantized = dtype == "f8e4m3"
    if not is_quantized:
        scale, by, out_scale = np.ones((80, 1), np.float32), 1.0, 1.0
    scales = (scale, np.float32(by), np.float32(out_scale))
    out, row_scales = REGISTRY["gated_linear"].reference(
        x, weight, *(scales if is_quantized else (None, None, None)), None,
        I=40, weight_dtype=dtype, activation=activation, scales=0,
    )  # fmt: skip
    assert row_scales is None
    exact = torch.tensor(weight.astype(np.float64) * scale).t()
    gate, up = (torch.tensor(x.astype(np.float64)) @ exact * by).chunk(2, dim=1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    gated = activated * up / out_scale
    expected = (gated.clamp(-448, 448) if is_quantized else gated).numpy()
    relative, least = (1 / 16, 2.0**-10) if is_quantized else (1 / 256, 1e-6)
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=relative, atol=least)


@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_gated_linear_by_rows(rng, activation):
    """The largest of each row becomes the largest code, and others are rounded to their nearest."""
    x, weight = (random_array(rng, *shape, dtype="f8e4m3") for shape in ((3, 24), (80, 24)))
    scale, row_scale = (rng.uniform(0.1, 0.3, (n, 1)).astype(np.float32) for n in (80, 3))
    out, found = REGISTRY["gated_linear"].reference(
        x, weight, scale, None, None, row_scale,
        I=40, weight_dtype="f8e4m3", activation=activation, scales=1,
    )  # fmt: skip
    exact = torch.tensor(weight.astype(np.float64) * scale).t()
    gate, up = (torch.tensor(x.astype(np.float64) * row_scale) @ exact).chunk(2, dim=1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    gated = (activated * up).numpy()
    np.testing.assert_allclose(found[:, 0], np.abs(gated).max(axis=1) / 448, rtol=1 / 200)
    values = out.astype(np.float64) * found
    least = found * 2.0**-10  # half the smallest step of E4M3
    assert (np.abs(values - gated) <= np.abs(gated) / 15 + least).all()


def test_rotation_turns_pairs_by_their_angles(rng):
    """Pairs (i, i + half) as complex numbers, multiplied by e^(i angle)."""
    tokens, heads, head_dim, rotary = 5, 3, 12, 8
    x = random_array(rng, tokens, heads * head_dim)
    angles = rng.uniform(0, 6, (20, rotary // 2))
    positions = rng.integers(0, 20, tokens).astype(np.int32)
    slots = np.arange(tokens, dtype=np.int32)
    pool = np.zeros((2, 2, 4, heads, head_dim), np.float32)
    cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
    q_out, pool_out = REGISTRY["rope_kv_write"].reference(
        x, x, x, positions, slots, cos, sin, None, None, None, None, None, None, pool,
        num_heads=heads, num_kv_heads=heads, head_dim=head_dim, rotary_dim=rotary, eps=0.0,
        norm_after=0,
    )  # fmt: skip
    by_head = x.reshape(tokens, heads, head_dim)
    pairs = by_head[..., :4] + 1j * by_head[..., 4:8]
    turned = pairs * np.exp(1j * angles[positions])[:, None]
    expected = np.concatenate([turned.real, turned.imag, by_head[..., 8:]], axis=-1)
    np.testing.assert_allclose(q_out.reshape(expected.shape), expected, atol=1e-5)
    written = pool_out.transpose(1, 0, 2, 3, 4).reshape(2, 8, heads, head_dim)[:, :tokens]
    np.testing.assert_allclose(written[0], expected, atol=1e-5)
    assert np.array_equal(written[1], by_head)


@pytest.mark.parametrize(("window", "chunked"), [(0, 0), (6, 0), (6, 1)])
def test_attention(rng, window, chunked):
    shape = AttentionShape("f32", "f32", 4, 2, 16, 8, window=window, chunked=chunked)
    history = random_sequence(rng, shape, 21)
    call = attention_call(rng, shape, [(history, 9, 21)])
    q = torch.tensor(history.q.reshape(21, 4, 16)).transpose(0, 1)
    k, v = torch.tensor(history.kv).permute(1, 2, 0, 3).repeat_interleave(2, dim=1)
    distance = torch.arange(21)[:, None] - torch.arange(21)[None, :]
    mask = (distance >= 0) & (distance < (window or 100))
    if chunked:
        chunk = torch.arange(21) // window
        mask = (distance >= 0) & (chunk[:, None] == chunk[None, :])
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(0, 1)
    np.testing.assert_allclose(
        call.reference()["out"], expected.reshape(21, 64)[-9:].numpy(), atol=1e-5
    )


def test_fp8_pool_scales_come_back_out(rng):
    """Writing with scales and reading with them gives the values within half an E4M3 step."""
    k, v = (random_array(rng, 6, 2 * 8, spread=10) for _ in range(2))
    pool = np.zeros((1, 2, 8, 2, 8), np.float32).astype("float8_e4m3fn")
    scales = np.asarray(0.1, np.float32), np.asarray(0.2, np.float32)
    slots = np.arange(6, dtype=np.int32)
    (written,) = REGISTRY["kv_write"].reference(
        k, v, pool, slots, *scales, num_kv_heads=2, head_dim=8
    )
    for index, (values, scale) in enumerate(zip((k, v), scales, strict=True)):
        read = written[0, index, :6].astype(np.float32).reshape(6, 16) * scale
        np.testing.assert_allclose(read, values, rtol=1 / 16, atol=0.01)


def test_collectives_bring_together_what_the_ranks_have(rng):
    parts = [random_array(rng, 3, 8) for _ in range(4)]
    (total,) = REGISTRY["all_reduce"].reference(parts, ranks=4)
    np.testing.assert_allclose(total, np.sum(parts, axis=0, dtype=np.float64), atol=1e-6)
    (whole,) = REGISTRY["all_gather"].reference(parts, ranks=4)
    assert np.array_equal(whole, np.concatenate(parts, axis=1))


def test_a_sum_over_ranks_is_rounded_once():
    """1 + 2^-8 + 2^-8 is a bf16; adding one of them at a time would round both away."""
    parts = [np.array([[value]], np.float32).astype("bfloat16") for value in (1, 2**-8, 2**-8)]
    (total,) = REGISTRY["all_reduce"].reference(parts, ranks=3)
    assert total.dtype == parts[0].dtype
    assert float(total[0, 0]) == 1 + 2**-7


@pytest.mark.parametrize(("out_dtype", "largest"), [("f8e4m3", 448), ("i8", 127)])
def test_quantize_by_rows(rng, out_dtype, largest):
    """As vLLM's per_token_group_quant: the largest of each group becomes the largest code."""
    x = torch.from_numpy(random_array(rng, 5, 64, spread=3))
    x[1, 16:] = 0
    groups = x.reshape(5, 4, 16)
    scales = groups.abs().amax(-1).clamp(min=1e-10) / largest
    expected = groups / scales[..., None]
    if out_dtype == "f8e4m3":
        expected = expected.clamp(-448, 448).to(torch.float8_e4m3fn).float()
    else:
        expected = expected.round()
    codes, found = REGISTRY["quantize"].reference(
        x.numpy(), None, None, out_dtype=out_dtype, scales=4, hadamard=0, codes="none"
    )
    assert np.array_equal(found, scales.numpy())
    assert np.array_equal(codes.astype(np.float32), expected.reshape(5, 64).numpy())
    (values, _) = REGISTRY["quantize"].reference(
        x.numpy(), None, None, out_dtype="f32", scales=4, hadamard=0, codes="f8e4m3"
    )
    assert np.abs(values - x.numpy()).max() <= np.abs(x.numpy()).max() / 28
    assert (values[1, 16:] == 0).all()


@pytest.mark.parametrize("block", [2, 16, 64])
def test_quantize_after_hadamard_matrices(rng, block):
    """Compressed-tensors' matrix, and numbers whose sums are exact."""
    x = rng.integers(-99, 100, (5, 192)).astype(np.float32)
    matrix = deterministic_hadamard_matrix(block, torch.float32).numpy()
    rotated = (x.reshape(-1, block) @ matrix).reshape(5, 192)
    codes, found = REGISTRY["quantize"].reference(
        x, None, None, out_dtype="i8", scales=1, hadamard=block, codes="none"
    )
    scale = np.abs(rotated).max(axis=1, keepdims=True) / np.float32(127)
    np.testing.assert_array_equal(found, scale)
    np.testing.assert_array_equal(codes, np.rint(rotated / scale))
