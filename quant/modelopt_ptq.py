"""The border to nvidia-modelopt: its config, calibration and export, made quiet and checked."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

from trtc.protos.errors import CalibrationError, UnsupportedError
from trtc.protos.progress import Progress, Step
from trtc.quant import nvfp4
from trtc.quant.awq import Forward, with_fast_search
from trtc.quant.calibration_text import TokenSet
from trtc.quant.device import device_of
from trtc.quant.experts import STARVED_TOKENS, SeparateExperts, prepare_export, separate_experts
from trtc.quant.keep import kept_linears
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import load_config
from trtc.quant.scheme import Scheme
from trtc.quant.wide_linears import wide_linears

_BATCH = 4
_BAD_WEIGHTS = "The checkpoint is damaged there, or dead; check it in bf16 first"
_E2M1_BITS = (2, 1)
_NEVER_QUANTIZED = ("*lm_head*", "*router*", "*mlp.gate.*", "*block_sparse_moe.gate.*")


def check_quantizable(model_dir: Path, scheme: Scheme, keep: Sequence[str] = ()) -> tuple[str, ...]:
    """Refuse a model whose linears do not fit the scheme, before weights are read.

    Args:
        keep: globs of linears that stay unquantised.

    Returns:
        The linears that stay unquantised.

    Raises:
        RequestError: a glob that names no linear.
        UnsupportedError: names the linear and its size.
        CheckpointError: unreadable config.json.
    """
    config = load_config(model_dir)
    with quiet_libraries(), torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    separate_experts(model)
    kept = kept_linears(keep, [name for name, _ in _quantized_linears(model)])
    group = scheme.group_size
    if group is None:
        return kept
    remedy = "Use --dtype fp8 or int8_sq, which take any size"
    for name, linear in _quantized_linears(model):
        if name in kept:
            continue
        if linear.in_features % group:
            raise UnsupportedError(
                f"has {linear.in_features} input features, no multiple of {scheme.name}'s group "
                f"of {group}",
                field=name,
                remedy=remedy,
            )
        if linear.out_features % 2 and scheme.weight in ("i4", "i4_f8"):
            raise UnsupportedError(
                f"has {linear.out_features} output features; 4-bit rows are stored in pairs",
                field=name,
                remedy=remedy,
            )
    return kept


def _quantized_linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    for name, module in model.named_modules():
        is_linear = isinstance(module, nn.Linear) and "layers." in name
        if is_linear and not any(fnmatchcase(f"{name}.", rule) for rule in _NEVER_QUANTIZED):
            yield name, module


def modelopt_config(scheme: Scheme, kv_dtype: str, kept: Sequence[str] = ()) -> dict[str, Any]:
    """modelopt's config: the last rule that matches a quantiser wins.

    Args:
        kept: names of linears that stay unquantised.
    """
    assert scheme.modelopt is not None
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        config: dict[str, Any] = copy.deepcopy(getattr(mtq, scheme.modelopt))
        if kv_dtype == "f8e4m3":
            kv = copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, kv)
        if scheme.weight == "f4e2m1":
            _round_anywhere(config)
    config["quant_cfg"] += [
        {"quantizer_name": pattern, "enable": False}
        for pattern in (*_NEVER_QUANTIZED, *(f"{name}.*" for name in kept))
    ]
    return config


def _round_anywhere(config: dict[str, Any]) -> None:
    """Let NVFP4 quantisers call ours: modelopt's own kernel needs a GPU."""
    from modelopt.torch.quantization.nn.modules import tensor_quantizer

    if not tensor_quantizer.is_registered_quant_backend(nvfp4.BACKEND):
        tensor_quantizer.register_quant_backend(nvfp4.BACKEND, nvfp4.fake_quantize)
    for rule in config["quant_cfg"]:
        if rule.get("cfg", {}).get("num_bits") == _E2M1_BITS:
            rule["cfg"]["backend"] = nvfp4.BACKEND


def method_of(config: dict[str, Any]) -> str:
    """max, smoothquant or awq_lite."""
    algorithm = config["algorithm"]
    return str(algorithm["method"] if isinstance(algorithm, dict) else algorithm)


def run_decoder(model: Any, tokens: TokenSet, batch: int = _BATCH) -> None:
    """Run the windows through the model without its lm_head, which nobody calibrates."""
    for begin in range(0, len(tokens.sequences), batch):
        ids = torch.from_numpy(np.stack(tokens.sequences[begin : begin + batch]).astype(np.int64))
        with torch.inference_mode(), wide_linears():
            model.base_model(ids.to(device_of(model)), use_cache=False)


def mark_starved(
    model: nn.Module, experts: tuple[SeparateExperts, ...], tokens: TokenSet
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


def calibrate(
    model: Any,
    config: dict[str, Any],
    tokens: TokenSet,
    experts: tuple[SeparateExperts, ...],
    phase: str,
    report: Progress,
) -> None:
    """Quantise `model` in place: what it computes from now on is what the export will hold.

    Raises:
        CalibrationError: activations that are NaN, infinite or always zero.
    """
    with quiet_libraries():
        import modelopt.torch.quantization as mtq
        from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

        guards = [
            linear.register_forward_pre_hook(_Guard(name))
            for name, linear in _quantized_linears(model)
        ]
        for layer in experts:
            layer.collecting = True
        with _counting_layers(model, _num_batches(config, tokens), phase, report):
            mtq.quantize(model, config, _forward_loop(config, tokens))
        for layer in experts:
            layer.collecting = False
        for guard in guards:
            guard.remove()
        _check_scales(model)
        # The export does this too: once done, what is measured is what is shipped.
        requantize_resmooth_fused_llm_layers(model)


@contextmanager
def _counting_layers(model: Any, batches: int, phase: str, report: Progress) -> Iterator[None]:
    """Progress each decoder layer that a batch has gone through."""
    total = batches * len(model.base_model.layers)
    done = itertools.count(1)

    def count(*_: Any) -> None:
        report(Step(phase, min(next(done), total), total, "layers"))

    report(Step(phase, 0, total, "layers"))
    hooks = [layer.register_forward_hook(count) for layer in model.base_model.layers]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _num_batches(config: dict[str, Any], tokens: TokenSet) -> int:
    """How often calibration runs the decoder."""
    batches = -(-len(tokens.sequences) // _BATCH)
    return batches + 1 if method_of(config) == "awq_lite" else batches


def _forward_loop(config: dict[str, Any], tokens: TokenSet) -> Forward:
    def run(model: Any) -> None:
        run_decoder(model, tokens)

    def run_at_once(model: Any) -> None:
        run_decoder(model, tokens, batch=len(tokens.sequences))

    return with_fast_search(run, run_at_once) if method_of(config) == "awq_lite" else run


class _Guard:
    """A hook that names the first linear to get NaN or infinity, before modelopt chokes on it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __call__(self, linear: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        if not bool(inputs[0].isfinite().all()):
            raise CalibrationError(
                "gets activations that are not finite", field=self._name, remedy=_BAD_WEIGHTS
            )


def _check_scales(model: nn.Module) -> None:
    """A scale of zero comes from activations that are always zero: nothing can be divided by it."""
    for name, module in model.named_modules():
        amax = getattr(module, "amax", None) if "quantizer" in name else None
        if not isinstance(amax, torch.Tensor) or not getattr(module, "is_enabled", False):
            continue
        if "weight_quantizer" not in name and not bool((amax > 0).all() & amax.isfinite().all()):
            raise CalibrationError(
                f"the largest activation seen is {amax.max().item()}",
                field=name.rpartition(".")[0],
                remedy=_BAD_WEIGHTS,
            )


def export(model: Any, output_dir: Path) -> None:
    """Write a calibrated model as a unified Hugging Face checkpoint."""
    with quiet_libraries():
        from modelopt.torch.export import export_hf_checkpoint

        prepare_export()
        with torch.inference_mode():
            export_hf_checkpoint(model, export_dir=output_dir)
    for file in output_dir.iterdir():
        file.chmod(0o644)  # safetensors writes them for the owner alone
