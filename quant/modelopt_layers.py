"""nvidia-modelopt's calibration of one decoder layer after the other.

Its algorithms look at the inputs that the unquantised model gives each linear, so a layer is
calibrated while the text goes through it for the first time, and is then not needed any more.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from typing import Any

import numpy as np
import torch
from torch import nn

from trtc.protos.errors import CalibrationError
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.awq import Forward, with_fast_search
from trtc.quant.calibration import CalibrationJob
from trtc.quant.experts import SeparateExperts, own_factors, prepare_export
from trtc.quant.journal import Journal, SavedLayer
from trtc.quant.layer_error import measure_layer
from trtc.quant.layerwise import (
    Stream,
    advance,
    hooked,
    open_stream,
    restore,
    run_layer,
    states_of,
)
from trtc.quant.linears import quantizable_linears
from trtc.quant.modelopt_rounding import round_weights_of, sums_of_sites
from trtc.quant.quiet import quiet_libraries
from trtc.quant.reference_model import layer_prefixes
from trtc.quant.scheme import Gptq
from trtc.quant.shared_norms import norms_kept_for_others
from trtc.quant.side_thread import SideThread
from trtc.quant.wide_linears import wide_linears

_BAD_WEIGHTS = "The checkpoint is damaged there, or dead; check it in bf16 first"


@dataclass(frozen=True)
class CalibratedLayer:
    """A decoder layer as the checkpoint is to have it."""

    tensors: Mapping[str, torch.Tensor]
    """By their names in the model, on the CPU."""
    errors: tuple[LayerError, ...]
    """On held-out text, in the order of the model."""


class LayerModel(nn.Module):
    """A decoder layer where nvidia-modelopt asks for a model.

    modelopt, and `norms_kept_for_others`, run it to see which linears share inputs: whatever it is
    given, the layer computes `probe`.
    """

    PREFIX = "layer."
    """Of names."""

    def __init__(self, config: Any, layer: nn.Module, index: int, probe: Stream) -> None:
        super().__init__()
        self.config = config
        self.layer = layer
        self.index = index
        self._probe = probe
        self.eval()  # modelopt restores the mode that it finds

    @property
    def device(self) -> torch.device:
        return self._probe[0].hidden.device

    def forward(self, *_: Any, **__: Any) -> None:
        list(run_layer(self.layer, self.index, self._probe))


@dataclass(frozen=True)
class _Texts:
    """What goes through the layers, in the model's own type."""

    calibration: Stream
    """Unquantised."""
    search: Stream
    """The same, for AWQ: all windows at once are faster."""
    heldout: Stream
    """Through quantised layers, window by window."""
    probe: Stream
    """Two tokens."""

    @property
    def all(self) -> Stream:
        """What is left of layers for those after them."""
        return [*self.calibration, *self.search, *self.heldout, *self.probe]


def calibrate_layers(
    job: CalibrationJob, config: dict[str, Any], rounding: Gptq | None, side: SideThread
) -> Iterator[CalibratedLayer]:
    """Calibrate and export the layers of a job's model, which are lost. With journals, layers that
    a run before has done are read.

    In memory at once are a layer, what it becomes, the hidden states of the text, and what the
    algorithm needs for a linear.

    Args:
        config: modelopt's.
        rounding: of E4M3 weights; None: to nearest.
        side: writes the journal.

    Raises:
        CalibrationError: activations that are NaN, infinite or always zero.
        OSError, SafetensorError: of the journal, a layer later.
    """
    model, source = job.model, job.source
    layers, prefixes = model.base_model.layers, layer_prefixes(model)
    journal = _journal_of(job, config, rounding)
    done = 0 if journal is None else journal.num_layers()
    with wide_linears():
        texts = _open_texts(job, config)
    _convert(model, config)
    if journal is not None and done:
        layers[:done].to("meta")
        yield from _read(journal, done)
        restore(texts.all, journal.streams(done - 1))
    linears = [name for name, _ in quantizable_linears(model)]
    with source.layers_only():
        for index in range(done, len(layers)):
            job.progress(Step(job.phase, index, len(layers), "layers"))
            prefix = prefixes[index]
            own = [name.removeprefix(prefix) for name in linears if name.startswith(prefix)]
            part = LayerModel(model.config, layers[index], index, texts.probe)
            with source.held(index):
                layer = _quantized(part, prefix, own, config["algorithm"], rounding, texts)
            part.to("meta")  # with its quantisers, some of which are as large as scales
            side.wait()
            if journal is not None:
                saved = SavedLayer(layer.tensors, layer.errors)
                side.give(partial(journal.save, index, saved, states_of(texts.all)))
            yield layer
    side.wait()
    job.progress(Step(job.phase, len(layers), len(layers), "layers"))


def _journal_of(
    job: CalibrationJob, config: dict[str, Any], rounding: Gptq | None
) -> Journal | None:
    """Where a job keeps the layers that it calibrates so; None: nowhere."""
    # JSON is the same in every process.
    run = ("nvidia-modelopt", metadata.version("nvidia-modelopt"), json.dumps(config), rounding)
    return None if job.journals is None else job.journals.of_run(run)


def _read(journal: Journal, count: int) -> Iterator[CalibratedLayer]:
    """The first layers."""
    for index in range(count):
        saved = journal.layer(index)
        yield CalibratedLayer(saved.tensors, saved.errors)


def _quantized(
    part: LayerModel,
    prefix: str,
    linears: Sequence[str],
    algorithm: Any,
    rounding: Gptq | None,
    texts: _Texts,
) -> CalibratedLayer:
    """Calibrate, measure and export a layer, and take the texts through it.

    Args:
        prefix: what names within the layer begin with in the model.
        linears: that are quantised, or could be; within the layer.
    """
    layer, index = part.layer, part.index
    with wide_linears():
        sums = {} if rounding is None else sums_of_sites(layer, linears, index, texts.probe)
        gathering = hooked(layer, {site.linears[0]: one.hook for site, one in sums.items()})
        with _guarded(layer, linears, prefix), _collecting(layer), gathering:
            _calibrate(part, algorithm, _forward_loop(part, texts))
        check_scales(layer, prefix)
        _share_scales(part)
    if rounding is not None:
        round_weights_of(layer, sums, rounding)
    with wide_linears():
        errors = measure_layer(layer, prefix, index, texts.heldout)
        advance(layer, index, texts.probe)
        exported = _exported(part)
    return CalibratedLayer({prefix + name: one for name, one in exported.items()}, errors)


def _open_texts(job: CalibrationJob, config: dict[str, Any]) -> _Texts:
    model, windows = job.model, job.tokens.sequences
    at_once = len(windows)
    return _Texts(
        open_stream(model, windows, wide=False),
        open_stream(model, windows, wide=False, batch=at_once) if searches(config) else [],
        open_stream(model, job.heldout.sequences, wide=False, batch=1),
        open_stream(model, [np.ones(2, np.int32)], wide=False),
    )


def method_of(config: dict[str, Any]) -> str:
    """max, smoothquant or awq_lite."""
    algorithm = config["algorithm"]
    return str(algorithm["method"] if isinstance(algorithm, dict) else algorithm)


def searches(config: dict[str, Any]) -> bool:
    """Whether the text is run a second time, to search for scales."""
    return method_of(config) == "awq_lite"


def _convert(model: Any, config: dict[str, Any]) -> None:
    """Give the model's linears and attentions quantisers, which do nothing yet."""
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        mtq.quantize(model, {**config, "algorithm": None})


def _calibrate(part: LayerModel, algorithm: Any, forward_loop: Forward) -> None:
    with quiet_libraries():
        import modelopt.torch.quantization as mtq

        mtq.calibrate(part, algorithm, forward_loop)


def _forward_loop(part: LayerModel, texts: _Texts) -> Forward:
    def taking(stream: Stream) -> Forward:
        return lambda model: advance(part.layer, part.index, stream)

    if texts.search:
        return with_fast_search(taking(texts.calibration), taking(texts.search))
    return taking(texts.calibration)


def _share_scales(part: LayerModel) -> None:
    """Give linears that share inputs the scales that they need to be multiplied as one."""
    with quiet_libraries():
        from modelopt.torch.export.unified_export_hf import requantize_resmooth_fused_llm_layers

        with norms_kept_for_others(part), own_factors():
            requantize_resmooth_fused_llm_layers(part)


def _exported(part: LayerModel) -> dict[str, torch.Tensor]:
    """A layer's tensors as checkpoints have them, by their names within it; its own are lost."""
    with quiet_libraries():
        from modelopt.torch.export.unified_export_hf import _export_transformers_checkpoint

        prepare_export()
        with torch.inference_mode(), norms_kept_for_others(part), own_factors():
            tensors, _ = _export_transformers_checkpoint(part)
    return {
        name.removeprefix(LayerModel.PREFIX): one.detach().cpu() for name, one in tensors.items()
    }


@contextmanager
def _collecting(layer: nn.Module) -> Iterator[None]:
    """Within the block starved experts compute all tokens of the layer."""
    experts = [module for module in layer.modules() if isinstance(module, SeparateExperts)]
    for one in experts:
        one.collecting = True
    try:
        yield
    finally:
        for one in experts:
            one.collecting = False


def _guarded(layer: nn.Module, names: Sequence[str], prefix: str) -> AbstractContextManager[None]:
    """Context manager that raises for the first linear whose input is NaN or infinite, which
    modelopt does not check."""

    def check(name: str) -> Callable[..., None]:
        def hook(linear: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
            if not bool(inputs[0].isfinite().all()):
                raise CalibrationError(
                    "gets activations that are not finite",
                    field=prefix + name,
                    remedy=_BAD_WEIGHTS,
                )

        return hook

    return hooked(layer, {name: check(name) for name in names})


def check_scales(module: nn.Module, prefix: str = "") -> None:
    """Refuse a scale of zero, which activations give that are always zero: nothing can be divided
    by it.

    Args:
        prefix: what names within the module begin with in the model.

    Raises:
        CalibrationError: names the linear.
    """
    for name, quantizer in module.named_modules():
        amax = getattr(quantizer, "amax", None) if "quantizer" in name else None
        if not isinstance(amax, torch.Tensor) or not getattr(quantizer, "is_enabled", False):
            continue
        if "weight_quantizer" not in name and not bool((amax > 0).all() & amax.isfinite().all()):
            raise CalibrationError(
                f"the largest activation seen is {amax.max().item()}",
                field=prefix + name.rpartition(".")[0],
                remedy=_BAD_WEIGHTS,
            )
