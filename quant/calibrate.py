"""Quantise a checkpoint with nvidia-modelopt into a unified Hugging Face checkpoint."""

import copy
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trtc.protos.errors import CalibrationError, UnsupportedError
from trtc.protos.manifest import LayerError
from trtc.quant.calibration_text import (
    MIN_TOKENS,
    TOKENIZER_FILE,
    WINDOW,
    TokenSet,
    default_calibration,
    read_texts,
    tokenize,
)
from trtc.quant.evaluation import SELF_SAMPLE_LENGTH, heldout_set
from trtc.quant.experts import STARVED_TOKENS, SeparateExperts, prepare_export, separate_experts
from trtc.quant.layer_error import measure_layers
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import load_config, load_model, sample_sequences
from trtc.quant.scheme import Scheme

Progress = Callable[[str], None]

_COPIED_FILES = (
    TOKENIZER_FILE,
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
)
_MAX_TOKENS = {"max": 32_768, "smoothquant": 32_768, "awq_lite": 8_192}
"""Calibration tokens by algorithm. AWQ tries many scales a linear on all of them; its authors find
that 16 windows do as well as many times more."""
_BATCH = 4
_CALIBRATION_SEED = 1


@dataclass(frozen=True)
class CalibrationFacts:
    """What a quantisation was based on and what it cost."""

    source: str
    """Name of the text's file, `default`, or `model` when the model wrote it itself."""
    sha256: str
    tokens: int
    layers: tuple[LayerError, ...]
    """On held-out text, in the order of the model."""
    starved_experts: tuple[str, ...] = ()
    """Experts that calibration text hardly reached, calibrated on all tokens of their layer."""


def quantize_checkpoint(
    model_dir: Path,
    scheme: Scheme,
    kv_dtype: Literal["f32", "bf16", "f8e4m3"],
    calibration: Path | None,
    output_dir: Path,
    progress: Progress,
) -> CalibrationFacts:
    """Write `model_dir`, quantised by `scheme`, as a unified Hugging Face checkpoint.

    The same inputs give the same bytes. The lm_head, embeddings, norms and routers stay bf16.

    Args:
        scheme: one that names a modelopt config.
        kv_dtype: f8e4m3 adds scales for an FP8 KV cache.
        calibration: .jsonl or text; None for the text that ships with trtc.
        output_dir: made if absent; its files are overwritten.

    Raises:
        UnsupportedError: a model that the scheme cannot quantise, with the linear's name.
        CalibrationError: text that is too small or unreadable.
        CheckpointError: a damaged checkpoint.
    """
    if scheme.modelopt is None:
        raise UnsupportedError(
            f"{scheme.name} has nothing to calibrate",
            field="--dtype",
            remedy="Use fp8, int8_sq, int4_awq or w4a8_awq",
        )
    check_quantizable(model_dir, scheme)
    # Read before any work, so that a bad file costs no time.
    texts = default_calibration() if calibration is None else read_texts(calibration)
    progress("loading the checkpoint")
    model = load_model(model_dir, "bfloat16")
    facts = model.config.get_text_config()
    experts = separate_experts(model)
    config = _modelopt_config(scheme, kv_dtype)
    window = min(WINDOW, facts.max_position_embeddings)
    tokens = _calibration_set(model, model_dir, texts, window, _MAX_TOKENS[_method(config)])
    heldout = heldout_set(model_dir, facts.vocab_size, window, model=model)
    starved = _find_starved(model, experts, tokens)
    progress(f"calibrating {scheme.name} on {tokens.num_tokens} tokens")
    with quiet_libraries():
        _calibrate(model, config, tokens, experts)
    progress("measuring every layer on held-out text")
    layers = measure_layers(model, heldout.sequences)
    progress("writing the quantised checkpoint")
    with quiet_libraries():
        _export(model, output_dir)
    _copy_files(model_dir, output_dir)
    return CalibrationFacts(tokens.source, tokens.sha256, tokens.num_tokens, layers, starved)


def check_quantizable(model_dir: Path, scheme: Scheme) -> None:
    """Refuse a model whose linears do not fit the scheme, before weights are read.

    Raises:
        UnsupportedError: names the linear and its size.
        CheckpointError: unreadable config.json.
    """
    import torch
    import transformers

    config = load_config(model_dir)
    with quiet_libraries(), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    separate_experts(model)
    for name, linear in _quantized_linears(model):
        group = scheme.group_size
        if group is not None and linear.in_features % group:
            raise UnsupportedError(
                f"has {linear.in_features} input features, no multiple of {scheme.name}'s group "
                f"of {group}",
                field=name,
                remedy="Use --dtype fp8 or int8_sq, which take any size",
            )
        if group is not None and linear.out_features % 2:
            raise UnsupportedError(
                f"has {linear.out_features} output features; 4-bit rows are stored in pairs",
                field=name,
                remedy="Use --dtype fp8 or int8_sq, which take any size",
            )


def _quantized_linears(model: Any) -> Iterator[tuple[str, Any]]:
    from torch import nn

    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and "layers." in name:
            yield name, module


def _modelopt_config(scheme: Scheme, kv_dtype: str) -> dict[str, Any]:
    """modelopt's config: the last rule that matches a quantiser wins."""
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        assert scheme.modelopt is not None
        config: dict[str, Any] = copy.deepcopy(getattr(mtq, scheme.modelopt))
        if kv_dtype == "f8e4m3":
            kv = copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, kv)
    config["quant_cfg"] += [
        {"quantizer_name": pattern, "enable": False}
        for pattern in ("*lm_head*", "*router*", "*mlp.gate.*", "*block_sparse_moe.gate.*")
    ]
    return config


def _method(config: dict[str, Any]) -> str:
    algorithm = config["algorithm"]
    return str(algorithm["method"] if isinstance(algorithm, dict) else algorithm)


def _calibration_set(
    model: Any, model_dir: Path, texts: Any, window: int, max_tokens: int
) -> TokenSet:
    if texts.source == "default" and not (model_dir / TOKENIZER_FILE).is_file():
        length = min(window, SELF_SAMPLE_LENGTH)
        count = 2 * MIN_TOKENS // length
        return sample_sequences(model, count=count, length=length, seed=_CALIBRATION_SEED)
    return tokenize(
        texts,
        model_dir,
        model.config.get_text_config().vocab_size,
        window=window,
        max_tokens=max_tokens,
        min_tokens=MIN_TOKENS,
    )


def run_decoder(model: Any, tokens: TokenSet) -> None:
    """Run the windows through the model without its lm_head, which nobody calibrates."""
    import torch

    for begin in range(0, len(tokens.sequences), _BATCH):
        ids = torch.from_numpy(np.stack(tokens.sequences[begin : begin + _BATCH]).astype(np.int64))
        with torch.inference_mode():
            model.base_model(ids, use_cache=False)


def _find_starved(
    model: Any, experts: tuple[SeparateExperts, ...], tokens: TokenSet
) -> tuple[str, ...]:
    """Mark the experts that the text hardly reaches, and name them."""
    if not experts:
        return ()
    for layer in experts:
        layer.collecting = True
    run_decoder(model, tokens)
    names = {id(module): name for name, module in model.named_modules()}
    starved = []
    for layer in experts:
        layer.collecting = False
        layer.starved = frozenset(
            i for i, seen in enumerate(layer.tokens_seen) if seen < STARVED_TOKENS
        )
        starved += [f"{names[id(layer)]}.{i}" for i in sorted(layer.starved)]
    return tuple(starved)


def _calibrate(
    model: Any, config: dict[str, Any], tokens: TokenSet, experts: tuple[SeparateExperts, ...]
) -> None:
    import modelopt.torch.quantization as mtq
    from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

    for layer in experts:
        layer.collecting = True
    mtq.quantize(model, config, lambda quantized: run_decoder(quantized, tokens))
    for layer in experts:
        layer.collecting = False
    _check_scales(model)
    # The export does this too: once done, what is measured is what is shipped.
    requantize_resmooth_fused_llm_layers(model)


def _check_scales(model: Any) -> None:
    """A scale of zero or infinity comes from activations that calibration never saw, or NaN."""
    import torch

    for name, module in model.named_modules():
        amax = getattr(module, "amax", None) if "quantizer" in name else None
        if not isinstance(amax, torch.Tensor) or not getattr(module, "is_enabled", False):
            continue
        if "weight_quantizer" not in name and not bool((amax > 0).all() & amax.isfinite().all()):
            raise CalibrationError(
                f"the largest activation seen is {amax.max().item()}",
                field=name.rpartition(".")[0],
                remedy="The checkpoint gives NaN or dead activations there; use --dtype bf16",
            )


def _export(model: Any, output_dir: Path) -> None:
    import torch
    from modelopt.torch.export import export_hf_checkpoint

    output_dir.mkdir(parents=True, exist_ok=True)
    prepare_export()
    with torch.inference_mode():
        export_hf_checkpoint(model, export_dir=output_dir)
    for file in output_dir.iterdir():
        file.chmod(0o644)  # safetensors writes them for the owner alone


def _copy_files(model_dir: Path, output_dir: Path) -> None:
    (output_dir / "generation_config.json").unlink(missing_ok=True)
    for name in _COPIED_FILES:
        if (model_dir / name).is_file():
            shutil.copyfile(model_dir / name, output_dir / name)
