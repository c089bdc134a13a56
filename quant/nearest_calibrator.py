"""8-bit weights, rotated or not, rounded to nearest, into a compressed-tensors checkpoint whose
activations are quantised by row as they come."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from trtc.protos.errors import CalibrationError
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import MIN_TOKENS
from trtc.quant.gptq import Rounded
from trtc.quant.layer_error import Meter
from trtc.quant.layerwise import hooked, run_text
from trtc.quant.modelopt_ptq import kv_scales
from trtc.quant.nearest import round_rows, round_to_nearest
from trtc.quant.packed_checkpoint import PackedCheckpoint
from trtc.quant.rotation import rotated
from trtc.quant.site_format import SiteFormat

_BAD_WEIGHTS = "The checkpoint is damaged there; check it in bf16 first"


@dataclass(frozen=True)
class NearestCalibrator:
    """See quant/calibration.py."""

    kv_dtype: str
    formats: Mapping[str, SiteFormat]
    """Of every linear that could be quantised, by its name: 8 bits with a scale a channel."""
    hadamard: int = 0
    """Input channels that are rotated together before; 0: none."""

    def work_bytes(self, model_dir: Path) -> int:
        return 0

    @property
    def max_tokens(self) -> int:
        return MIN_TOKENS

    def run(self, job: CalibrationJob) -> tuple[LayerError, ...]:
        model = job.model
        quantized = {name: one for name, one in self.formats.items() if one.is_quantized}
        target = PackedCheckpoint(
            job.model_dir, job.output_dir, quantized, rounds_rows=True, hadamard=self.hadamard
        )
        linears = {
            name: module for name, module in model.named_modules() if isinstance(module, nn.Linear)
        }
        for layer, names in _by_layer(quantized).items():
            job.progress(Step(f"{job.phase}, layer {layer}"))
            with job.source.held(layer):
                target.add({name: self._rounded(name, linears[name]) for name in names})
        errors = self._measured(job, {name: linears[name] for name in quantized})
        scales = kv_scales(job.source, job.tokens) if self.kv_dtype == "f8e4m3" else {}
        job.progress(Step("writing the quantised checkpoint"))
        target.finish([name for name in linears if name not in quantized], scales)
        return errors

    def _rounded(self, name: str, linear: nn.Linear) -> Rounded:
        weight = linear.weight.detach().float()
        if not bool(torch.isfinite(weight).all()):
            raise CalibrationError(
                "has weights that are not finite", field=name, remedy=_BAD_WEIGHTS
            )
        return round_to_nearest(rotated(weight, self.hadamard), self.formats[name]).to("cpu")

    def _measured(
        self, job: CalibrationJob, linears: Mapping[str, nn.Linear]
    ) -> tuple[LayerError, ...]:
        """Errors of linears on the inputs that the unquantised model gives them, which are rounded
        by row as the weights are."""
        meters = {name: Meter(name) for name in linears}

        def compare(name: str) -> object:
            to = self.formats[name]

            def hook(linear: nn.Linear, inputs: tuple[torch.Tensor, ...]) -> None:
                x = inputs[0].float().reshape(-1, linear.in_features)
                if not len(x):
                    return
                weight = linear.weight.float()
                rounded = round_to_nearest(rotated(weight, self.hadamard), to).values()
                given = round_rows(rotated(x, self.hadamard), to)
                meters[name].add(x @ weight.T, given @ rounded.T)

            return hook

        job.progress(Step("measuring every layer on held-out text"))
        with hooked(job.model, {name: compare(name) for name in linears}):  # type: ignore[misc]
            run_text(job.source, job.heldout)
        results = (meter.result() for meter in meters.values())
        return tuple(result for result in results if result is not None)


def _by_layer(names: Mapping[str, SiteFormat]) -> dict[int, list[str]]:
    layers: dict[int, list[str]] = {}
    for name in names:
        number = name.partition("layers.")[2].partition(".")[0]
        layers.setdefault(int(number), []).append(name)
    return layers
