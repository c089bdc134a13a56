"""Weights by GPTQ or GPTAQ, layer by layer, into a compressed-tensors checkpoint; a site may have a
format of its own."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from torch import nn

from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.experts import SeparateExperts
from trtc.quant.gptq_layers import round_layers
from trtc.quant.gptq_memory import gptq_bytes
from trtc.quant.modelopt_ptq import kv_scales
from trtc.quant.packed_checkpoint import PackedCheckpoint
from trtc.quant.scheme import Gptq
from trtc.quant.side_thread import side_thread
from trtc.quant.site_format import SiteFormat

_MAX_TOKENS = 16_384


@dataclass(frozen=True)
class GptqCalibrator:
    """What GPTQ does with its settings: see quant/calibration.py."""

    settings: Gptq
    kv_dtype: str
    formats: Mapping[str, SiteFormat]
    """Of every linear that could be quantised, by its name."""

    def work_bytes(self, model_dir: Path) -> int:
        quantized = {name: one for name, one in self.formats.items() if one.is_quantized}
        return gptq_bytes(model_dir, quantized, _MAX_TOKENS)

    @property
    def max_tokens(self) -> int:
        return _MAX_TOKENS

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        model = job.model
        quantized = {name: one for name, one in self.formats.items() if one.is_quantized}
        target = PackedCheckpoint(job.model_dir, job.output_dir, quantized)
        ignored = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name not in quantized
        ]
        for module in model.modules():
            if isinstance(module, SeparateExperts):
                module.collecting = True
        errors: list[LayerError] = []
        with side_thread() as side:
            for layer in round_layers(job, quantized, self.settings, side):
                side.give(partial(target.add, layer.linears))
                errors += layer.errors
        scales = kv_scales(job.source, job.tokens) if self.kv_dtype == "f8e4m3" else {}
        job.progress(Step("writing the quantised checkpoint"))
        target.finish(ignored, scales)
        return tuple(errors)
