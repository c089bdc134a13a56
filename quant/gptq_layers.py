"""GPTQ and GPTAQ over a whole model: each layer sees the errors of those before it."""

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from trtc.protos.errors import CalibrationError
from trtc.protos.manifest import LayerError
from trtc.protos.progress import Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.code_grid import GRIDS
from trtc.quant.gptq import InputStatistics, Rounded, round_weights
from trtc.quant.input_sums import InputSums
from trtc.quant.journal import Journal
from trtc.quant.layer_error import Meter
from trtc.quant.layerwise import (
    Site,
    Stage,
    Stream,
    advance,
    find_stages,
    hooked,
    open_stream,
    restore,
    run_layer,
    states_of,
)
from trtc.quant.nearest import round_to_nearest
from trtc.quant.reference_model import layer_prefixes
from trtc.quant.rounded_layers import RoundedLayer, read_rounded, save_rounded
from trtc.quant.scheme import Gptq
from trtc.quant.side_thread import SideThread
from trtc.quant.site_format import SiteFormat

_BAD_WEIGHTS = "The checkpoint is damaged there, or dead; check it in bf16 first"


class _Enough(Exception):
    """Ends a layer that has given all inputs that were asked for."""


def round_layers(
    job: CalibrationJob, formats: Mapping[str, SiteFormat], settings: Gptq, side: SideThread
) -> Iterator[RoundedLayer]:
    """Round the linears of a job's model; the model itself is left as it is. With journals, layers
    that a run before has done are read.

    Weights of 4 bits are rounded by GPTQ or GPTAQ, others to nearest.

    In memory at once are a layer, one or two copies of it in f32, the hidden states of the text,
    the inputs of the layer's linears, and what `round_weights` needs for one of them.

    Args:
        formats: of linears of the model's decoder layers, by name; others stay as they are.
        side: writes the journal, and what the caller makes of a layer: when one is given, that of
            the layers before is done.

    Raises:
        CalibrationError: activations that are not finite, with the linear's name.
        OSError, SafetensorError: of the journal, a layer later.
    """
    journal = journal_of(job, formats, settings)
    done = 0 if journal is None else journal.num_layers()
    if journal is not None:
        for index in range(done):
            saved = read_rounded(journal, index)
            side.wait()
            yield saved
    yield from round_others(job, formats, settings, done, side)


def journal_of(
    job: CalibrationJob, formats: Mapping[str, SiteFormat], settings: Gptq
) -> Journal | None:
    """Where a job keeps the layers that it rounds so; None: nowhere."""
    run = (sorted(formats.items()), settings)
    return None if job.journals is None else job.journals.of_run(run)


def round_others(
    job: CalibrationJob,
    formats: Mapping[str, SiteFormat],
    settings: Gptq,
    done: int,
    side: SideThread,
) -> Iterator[RoundedLayer]:
    """As `round_layers`, of layers but the first `done`, which the journal has."""
    journal = journal_of(job, formats, settings)
    model, layers = job.model, job.model.base_model.layers
    prefixes = layer_prefixes(model)
    rounded, exact = (open_stream(model, job.tokens.sequences) for _ in range(2))
    unseen = open_stream(model, job.heldout.sequences)
    batches = [batch for stream in (rounded, exact, unseen) for batch in stream]
    if journal is not None and done:
        restore(batches, journal.streams(done - 1))
    with job.source.layers_only():
        for index in range(done, len(layers)):
            job.progress(Step(job.phase, index, len(layers), "layers"))
            prefix = prefixes[index]
            within = {
                name.removeprefix(prefix): one
                for name, one in formats.items()
                if name.startswith(prefix)
            }
            with job.source.held(index) as layer:
                pair = _Pair(layer, _wide(layer), index, prefix)
                linears = pair.round(within, rounded, exact, settings)
                advance(pair.rounded, index, rounded)
                errors = _measured(pair, list(linears), unseen)
                del pair
            named = {prefix + name: one for name, one in linears.items()}
            whole = RoundedLayer(index, named, errors)
            side.wait()
            if journal is not None:
                side.give(partial(save_rounded, journal, whole, formats, states_of(batches)))
            yield whole
    side.wait()
    job.progress(Step(job.phase, len(layers), len(layers), "layers"))


@dataclass(frozen=True)
class _Pair:
    """A layer as it was and as it is rounded, stage by stage."""

    exact: nn.Module
    """In the type of the model; a copy in f32 is made where it is computed."""
    rounded: nn.Module
    """In f32."""
    index: int
    prefix: str

    def round(
        self,
        formats: Mapping[str, SiteFormat],
        stream: Stream,
        exact: Stream,
        settings: Gptq,
    ) -> dict[str, Rounded]:
        """Round linears of `rounded`; `exact` is taken through the layer."""
        layer = _wide(self.exact)
        stages = find_stages(layer, list(formats), self.index, exact) if formats else ()
        asked = [site for stage in stages for site in stage if not site.routed]
        kept = _inputs(layer, asked if settings.asymmetric else [], self.index, exact)
        del layer
        found: dict[str, Rounded] = {}
        for stage in stages:
            statistics = self._statistics(stage, stream, kept)
            for site in stage:
                kept.pop(site, None)
            for site, inputs in statistics.items():
                kinds = list(dict.fromkeys(formats[name] for name in site.linears))
                for one in kinds:
                    alike = [name for name in site.linears if formats[name] == one]
                    # Rounding overwrites them.
                    own = inputs if one == kinds[-1] else inputs.copy()
                    found |= self._round(alike, own, one, settings)
        return {name: found[name] for name in formats}

    def _statistics(
        self, stage: Stage, stream: Stream, exact: Mapping[Site, list[torch.Tensor]]
    ) -> dict[Site, InputStatistics]:
        sums = {site: InputSums(exact.get(site)) for site in stage}
        hooks = {site.linears[0]: _last(sums[site].add, len(stage) == 1) for site in stage}
        with hooked(self.rounded, hooks):
            for batch in stream:
                try:
                    next(run_layer(self.rounded, self.index, [batch]))
                except _Enough:
                    continue
        weights = {site: self._weight(site.linears[0]) for site in stage}
        return {
            site: sums[site].statistics(weight.shape[1], weight.device)
            for site, weight in weights.items()
        }

    def _weight(self, name: str) -> torch.Tensor:
        weight = self.rounded.get_submodule(name).weight
        assert isinstance(weight, torch.Tensor)
        return weight.data

    def _round(
        self, names: Sequence[str], inputs: InputStatistics, to: SiteFormat, settings: Gptq
    ) -> dict[str, Rounded]:
        """Round linears that share inputs and format."""
        weights = [self._weight(name) for name in names]
        try:
            whole = _rounded(torch.cat(weights), inputs, to, settings)
        except CalibrationError as error:
            raise CalibrationError(
                error.problem, field=self.prefix + names[0], remedy=_BAD_WEIGHTS
            ) from error
        found = {}
        rows = [len(weight) for weight in weights]
        codes, scales = torch.split(whole.codes, rows), torch.split(whole.scales, rows)
        for name, weight, *part in zip(names, weights, codes, scales, strict=True):
            one = Rounded(part[0], part[1], whole.scale_unit)
            weight.copy_(one.values())
            found[name] = one.on_cpu()
        return found


def _rounded(
    weight: torch.Tensor, inputs: InputStatistics, to: SiteFormat, settings: Gptq
) -> Rounded:
    if to.is_gptq:
        assert to.group_size is not None
        return round_weights(weight, inputs, to.group_size, settings, GRIDS[to.weight])
    return round_to_nearest(weight, to)


def _wide(layer: nn.Module) -> nn.Module:
    """A copy in f32."""
    return copy.deepcopy(layer).float()


def _last(add: Callable[[torch.Tensor], None], stop: bool) -> Callable[..., None]:
    def hook(linear: nn.Module, inputs: tuple[torch.Tensor, ...]) -> None:
        add(inputs[0])
        if stop:
            raise _Enough

    return hook


def _inputs(
    layer: nn.Module, sites: Sequence[Site], index: int, stream: Stream
) -> dict[Site, list[torch.Tensor]]:
    """The inputs [T, K] of sites, by batch; the stream is taken through the layer."""
    found: dict[Site, list[torch.Tensor]] = {site: [] for site in sites}

    def keep(site: Site) -> Callable[..., None]:
        return lambda linear, inputs: found[site].append(inputs[0].reshape(-1, inputs[0].shape[-1]))

    with hooked(layer, {site.linears[0]: keep(site) for site in sites}):
        advance(layer, index, stream)
    return found


def _measured(pair: _Pair, names: Sequence[str], stream: Stream) -> tuple[LayerError, ...]:
    """Errors of linears on a stream, which is taken through the layer."""
    meters = {name: Meter(pair.prefix + name) for name in names}
    layer = _wide(pair.exact)

    def compare(name: str) -> Callable[..., None]:
        exact: Any = layer.get_submodule(name)

        def hook(linear: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            x = inputs[0]
            bias = linear.bias
            meters[name].add(
                functional.linear(x, exact.weight, bias), functional.linear(x, linear.weight, bias)
            )

        return hook

    with hooked(pair.rounded, {name: compare(name) for name in names}):
        advance(pair.rounded, pair.index, stream)
    results = (meter.result() for meter in meters.values())
    return tuple(result for result in results if result is not None)
