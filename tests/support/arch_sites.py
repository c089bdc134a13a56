"""A small site of every operator that is lowered for a GPU, to compile for each SM."""

from collections.abc import Callable, Mapping
from typing import Any

from tests.support.compiled import LIMITS, PAGE_SIZE
from trtc.plugins.gpu.lowering import Site
from trtc.plugins.registry import REGISTRY

WIDTH, HEADS, KV_HEADS, HEAD_DIM = 256, 4, 2, 64
_STATE_DIM = 32
"""Of keys and of values of delta nets, and of Mamba-2."""
RANK, LATENT = 64, 128
"""Of latent attention; test_latent.py has those of published models."""
_HEADS: dict[str, int] = {"num_heads": HEADS, "num_kv_heads": KV_HEADS, "head_dim": HEAD_DIM}

MakeSite = Callable[[int, str], Site]
"""(SM, type of what is quantised: f8e4m3, or i8 where an SM has none) -> site."""


def _site(
    op: str, axes: Mapping[str, int], dtypes: Mapping[str, str], **attributes: Any
) -> MakeSite:
    def make(sm: int, quantised: str) -> Site:
        types = {name: quantised if dtype == "q" else dtype for name, dtype in dtypes.items()}
        given = {
            name: {"q": quantised, "dynamic_q": f"dynamic_{quantised}"}.get(value, value)
            for name, value in attributes.items()
        }
        complete = REGISTRY[op].complete_attributes(given)
        static = {name: value for name, value in complete.items() if isinstance(value, int)}
        # Scales of rows are a tensor of their own, without gaps.
        scales = {name: max(1, static.get("scales", 1)) for name in types if name == "row_scale"}
        return Site(
            dtypes=types,
            strides=dict.fromkeys(types, max({**static, **axes}.values())) | scales,
            axes={
                "stored_width": HEAD_DIM,
                **static,
                **axes,
            },  # of a pool's heads, which have no scales
            attributes=complete,
            rows="tokens",
            page_size=PAGE_SIZE,
            limits=LIMITS,
            sm=sm,
        )

    return make


def _bf16(*names: str) -> dict[str, str]:
    return dict.fromkeys(names, "bf16")


_SCALED = {"out_scale": "f32", "out": "q"}
_BY_ROW = {"row_scale": "f32", "out": "bf16"}
_WEIGHT = {"weight": "i4", "weight_scale": "f32"}
_SPLIT = {"weight_dtype": "i6", "group_size": 128, "layout": "split"}
_TILES = {"weight_dtype": "i4", "group_size": 128, "layout": "tiles"}
SITES: Mapping[str, tuple[MakeSite, ...]] = {
    "add": (_site("add", {"K": WIDTH}, {"factor": "f32"} | _bf16("x", "y", "out")),),
    "all_gather": (_site("all_gather", {"K": WIDTH}, _bf16("x", "out"), ranks=2),),
    "all_reduce": (_site("all_reduce", {"K": WIDTH}, _bf16("x", "out"), ranks=2),),
    "causal_conv": (
        _site(
            "causal_conv",
            {"channels": WIDTH, "columns": 3},
            dict.fromkeys(("query_start", "context_lens", "page_table", "slots"), "i32")
            | {"weight": "f32", "bias": "f32"}
            | _bf16("x", "state", "out", "state_out"),
            page_size=PAGE_SIZE,
        ),
    ),
    "embedding": (
        _site(
            "embedding",
            {},
            {"token_ids": "i32"} | _bf16("table", "out"),
            V=64,
            H=WIDTH,
            weight_dtype="bf16",
            out_dtype="bf16",
        ),
        _site(
            "embedding",
            {},
            {"token_ids": "i32", "table": "u8", "table_scale": "f32"} | _bf16("out"),
            V=64,
            H=WIDTH,
            out_dtype="bf16",
            **_SPLIT,
        ),
    ),
    "fused_linear": (
        _site(
            "fused_linear",
            {"N": 2 * WIDTH, "K": WIDTH, "I": WIDTH},
            {"norm_weight": "f32"} | _bf16("x", "out") | _WEIGHT,
            I=WIDTH,
            group_size=128,
            weight_dtype="i4",
            gated=1,
        ),
    ),
    "gated_delta": tuple(
        _site(
            "gated_delta",
            {"channels": 4 * _STATE_DIM},
            dict.fromkeys(("query_start", "context_lens", "page_table", "slots"), "i32")
            | dict.fromkeys(("state", "rate", "dt_bias", "norm", "state_out"), "f32")
            | _bf16("qkv", "z", "b", "a")
            | scales,
            key_heads=1,
            key_dim=_STATE_DIM,
            value_heads=2,
            value_dim=_STATE_DIM,
            decays=decays,
            write_scale=2.0,
            gate=gate,
            eps=1e-6,
            page_size=PAGE_SIZE,
            out_dtype=scales["out"],
        )
        for decays, gate, scales in (
            (1, "silu", _bf16("out")),
            (_STATE_DIM, "sigmoid", _bf16("out")),
            (1, "silu", {"pre_scale": "f32", **_SCALED}),
        )
    ),
    "gated_linear": (
        _site(
            "gated_linear",
            {"N": 2 * WIDTH, "K": WIDTH, "I": WIDTH},
            _bf16("x", "weight", "out"),
            I=WIDTH,
            weight_dtype="bf16",
            activation="silu",
        ),
    ),
    "gather_columns": (
        _site(
            "gather_columns", {"K": WIDTH, "N": WIDTH // 2}, {"columns": "i32"} | _bf16("x", "out")
        ),
    ),
    "gather_rows": (_site("gather_rows", {"K": WIDTH}, {"rows": "i32"} | _bf16("x", "out")),),
    "head_linear": (
        _site(
            "head_linear",
            {"num_heads": HEADS, "N": 512, "K": 128},
            _bf16("x", "weight", "out"),
            in_dim=192,
            out_dim=576,
        ),
    ),
    "expanded_latent_attention": (
        _site(
            "expanded_latent_attention",
            {"width": LATENT, "rank": RANK, "nope": 64, "value_dim": 64},
            dict.fromkeys(("query_start", "context_lens", "page_table"), "i32")
            | _bf16("attended", "q", "pool", "keys", "values", "out"),
            num_heads=HEADS,
            head_dim=128,
            scale=0.07,
            least_new=128,
            room=1024,
        ),
    ),
    "index_write": (
        _site(
            "index_write",
            {"width": 128, "rotary_half": 32},
            {"positions": "i32", "slots": "i32"}
            | dict.fromkeys(("cos", "sin", "norm", "bias"), "f32")
            | _bf16("q", "k", "q_out", "pool", "pool_out"),
            num_heads=HEADS,
            eps=1e-6,
        ),
    ),
    "latent_attention": (
        _site(
            "latent_attention",
            {"width": LATENT},
            dict.fromkeys(("query_start", "context_lens", "page_table"), "i32")
            | _bf16("q", "pool", "out"),
            num_heads=HEADS,
            rank=RANK,
            scale=0.07,
        ),
        _site(
            "latent_attention",
            {"width": LATENT, "top_k": 64},
            dict.fromkeys(("query_start", "context_lens", "page_table", "selected"), "i32")
            | _bf16("q", "pool", "out"),
            num_heads=HEADS,
            rank=RANK,
            scale=0.07,
        ),
    ),
    "latent_kv_write": (
        _site(
            "latent_kv_write",
            {"width": LATENT, "rank": RANK, "rotary_half": 32},
            {"positions": "i32", "slots": "i32", "cos": "f32", "sin": "f32", "norm": "f32"}
            | _bf16("q", "kv", "q_out", "pool", "pool_out"),
            num_heads=HEADS,
            head_dim=128,
            eps=1e-6,
        ),
    ),
    "linear": (
        _site(
            "linear",
            {"N": WIDTH, "K": WIDTH},
            _bf16("x", "weight", "out"),
            N=WIDTH,
            weight_dtype="bf16",
            out_dtype="bf16",
        ),
        _site(
            "linear",
            {"N": WIDTH, "K": WIDTH},
            _bf16("x", "out") | _WEIGHT,
            N=WIDTH,
            out_dtype="bf16",
            **_TILES,
        ),
        _site(
            "linear",
            {"N": WIDTH, "K": WIDTH},
            {"weight": "u8", "weight_scale": "f32"} | _bf16("x", "out"),
            N=WIDTH,
            out_dtype="bf16",
            **_SPLIT,
        ),
        *(
            _site(
                "linear",
                {"N": WIDTH, "K": WIDTH},
                {"weight": "f4e2m1", "weight_scale": "u8"} | unit | _bf16("x", "out"),
                N=WIDTH,
                out_dtype="bf16",
                weight_dtype="f4e2m1",
                group_size=group,
                layout=layout,
            )
            for group, layout, unit in ((32, "tiles", {}), (16, "row_major", {"scale_unit": "f32"}))
        ),
        _site(
            "linear",
            {"N": WIDTH, "K": WIDTH},
            {"x": "q", "weight": "q", "weight_scale": "f32", "input_scale": "f32", "out": "f32"},
            N=WIDTH,
            weight_dtype="q",
            out_dtype="f32",
        ),
        _site(
            "linear",
            {"N": WIDTH, "K": WIDTH, "scales": 1},
            {"x": "q", "weight": "q", "weight_scale": "f32"} | _BY_ROW,
            N=WIDTH,
            weight_dtype="q",
            out_dtype="bf16",
        ),
    ),
    "mamba1": (
        _site(
            "mamba1",
            {"channels": 4 * HEAD_DIM},
            dict.fromkeys(("query_start", "context_lens", "page_table", "slots"), "i32")
            | dict.fromkeys(("state", "rate", "dt_bias", "skip", "state_out"), "f32")
            | _bf16("x", "z", "dt", "b", "c", "out"),
            channels=4 * HEAD_DIM,
            state_size=16,
            page_size=PAGE_SIZE,
        ),
    ),
    "mamba2": (
        *(
            _site(
                "mamba2",
                {"channels": 4 * _STATE_DIM},
                dict.fromkeys(("query_start", "context_lens", "page_table", "slots"), "i32")
                | dict.fromkeys(("state", "rate", "dt_bias", "skip", "state_out", norm), "f32")
                | _bf16("xbc", "z", "dt", "out"),
                heads=2,
                head_dim=_STATE_DIM,
                groups=1,
                state_size=_STATE_DIM,
                eps=1e-6,
                page_size=PAGE_SIZE,
            )
            for norm in ("norm", "squares")
        ),
    ),
    "moe": (
        _site(
            "moe",
            {"E": 8, "L": 8, "H": WIDTH, "I": WIDTH},
            _bf16("x", "gate_up", "down", "out") | {"router_logits": "f32"},
            I=WIDTH,
            top_k=2,
            renormalize=1,
            activation="silu",
            weight_dtype="bf16",
            out_dtype="bf16",
        ),
        _site(
            "moe",
            {"E": 8, "L": 4, "H": WIDTH, "I": WIDTH, "GH": 1, "GI": 1},
            _bf16("x", "out")
            | {"gate_up": "q", "down": "q", "router_logits": "f32", "expert_map": "i32"}
            | {"gate_up_order": "i32"}
            | {"gate_up_scale": "f32", "down_scale": "f32"},
            I=WIDTH,
            top_k=2,
            renormalize=1,
            activation="silu",
            weight_dtype="q",
            act_quant="dynamic_q",
            hadamard=64,
            out_dtype="bf16",
        ),
        _site(
            "moe",
            {"E": 8, "L": 8, "H": WIDTH, "I": WIDTH},
            _bf16("x", "out")
            | {"gate_up": "f4e2m1", "down": "f4e2m1", "router_logits": "f32"}
            | {"gate_up_scale": "u8", "down_scale": "u8"}
            | {"gate_up_scale_unit": "f32", "down_scale_unit": "f32"},
            I=WIDTH,
            top_k=2,
            renormalize=1,
            activation="silu",
            weight_dtype="f4e2m1",
            group_size=16,
            out_dtype="bf16",
        ),
    ),
    "paged_attention": (
        _site(
            "paged_attention",
            _HEADS,
            {**dict.fromkeys(("query_start", "context_lens", "page_table"), "i32")}
            | _bf16("q", "pool", "out"),
            **_HEADS,
            scale=0.125,
            out_dtype="bf16",
        ),
    ),
    "quantize": (
        _site("quantize", {"K": WIDTH}, {"x": "bf16"} | _SCALED, out_dtype="q"),
        _site(
            "quantize",
            {"K": WIDTH},
            {"x": "bf16", "out": "q", "row_scale": "f32"},
            out_dtype="q",
            scales=2,
            hadamard=64,
        ),
    ),
    "rms_norm": (
        _site(
            "rms_norm",
            {"K": WIDTH},
            {"x": "bf16", "weight": "f32"} | _SCALED,
            eps=1e-5,
            out_dtype="q",
        ),
        _site(
            "rms_norm",
            {"K": WIDTH},
            {"x": "bf16", "weight": "f32", "bias": "f32"} | _SCALED,
            eps=1e-5,
            centered=1,
            out_dtype="q",
        ),
        _site(
            "rms_norm",
            {"K": WIDTH},
            {"x": "bf16", "weight": "f32", "out": "q", "row_scale": "f32", "normed": "bf16"},
            eps=1e-5,
            scales=1,
            hadamard=64,
            out_dtype="q",
        ),
    ),
    "rms_scale": (
        _site(
            "rms_scale",
            {"K": WIDTH},
            {"squares": "f32", "weight": "f32"} | _bf16("x", "out"),
            width=2 * WIDTH,
            eps=1e-5,
        ),
    ),
    "layer_inputs": (
        _site(
            "layer_inputs",
            {"K": 3 * WIDTH, "V": 64},
            {"token_ids": "i32", "norm": "f32"} | _bf16("projected", "table", "out"),
            width=WIDTH,
            eps=1e-6,
            table_scale=16.0,
            scale=0.75,
        ),
    ),
    "rope": (
        _site(
            "rope",
            {"num_heads": 4, "head_dim": HEAD_DIM},
            {"positions": "i32", "cos": "f32", "sin": "f32", "q_norm": "f32"} | _bf16("q", "out"),
            num_heads=4,
            head_dim=HEAD_DIM,
            rotary_dim=HEAD_DIM,
        ),
    ),
    "rope_kv_write": (
        _site(
            "rope_kv_write",
            _HEADS,
            {"positions": "i32", "slots": "i32", "cos": "f32", "sin": "f32", "v_norm": "f32"}
            | _bf16("q", "k", "v", "q_out", "pool", "pool_out"),
            **_HEADS,
            rotary_dim=HEAD_DIM,
        ),
    ),
    "select_tokens": (
        _site(
            "select_tokens",
            {"width": 128},
            dict.fromkeys(("query_start", "context_lens", "page_table", "selected"), "i32")
            | {"weights": "f32"}
            | _bf16("q", "pool"),
            num_heads=HEADS,
            top_k=64,
            max_context=128,
        ),
    ),
    "short_conv": (
        _site(
            "short_conv",
            {"channels": WIDTH, "columns": 2},
            dict.fromkeys(("query_start", "context_lens", "page_table", "slots"), "i32")
            | {"weight": "f32", "bias": "f32"}
            | _bf16("gated", "state", "out", "state_out"),
            page_size=PAGE_SIZE,
        ),
    ),
    "swiglu": (
        _site(
            "swiglu", {"I": WIDTH}, _bf16("gate", "up") | _SCALED, out_dtype="q", activation="silu"
        ),
        _site("swiglu", {"I": WIDTH}, _bf16("gate") | _SCALED, out_dtype="q", activation="relu2"),
        _site(
            "swiglu",
            {"I": WIDTH},
            _bf16("gate", "up") | {"out": "q", "row_scale": "f32"},
            out_dtype="q",
            activation="silu",
            scales=2,
            hadamard=64,
        ),
    ),
}
