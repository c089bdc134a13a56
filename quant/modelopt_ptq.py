"""Calibration by nvidia-modelopt: its config, and scales of an FP8 KV cache."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant import nvfp4
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import TokenSet
from trtc.quant.layer_source import LayerSource
from trtc.quant.layerwise import run_text
from trtc.quant.linears import NEVER_QUANTIZED
from trtc.quant.modelopt_checkpoint import ModeloptCheckpoint
from trtc.quant.modelopt_layers import calibrate_layers, check_scales, method_of, searches
from trtc.quant.modelopt_memory import modelopt_bytes
from trtc.quant.quiet import quiet_libraries
from trtc.quant.scheme import Gptq, Modelopt, Scheme
from trtc.quant.side_thread import side_thread

_MAX_TOKENS = {"max": 16_384, "smoothquant": 16_384, "awq_lite": 8_192}
"""Calibration tokens by algorithm. AWQ tries many scales a linear on all of them; its authors find
that 16 windows do as well as many times more."""
_E2M1_BITS = (2, 1)
_E4M3_MAX = 448.0


@dataclass(frozen=True)
class ModeloptCalibrator:
    """What nvidia-modelopt does for one scheme: see quant/calibration.py."""

    scheme: Scheme
    kv_dtype: str
    kept: tuple[str, ...]
    """Names of linears that stay unquantised."""

    def work_bytes(self, model_dir: Path) -> int:
        return modelopt_bytes(
            model_dir,
            self.max_tokens,
            searches=searches(self._config()),
            rounds=self._rounding is not None,
        )

    @property
    def max_tokens(self) -> int:
        return _MAX_TOKENS[method_of(self._config())]

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        target = ModeloptCheckpoint(job.model, job.output_dir)
        errors: list[LayerError] = []
        with side_thread() as side:
            for layer in calibrate_layers(job, self._config(), self._rounding, side):
                target.add(layer.tensors)
                errors += layer.errors
        job.progress(Step("writing the quantised checkpoint"))
        target.finish()
        return tuple(errors)

    @property
    def _rounding(self) -> Gptq | None:
        assert isinstance(self.scheme.calibration, Modelopt)
        return self.scheme.calibration.rounding

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
        check_scales(model)
    return {
        f"{name}.{kind}_scale": max(1.0, float(quantizer.amax) / _E4M3_MAX)
        for name, module in model.named_modules()
        for kind in "kv"
        if (quantizer := getattr(module, f"{kind}_bmm_quantizer", None)) is not None
    }
