"""4-bit weights by GPTQ or GPTAQ, layer by layer, into a compressed-tensors checkpoint."""

from dataclasses import dataclass

from torch import nn

from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.experts import SeparateExperts
from trtc.quant.gptq_layers import round_layers
from trtc.quant.linears import quantizable_linears
from trtc.quant.modelopt_ptq import kv_scales
from trtc.quant.packed_checkpoint import PackedCheckpoint
from trtc.quant.scheme import Gptq, Scheme

_MAX_TOKENS = 16_384


@dataclass(frozen=True)
class GptqCalibrator:
    """What GPTQ does for one scheme: see quant/calibration.py."""

    scheme: Scheme
    kv_dtype: str
    kept: tuple[str, ...]
    """Names of linears that stay unquantised."""

    @property
    def max_tokens(self) -> int:
        return _MAX_TOKENS

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        settings, group_size = self.scheme.calibration, self.scheme.group_size
        assert isinstance(settings, Gptq) and group_size is not None
        model = job.model
        names = [name for name, _ in quantizable_linears(model) if name not in self.kept]
        target = PackedCheckpoint(job.model_dir, job.output_dir, names, group_size)
        ignored = [
            name
            for name, module in model.named_modules()
            if isinstance(module, nn.Linear) and name not in names
        ]
        for module in model.modules():
            if isinstance(module, SeparateExperts):
                module.collecting = True
        errors: list[LayerError] = []
        for layer in round_layers(job, names, group_size, settings):
            target.add(layer.linears)
            errors += layer.errors
        scales = kv_scales(model, job.tokens) if self.kv_dtype == "f8e4m3" else {}
        job.progress(Step("writing the quantised checkpoint"))
        target.finish(ignored, scales)
        return tuple(errors)
