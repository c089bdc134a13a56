"""Calibration by nvidia-modelopt: its config, calibration and export, silenced and checked."""

import copy
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trtc.protos.errors import CalibrationError
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Progress, Step
from trtc.quant import nvfp4
from trtc.quant.awq import Forward, with_fast_search
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import TokenSet
from trtc.quant.experts import SeparateExperts, own_factors, prepare_export
from trtc.quant.joined_convolutions import split_convolutions
from trtc.quant.layer_error import measure_layers
from trtc.quant.layer_source import LayerSource
from trtc.quant.layerwise import run_text
from trtc.quant.linears import BATCH, NEVER_QUANTIZED, quantizable_linears, run_decoder
from trtc.quant.quiet import quiet_libraries
from trtc.quant.scheme import Modelopt, Scheme
from trtc.quant.shared_norms import norms_kept_for_others

_MAX_TOKENS = {"max": 16_384, "smoothquant": 16_384, "awq_lite": 8_192}
"""Calibration tokens by algorithm. AWQ tries many scales a linear on all of them; its authors find
that 16 windows do as well as many times more."""
_BAD_WEIGHTS = "The checkpoint is damaged there, or dead; check it in bf16 first"
_E2M1_BITS = (2, 1)
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class ModeloptCalibrator:
    """What nvidia-modelopt does for one scheme: see quant/calibration.py."""

    scheme: Scheme
    kv_dtype: str
    kept: tuple[str, ...]
    """Names of linears that stay unquantised."""

    @property
    def by_layer(self) -> bool:
        return False

    def work_bytes(self, model_dir: Path) -> int:
        return 0

    @property
    def max_tokens(self) -> int:
        return _MAX_TOKENS[method_of(self._config())]

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        experts = tuple(m for m in job.model.modules() if isinstance(m, SeparateExperts))
        calibrate(job.model, self._config(), job.tokens, experts, job.phase, job.progress)
        layers = measure_layers(job.model, job.heldout.sequences, job.progress)
        job.progress(Step("writing the quantised checkpoint"))
        export(job.model, job.output_dir)
        return layers

    def _config(self) -> dict[str, Any]:
        return modelopt_config(self.scheme, self.kv_dtype, self.kept)


def modelopt_config(scheme: Scheme, kv_dtype: str, kept: Sequence[str] = ()) -> dict[str, Any]:
    """modelopt's config: the last rule that matches a quantiser wins.

    Args:
        scheme: one that modelopt calibrates.
        kept: names of linears that stay unquantised.
    """
    assert isinstance(scheme.calibration, Modelopt)
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        config: dict[str, Any] = copy.deepcopy(getattr(mtq, scheme.calibration.config))
        if kv_dtype == "f8e4m3":
            kv = copy.deepcopy(mtq.FP8_KV_CFG["quant_cfg"])
            config = mtq.update_quant_cfg_with_kv_cache_quant(config, kv)
        if scheme.weight == "f4e2m1":
            _round_anywhere(config)
    config["quant_cfg"] += [
        {"quantizer_name": pattern, "enable": False}
        for pattern in (*NEVER_QUANTIZED, *(f"{name}.*" for name in kept))
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
            for name, linear in quantizable_linears(model)
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
        with norms_kept_for_others(model), own_factors():
            requantize_resmooth_fused_llm_layers(model)


def kv_scales(source: LayerSource, tokens: TokenSet) -> dict[str, float]:
    """Scales of an FP8 KV cache as checkpoints store them: `LAYER.self_attn.k_scale` and `v_scale`.

    As in modelopt's own exports they are at least 1: E4M3 is as precise for small numbers.

    Args:
        source: its model is quantised in place, its KV cache alone.
    """
    model = source.model
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        rules = [{"quantizer_name": "*", "enable": False}, *mtq.FP8_KV_CFG["quant_cfg"]]
        config = {"quant_cfg": rules, "algorithm": "max"}
        mtq.quantize(model, config, lambda model: run_text(source, tokens))
        _check_scales(model)
    return {
        f"{name}.{kind}_scale": max(1.0, float(quantizer.amax) / _E4M3_MAX)
        for name, module in model.named_modules()
        for kind in "kv"
        if (quantizer := getattr(module, f"{kind}_bmm_quantizer", None)) is not None
    }


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
    batches = -(-len(tokens.sequences) // BATCH)
    return batches + 1 if method_of(config) == "awq_lite" else batches


def _forward_loop(config: dict[str, Any], tokens: TokenSet) -> Forward:
    def run(model: Any) -> None:
        run_decoder(model, tokens)

    def run_at_once(model: Any) -> None:
        run_decoder(model, tokens, batch=len(tokens.sequences))

    return with_fast_search(run, run_at_once) if method_of(config) == "awq_lite" else run


class _Guard:
    """A hook that raises for the first linear whose input is NaN or infinite, which modelopt does
    not check."""

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
        with (
            torch.inference_mode(),
            norms_kept_for_others(model),
            own_factors(),
            split_convolutions(model),
        ):
            export_hf_checkpoint(model, export_dir=output_dir)
    for file in output_dir.iterdir():
        file.chmod(0o644)  # safetensors writes them for the owner alone
