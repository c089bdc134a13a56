"""Checkpoints of a shape for vLLM: a configuration alone."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATIC_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}


def write_configuration(
    directory: Path, config: Mapping[str, Any], quantization: Mapping[str, Any] | None = None
) -> Path:
    """What vLLM needs to run a shape whose weights it draws."""
    directory.mkdir(parents=True, exist_ok=True)
    document = dict(config)
    if config["model_type"] == "llama":
        document["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    if quantization is not None:
        document["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(document))
    return directory
