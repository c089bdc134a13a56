"""Shapes of published models that are no Llamas, with random weights, beside other runtimes.

Names and sizes of the tensors are Transformers' own, of a model without weights; routed experts are
in tensors of their own, as they are released and as other runtimes' converters expect them.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.bench.gpu_shapes import QWEN3_5_9B

_EXPERTS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)")
_ALL: Mapping[str, Any] = {
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
}
"""What all shapes have; ids are those of the bundled tokenizer."""
_TABLES = ("embed_tokens.weight", "lm_head.weight")


@dataclass(frozen=True)
class PublishedShape:
    """A model by its config.json."""

    name: str
    settings: Mapping[str, Any]

    @property
    def vocab(self) -> int:
        return int(self.settings["vocab_size"])

    @property
    def prefill_ops_per_token(self) -> int:
        """Multiplications and additions of the layers' linears, of experts those that a token
        chooses; attention, convolutions and recurrences are not counted."""
        chosen = self.settings.get("num_experts_per_tok", 0) / self.settings.get("num_experts", 1)
        return round(
            sum(
                2 * math.prod(size) * (chosen if ".experts." in name else 1)
                for name, size in self.tensors()
                if len(size) == 2 and not name.endswith(_TABLES)
            )
        )

    def config(self) -> dict[str, Any]:
        """config.json."""
        return dict(self.settings)

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, size) of each, but of an lm_head that is the embeddings."""
        from trtc.quant.reference_model import empty_model, load_config

        with tempfile.TemporaryDirectory() as place:
            (Path(place) / "config.json").write_text(json.dumps(self.config()))
            model = empty_model(load_config(Path(place)))
        for name, tensor in model.named_parameters():
            yield from _as_released(name, tuple(tensor.shape))


def _as_released(name: str, size: tuple[int, ...]) -> Iterator[tuple[str, tuple[int, ...]]]:
    found = _EXPERTS.fullmatch(name)
    if found is None:
        yield name, size
        return
    experts, rows, columns = size
    gated = found[2] == "gate_up_proj"
    for expert in range(experts):
        for one in ("gate_proj", "up_proj") if gated else ("down_proj",):
            yield f"{found[1]}.{expert}.{one}.weight", (rows // 2 if gated else rows, columns)


LFM2_1_2B = PublishedShape(
    "lfm2-1.2b",
    {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "layer_types": [
            "full_attention" if layer in (2, 5, 8, 10, 12, 14) else "conv" for layer in range(16)
        ],
        "conv_L_cache": 3,
        "conv_bias": False,
        "vocab_size": 65536,
        "norm_eps": 1e-5,
        "rope_theta": 1000000.0,
        **_ALL,
    },
)
"""Of LiquidAI/LFM2-1.2B."""
QWEN3_5_2B = PublishedShape(
    "qwen3.5-2b",
    {
        **QWEN3_5_9B,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 16,
        **_ALL,
    },
)
"""As of the text part of Qwen/Qwen3.5-2B: delta nets, and attention in every fourth layer."""
MOE_16 = PublishedShape(
    "moe-16",
    {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_act": "silu",
        "hidden_size": 1536,
        "intermediate_size": 4096,
        "moe_intermediate_size": 1024,
        "num_hidden_layers": 16,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "vocab_size": 65536,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        **_ALL,
    },
)
"""A Qwen3-MoE of 16 experts, of which a token chooses 4."""
