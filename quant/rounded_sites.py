"""All linears and tables of a model in every format that a search chooses from.

What GPTQ rounds, and tables, are on disk. Linears that are rounded to nearest are rounded again
when they are wanted, which takes less time than to read them.
"""

from collections.abc import Container, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from trtc.protos.progress import Step
from trtc.quant.calibration import CalibrationJob
from trtc.quant.gptq import Rounded
from trtc.quant.gptq_layers import journal_of, round_others
from trtc.quant.journal import Journal, Journals
from trtc.quant.nearest import round_to_nearest
from trtc.quant.recipe_path import Shapes
from trtc.quant.reference_model import layer_prefixes
from trtc.quant.rounded_layers import RoundedLayer, read_rounded, save_rounded
from trtc.quant.scheme import Gptq
from trtc.quant.side_thread import side_thread
from trtc.quant.site_format import FORMATS, TABLE_FORMATS, TABLES, SiteFormat
from trtc.quant.table_rounding import round_table

SEARCHED = ("int4_g128", "iq4", "iq4_g16", "int6_g128", "int8_g128", "int8", "bf16")
"""Formats that a search chooses from."""
Weights = Mapping[str, Mapping[str, Rounded]]
"""Linear, or site of a table -> format that fits it -> its rounded weight."""


def fitting_formats(shapes: Shapes) -> dict[str, frozenset[str]]:
    """The formats that a search rounds to, with the linears and sites of tables that each fits."""
    found = {}
    for name in SEARCHED:
        to = FORMATS[name]
        fits = [one for one, shape in shapes.items() if not to.why_not(*shape)]
        if to.is_quantized:
            found[name] = frozenset(
                one for one in fits if one not in TABLES or name in TABLE_FORMATS
            )
    return found


@dataclass(frozen=True)
class RoundedSites:
    """Where rounded weights are."""

    fitting: Mapping[str, frozenset[str]]
    """As `fitting_formats` gives it."""
    layers: Mapping[str, Journal]
    """Of formats that GPTQ rounds to."""
    tables: Journals
    linears: tuple[Mapping[str, Any], ...]
    """Those of each layer by name, which have weights while the layer is held."""

    def of_layer(self, index: int, wanted: Container[tuple[str, str]] | None = None) -> Weights:
        """The linears of a layer that is held, on its device.

        Args:
            wanted: (linear, format) of those to read; None: all.
        """
        found: dict[str, dict[str, Rounded]] = {name: {} for name in self.linears[index]}
        for to, fitting in self.fitting.items():
            linears = {
                name: linear
                for name, linear in self.linears[index].items()
                if name in fitting and (wanted is None or (name, to) in wanted)
            }
            if not linears:
                continue
            if to in self.layers:
                device = next(iter(linears.values())).weight.device
                rounded = read_rounded(self.layers[to], index, linears, device).linears
            else:
                rounded = {
                    name: round_to_nearest(linear.weight.detach().float(), FORMATS[to])
                    for name, linear in linears.items()
                }
            for name in linears:
                found[name][to] = rounded[name]
        return found

    def of_table(self, site: str, device: torch.device) -> dict[str, Rounded]:
        """A table in all formats that fit it, on a device."""
        formats = (to for to, fitting in self.fitting.items() if site in fitting)
        return {to: self.table(site, to, device) for to in formats}

    def table(self, site: str, to: str, device: torch.device) -> Rounded:
        """A table, on a device."""
        return read_rounded(_table_journal(self.tables, site, to), 0, device=device).linears[site]


def round_sites(job: CalibrationJob, modules: Mapping[str, Any], settings: Gptq) -> RoundedSites:
    """Round all that is not there yet.

    Args:
        job: has journals, where all is kept.
        modules: linears by name, and tables by site.

    Raises:
        CalibrationError: as `round_layers`.
    """
    assert job.journals is not None
    fitting = fitting_formats({name: tuple(one.weight.shape) for name, one in modules.items()})
    tables = {site: modules[site] for site in TABLES if site in modules}
    formats = {
        to: {name: FORMATS[to] for name in modules if name in fits and name not in tables}
        for to, fits in fitting.items()
        if FORMATS[to].is_gptq
    }
    layers = {
        to: _round_linears(job, f"{to} ({number} of {len(formats)})", named, settings)
        for number, (to, named) in enumerate(formats.items(), 1)
        if named
    }
    for site, module in tables.items():
        for to in (to for to, fits in fitting.items() if site in fits):
            _round_table(job, site, module, to)
    linears = tuple(
        {name: one for name, one in modules.items() if name.startswith(prefix)}
        for prefix in layer_prefixes(job.model)
    )
    return RoundedSites(fitting, layers, job.journals, linears)


def _round_linears(
    job: CalibrationJob, what: str, formats: Mapping[str, SiteFormat], settings: Gptq
) -> Journal:
    phase = f"rounding all linears to {what} on {job.tokens.num_tokens} tokens"
    rounding = replace(job, phase=phase)
    journal = journal_of(rounding, formats, settings)
    assert journal is not None
    with side_thread() as side:
        for _ in round_others(rounding, formats, settings, journal.num_layers(), side):
            pass
    return journal


def _round_table(job: CalibrationJob, site: str, module: Any, to: str) -> None:
    assert job.journals is not None
    journal = _table_journal(job.journals, site, to)
    if journal.num_layers():
        return
    job.progress(Step(f"rounding {site} to {to}"))
    rounded = {site: round_table(module.weight.data, FORMATS[to])}
    save_rounded(journal, RoundedLayer(0, rounded, ()), {site: FORMATS[to]}, ())


def _table_journal(journals: Journals, site: str, to: str) -> Journal:
    return journals.of_run(("table", site, to))
