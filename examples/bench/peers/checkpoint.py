"""The checkpoint that every contestant is converted from: a shape, random weights, a tokenizer."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch

TOKENIZER_MODEL = Path(__file__).parents[2] / "models" / "pyllama"
"""Its byte-level BPE; ids beyond it are tokens without a text."""
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


class Shape(Protocol):
    """A model without its weights."""

    @property
    def name(self) -> str: ...
    @property
    def vocab(self) -> int: ...
    @property
    def prefill_ops_per_token(self) -> int:
        """Multiplications and additions of the layers' linears."""
        ...

    def config(self) -> dict[str, Any]:
        """config.json."""
        ...

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, size) of each."""
        ...


@dataclass(frozen=True)
class ModelShape:
    """A Llama; with tied embeddings, as Llama-3.2-1B is, where it is written here."""

    name: str
    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    vocab: int
    head_dim: int = 64

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """(out, in) features of a layer's linears, by their place in the layer."""
        attention, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "self_attn.q_proj": (attention, self.hidden),
            "self_attn.k_proj": (kv, self.hidden),
            "self_attn.v_proj": (kv, self.hidden),
            "self_attn.o_proj": (self.hidden, attention),
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
        }

    @property
    def prefill_ops_per_token(self) -> int:
        """Multiplications and additions of the layers' linears; attention is not counted."""
        return 2 * self.layers * sum(rows * columns for rows, columns in self.linears.values())

    def config(self) -> dict[str, Any]:
        """config.json, in the words that old and new readers of Llama know."""
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_act": "silu",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 4096,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "torch_dtype": "bfloat16",
            "bos_token_id": None,
            "eos_token_id": 0,
            "pad_token_id": 3,
        }

    def tensors(self) -> Iterator[tuple[str, tuple[int, ...]]]:
        """(name, size) of each, layer after layer, but an lm_head."""
        yield "model.embed_tokens.weight", (self.vocab, self.hidden)
        yield "model.norm.weight", (self.hidden,)
        for layer in range(self.layers):
            prefix = f"model.layers.{layer}."
            yield prefix + "input_layernorm.weight", (self.hidden,)
            yield prefix + "post_attention_layernorm.weight", (self.hidden,)
            for name, size in self.linears.items():
                yield f"{prefix}{name}.weight", size


LLAMA_1B = ModelShape("llama-1b", 2048, 8192, 16, 32, 8, 128256)
SMALL = ModelShape("small", 768, 2048, 6, 12, 4, 16384)
"""Large enough that a step is more than overhead, small enough to convert in seconds."""


def random_weight(name: str, size: Sequence[int], generator: "torch.Generator") -> "torch.Tensor":
    """A tensor in bf16, where the generator is; norms are ones. Linears get a variance of
    1 / in_features, so that activations keep their size from layer to layer, as a trained model's
    do, and no quantiser meets a degenerate range."""
    import torch

    where: Any = {"dtype": torch.bfloat16, "device": generator.device}
    if len(size) == 1:
        return torch.ones(size, **where)
    deviation = 0.02 if "embed" in name else math.prod(size[1:]) ** -0.5
    return torch.randn(size, generator=generator, **where) * deviation


@contextmanager
def unfinished(directory: Path) -> Iterator[Path]:
    """An empty directory beside, which becomes `directory` at the end: all of it or nothing."""
    beside = directory.with_name(directory.name + ".unfinished")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    yield beside
    beside.rename(directory)


def write_checkpoint(directory: Path, shape: Shape) -> None:
    """Write bf16 weights, config and tokenizer, all of it or nothing."""
    import torch
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)
    tensors = {name: random_weight(name, size, generator) for name, size in shape.tensors()}
    with unfinished(directory) as place:
        save_file(tensors, place / "model.safetensors", metadata={"format": "pt"})
        (place / "config.json").write_text(json.dumps(shape.config(), indent=1))
        for name in _TOKENIZER_FILES:
            shutil.copy(TOKENIZER_MODEL / name, place)


def write_calibration(path: Path, shape: Shape, windows: int = 8, length: int = 512) -> None:
    """Random tokens, the least that a calibration takes: random weights have no text of theirs."""
    import numpy as np

    ids = np.random.default_rng(1).integers(4, shape.vocab, (windows, length))
    path.write_text("".join(json.dumps({"token_ids": row.tolist()}) + "\n" for row in ids))
