"""Which layers share pages, and what that saves."""

from typing import Any

import pytest

from trtc.builder.cache import cache_layout, default_page_size
from trtc.builder.families.registry import decoder_spec
from trtc.protos.kv import CacheLayout, Full, Window

GEMMA3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "hidden_size": 2560,
    "intermediate_size": 10240,
    "num_hidden_layers": 34,
    "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    "sliding_window": 1024,
}
LONG = 32768


def layout(*, window_groups: bool = True, **fields: Any) -> CacheLayout:
    spec = decoder_spec({**GEMMA3_4B, **fields}, LONG)
    return cache_layout(spec, 16, "bf16", window_groups=window_groups)


def layers_of(kv: CacheLayout) -> list[tuple[int | None, list[int]]]:
    return [
        (window, [entry.layer for entry in group.entries])
        for group, window in zip(kv.groups, kv.windows, strict=True)
    ]


def test_a_group_has_as_many_layers_as_the_rarest_kind() -> None:
    assert layers_of(layout(num_hidden_layers=13)) == [
        (None, [5, 11]),
        (1024, [0, 1]),
        (1024, [2, 3]),
        (1024, [4, 6]),
        (1024, [7, 8]),
        (1024, [9, 10]),
        (1024, [12]),
    ]


def test_every_layer_is_in_one_group() -> None:
    for layers in (1, 5, 6, 11, 34, 48, 62):
        kv = layout(num_hidden_layers=layers)
        assert [place.entry.layer for place in kv.places] == list(range(layers))
        assert len(kv.groups) <= 8


def test_models_of_one_kind_have_one_group() -> None:
    windows = layout(layer_types=["sliding_attention"] * 34)
    assert [group.kind for group in windows.groups] == [Window(tokens=1024)]
    full = layout(layer_types=["full_attention"] * 34)
    assert [group.kind for group in full.groups] == [Full()]
    assert full == layout(window_groups=False)


def test_one_full_layer_among_many_windows_does_not_make_a_table_for_each() -> None:
    kv = layout(layer_types=["full_attention"] + ["sliding_attention"] * 33)
    assert len(kv.groups) <= 8


def test_three_times_the_sequences_of_32k_tokens_in_the_same_bytes() -> None:
    grouped, whole = layout(), layout(window_groups=False)
    pool_bytes = 64 << 30

    def sequences(kv: CacheLayout) -> int:
        return pool_bytes // kv.page_bytes // kv.pages_of_sequence(LONG)

    assert sequences(whole) == 15
    assert sequences(grouped) >= 5 * sequences(whole)


LFM2_350M: dict[str, Any] = {
    "architectures": ["Lfm2ForCausalLM"],
    "vocab_size": 65536,
    "hidden_size": 1024,
    "block_ff_dim": 6656,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 128000,
    "full_attn_idxs": [2, 5, 8, 10, 12, 14],
}


def test_states_of_all_convolutions_are_one_group_and_cost_no_bytes_of_a_page() -> None:
    kv = cache_layout(decoder_spec(LFM2_350M, LONG), 16, "bf16", state_dtype="bf16")
    assert layers_of(kv) == [
        (None, [2, 5, 8, 10, 12, 14]),
        (0, [0, 1, 3, 4, 6, 7, 9, 11, 13, 15]),
    ]
    assert kv.page_bytes == 6 * 2 * 16 * 8 * 64 * 2
    assert kv.pages_of_sequence(LONG) == LONG // 16 + 3


DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "max_position_embeddings": LONG,
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
QWEN3_5_9B: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "vocab_size": 248320,
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 32,
    "max_position_embeddings": 262144,
}


def test_a_delta_net_keeps_a_matrix_of_each_head_and_its_convolutions_columns() -> None:
    kv = cache_layout(decoder_spec(QWEN3_5_9B, LONG), 16, "bf16", state_dtype="bf16")
    columns, matrix = 3 * 8192 * 2, 32 * 128 * 128 * 4
    states = [entry.num_bytes for entry in kv.groups[1].entries]
    assert states == [columns, matrix] * 24
    # A region of tokens has room for the first layer's columns.
    assert kv.page_bytes == 8 * 2 * 16 * 4 * 256 * 2 + 23 * columns + 24 * matrix


@pytest.mark.parametrize(
    ("config", "max_seq_len", "expected"),
    [
        (GEMMA3_4B, LONG, 16),
        (LFM2_350M, LONG, 16),
        (QWEN3_5_9B, LONG, 2048),
        (QWEN3_5_9B, 300, 512),
    ],
)
def test_a_page_is_as_large_as_a_sequences_states(
    config: dict[str, Any], max_seq_len: int, expected: int
) -> None:
    spec = decoder_spec(config, max_seq_len)
    size = default_page_size(spec, "bf16", state_dtype="bf16", max_seq_len=max_seq_len)
    assert size == expected
    kv = cache_layout(spec, size, "bf16", state_dtype="bf16")
    assert kv.states_have_room == (max_seq_len == LONG)


@pytest.mark.parametrize("window", [1, 15, 16, 17, 1024])
def test_what_a_sequence_holds_is_bounded_by_its_window(window: int) -> None:
    kv = layout(layer_types=["sliding_attention"] * 34, sliding_window=window)
    held = [kv.pages_of_sequence(length) for length in range(1, 4096)]
    assert held == sorted(held)
    assert held[0] == 1 and window / 16 <= held[-1] <= window / 16 + 4
    assert kv.longest_sequence(held[-1], LONG) == LONG
    assert kv.longest_sequence(1, LONG) == 16


def test_a_latent_is_one_plane_with_one_vector_a_token() -> None:
    """DeepSeek-V3: 70,272 bytes of bf16 a token, as its paper's 576 elements a layer say."""
    kv = cache_layout(decoder_spec(DEEPSEEK_V3, LONG), 16, "bf16", window_groups=True)
    assert layers_of(kv) == [(None, list(range(61)))]
    assert kv.page_bytes == 16 * 61 * 576 * 2
    assert kv.pool_shape(kv.places[0]) == ("num_pages", 1, 16, 1, 576)
    assert [plane.name for plane in kv.places[0].entry.planes] == ["latent"]


def test_index_keys_lie_beside_the_latents_in_the_same_pages() -> None:
    """A DeepSeek-V3.2 of three layers."""
    fields = {
        **DEEPSEEK_V3,
        "architectures": ["DeepseekV32ForCausalLM"],
        "num_hidden_layers": 3,
    }
    kv = cache_layout(decoder_spec(fields, LONG), 16, "bf16", window_groups=True)
    assert kv.windows == (None,)
    assert kv.page_bytes == 16 * 3 * (576 + 128) * 2
    names = [name for layer in range(3) for name in (f"kv_{layer}", f"kv_{layer}_index")]
    assert [place.name for place in kv.places] == names
    assert kv.pool_shape(kv.places[1]) == ("num_pages", 1, 16, 1, 128)


def test_an_entry_names_the_layers_that_read_it() -> None:
    """A Gemma 4 E2B in small: the last 4 of 10 layers have no keys of their own."""
    config = {
        "architectures": ["Gemma4ForCausalLM"],
        "num_hidden_layers": 10,
        "num_kv_shared_layers": 4,
        "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 2,
    }
    kv = cache_layout(decoder_spec(config, LONG), 16, "bf16")
    readers = {place.entry.layer: place.entry.shared_by for place in kv.places}
    assert readers == {0: (), 1: (), 2: (), 3: (), 4: (9,), 5: (6, 7, 8)}
    widths = [place.entry.planes[0].width for place in kv.places]
    assert widths == [256, 256, 256, 256, 512, 256]
