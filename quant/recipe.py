"""Recipes: a format for every site of a model, as a JSON file that is read and written.

{"trtc_recipe": 1, "sites": {"model.layers.0.self_attn.qkv_proj": "int4_g128", ...}}
"""

import difflib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trtc.protos.errors import RequestError, UnsupportedError
from trtc.protos.files import UnreadableError, read_json
from trtc.protos.record import Record, record_json
from trtc.quant.scheme import MIXED, Gptq, Scheme
from trtc.quant.site_format import (
    DEFAULT_TABLES,
    EMBEDDING,
    FORMATS,
    LM_HEAD,
    TABLE_FORMATS,
    TABLES,
    SiteFormat,
    TableFormats,
    narrowest,
    site_of,
)

MIXED_SCHEME = Scheme(MIXED, "bf16", "i4", "bf16", 128)
"""Of a recipe that is not known yet, for checks before it is found."""
RECIPE_FILE = "recipe.json"
"""In engines and checkpoints that a recipe made."""
_FIELD = "--recipe"
_MAX_BYTES = 16 << 20
_NAMED = 3
"""Names in a message, at most."""


class _File(Record, frozen=True):
    trtc_recipe: Literal[1]
    sites: dict[str, str]


@dataclass(frozen=True)
class FormatRecipe:
    """A format for every site."""

    formats: Mapping[str, SiteFormat]
    """By site; see quant/site_format.py."""
    tables: TableFormats = DEFAULT_TABLES
    """Those that it leaves open are as the target has them."""

    @property
    def scheme(self) -> Scheme:
        """What the recipe is as a scheme: its narrowest weights, its largest groups."""
        quantized = [one for one in self.formats.values() if one.is_quantized]
        return Scheme(
            MIXED,
            "bf16",
            narrowest(quantized).weight,
            "bf16",
            max((one.group_size or 0 for one in quantized), default=0) or None,
            calibration=Gptq(asymmetric=True),
        )

    @property
    def is_quantized(self) -> bool:
        """Whether any linear's site is."""
        return any(one.is_quantized for one in self.formats.values())

    @property
    def parts(self) -> tuple[Scheme, ...]:
        """Each format as a scheme of its own, for checks of what a target runs."""
        return tuple(
            Scheme(MIXED, "bf16", one.weight, "bf16", one.group_size)
            for one in dict.fromkeys(self.formats.values())
        )

    @property
    def names(self) -> dict[str, str]:
        """The formats' names, by site, those of tables last."""
        return {**{site: one.name for site, one in self.formats.items()}, **self.tables.names}

    def of_linears(self, shapes: Mapping[str, tuple[int, int]]) -> dict[str, SiteFormat]:
        """The format of every linear.

        Args:
            shapes: (out_features, in_features) of the linears that can be quantised, by their names
                in Transformers' model.

        Raises:
            RequestError: a site that the model does not have, or one of the model that is missing.
            UnsupportedError: a linear whose size its format cannot hold.
        """
        sites = list(dict.fromkeys(site_of(name) for name in shapes))
        for site in self.formats:
            if site not in sites:
                near = difflib.get_close_matches(site, sites, _NAMED, 0.0)
                raise RequestError(
                    f"the model has no site {site!r}",
                    field=_FIELD,
                    remedy=f"Sites are called {', '.join(near)}",
                )
        if missing := [site for site in sites if site not in self.formats]:
            more = f" and {len(missing) - _NAMED} more" if len(missing) > _NAMED else ""
            raise RequestError(
                f"gives no format for {', '.join(missing[:_NAMED])}{more}",
                field=_FIELD,
                remedy=f"Give each of them one of {', '.join(FORMATS)}",
            )
        found = {name: self.formats[site_of(name)] for name in shapes}
        for name, one in found.items():
            if why := one.why_not(*shapes[name]):
                raise UnsupportedError(
                    f"{why}, which {one.name} needs",
                    field=f"{_FIELD}: {name}",
                    remedy=f"Use one of {', '.join(_fitting(shapes[name]))}",
                )
        return found

    def to_json(self) -> bytes:
        """The file's content."""
        return record_json(_File(trtc_recipe=1, sites=self.names))


def read_recipe(path: Path) -> FormatRecipe:
    """Read a recipe's file.

    Raises:
        RequestError: unreadable; a format that does not exist; or nothing is quantised.
    """
    try:
        file = read_json(path, _File, _MAX_BYTES)
    except UnreadableError as error:
        raise RequestError(
            f"{path}: {error}",
            field=_FIELD,
            remedy='Give {"trtc_recipe": 1, "sites": {SITE: FORMAT, ...}}',
        ) from error
    for site, name in file.sites.items():
        known = TABLE_FORMATS if site in TABLES else FORMATS
        if name not in known:
            raise RequestError(
                f"{name!r} of site {site!r} is not a format that it may have",
                field=_FIELD,
                remedy=f"Use one of {', '.join(known)}",
            )
    recipe = recipe_named(file.sites)
    if not recipe.is_quantized:
        raise RequestError(
            "quantises no site", field=_FIELD, remedy="Build with --dtype bf16, or quantise some"
        )
    return recipe


def recipe_named(sites: Mapping[str, str]) -> FormatRecipe:
    """The recipe whose `names` these are."""
    formats = {site: FORMATS[name] for site, name in sites.items()}
    tables = TableFormats(formats.pop(LM_HEAD, None), formats.pop(EMBEDDING, None))
    return FormatRecipe(formats, tables)


def _fitting(shape: tuple[int, int]) -> Iterator[str]:
    return (name for name, one in FORMATS.items() if not one.why_not(*shape))
