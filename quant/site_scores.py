"""Scores of formats at sites, by a backward pass.

The score of a format at a site estimates the divergence that it alone causes. Labels are drawn from
the model's own predictions, and g is the gradient of their log-likelihood by a linear's output.
Rounding changes the output by e; the divergence is then about half the mean of (g . e)^2 over
tokens, because the mean of g g^T is the Fisher information. Scores rank as measured divergences of
single sites do; the divergence of a whole recipe is measured.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.nn import functional

from trtc.protos.progress import counted
from trtc.quant.calibration import CalibrationJob
from trtc.quant.calibration_text import Int32s
from trtc.quant.device import device_of
from trtc.quant.gptq import Rounded
from trtc.quant.journal import Journal
from trtc.quant.layer_gradients import LayerGradients
from trtc.quant.recipe_path import Scores
from trtc.quant.rounded_sites import RoundedSites, Weights
from trtc.quant.scheme import Gptq
from trtc.quant.site_format import EMBEDDING, site_of

SCORED_TOKENS = 8192
"""Of the calibration text, rounded up to whole windows."""
_SEED = 3
_Totals = dict[tuple[str, str], float]


def find_scores(
    job: CalibrationJob, tables: Mapping[str, Any], rounded: RoundedSites, settings: Gptq
) -> Scores:
    """The scores, or those that a search before has saved.

    Args:
        job: has journals; its model's weights no longer need gradients after this.
        tables: modules by their sites.
        settings: that the weights were rounded with.
    """
    assert job.journals is not None
    formats = {name: sorted(fits) for name, fits in rounded.fitting.items()}
    journal = job.journals.of_run(("scores", formats, settings, SCORED_TOKENS, _SEED))
    saved = journal.scores()
    if saved is not None:
        return saved
    scores = _score(job, tables, rounded, journal)
    journal.save_scores(scores)
    journal.drop_streams()
    return scores


def _score(
    job: CalibrationJob, tables: Mapping[str, Any], rounded: RoundedSites, journal: Journal
) -> Scores:
    """By a pass over a part of the calibration text, forward and back."""
    source, model = job.source, job.model
    sequences = _scored(job)
    taken = sum(len(ids) for ids in sequences)
    totals: _Totals = defaultdict(float)
    model.requires_grad_(False)  # gradients are of activations alone
    phase = f"scoring {len(rounded.fitting)} formats of every site on {taken} tokens"
    gradients = LayerGradients(source, sequences, journal, phase, job.progress)
    embedding = model.get_input_embeddings()
    device = device_of(model)
    # A lookup's output is the gradients' end.
    heads = {site: one for site, one in tables.items() if one is not embedding}
    with _scoring(heads, {site: rounded.of_table(site, device) for site in heads}, totals):
        gradients.from_logits(torch.Generator(device).manual_seed(_SEED))
    indices = range(len(rounded.linears))
    with source.layers_only():
        for index in counted(indices[::-1], phase, len(indices), "layers", job.progress):
            with (
                source.held(index) as layer,
                _scoring(rounded.linears[index], rounded.of_layer(index), totals),
            ):
                gradients.through(layer, index)
    if EMBEDDING in tables:
        table = rounded.of_table(EMBEDDING, device)
        for ids, gradient in zip(sequences, gradients.by_embeddings(), strict=True):
            _score_lookups(embedding, ids, gradient, table, totals)
    return {key: total / (2 * taken) for key, total in totals.items()}


def _scored(job: CalibrationJob) -> list[Int32s]:
    sequences: list[Int32s] = []
    taken = 0
    for ids in job.tokens.sequences:
        if taken < SCORED_TOKENS:
            sequences.append(ids)
            taken += len(ids)
    return sequences


@contextmanager
def _scoring(modules: Mapping[str, Any], weights: Weights, totals: _Totals) -> Iterator[None]:
    """Within the block, gradients by the outputs of linears add to the scores of their formats."""
    handles = [
        module.register_forward_hook(_scorer(site_of(name), weights[name], totals))
        for name, module in modules.items()
    ]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scorer(site: str, weights: Mapping[str, Rounded], totals: _Totals) -> Callable[..., None]:
    def forward(linear: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        x = inputs[0].detach()
        if output.requires_grad:
            call: Any = output.register_hook
            call(lambda gradient: add(linear.weight.data, x, gradient))

    def add(weight: torch.Tensor, x: torch.Tensor, gradient: torch.Tensor) -> None:
        for to, rounded in weights.items():
            change = torch.zeros(x.shape[:-1], device=x.device)
            for rows, part in rounded.parts():
                delta = part.values() - weight[rows].float()
                error = functional.linear(x.float(), delta)
                change += (error * gradient[..., rows].float()).sum(-1)
            _add(totals, (site, to), change)

    return forward


def _score_lookups(
    table: Any,
    ids: Int32s,
    gradient: torch.Tensor,
    weights: Mapping[str, Rounded],
    totals: _Totals,
) -> None:
    """Add what rounded embeddings change."""
    own = table.weight.data
    rows = torch.from_numpy(ids).long().to(own.device)
    places = torch.arange(len(rows), device=own.device)[None]
    for to, rounded in weights.items():
        values = rounded.rows(rows).values()
        try:
            # Some models scale what they look up.
            table.weight.data = values - own[rows].float()
            with torch.inference_mode():
                error = table(places)
        finally:
            table.weight.data = own
        _add(totals, (EMBEDDING, to), (error.float() * gradient.float()).sum(-1))


def _add(totals: _Totals, key: tuple[str, str], change: torch.Tensor) -> None:
    """Add (g . e)^2 of every token, which `change` is before the square, to a score."""
    totals[key] += float(change.double().square().sum())
