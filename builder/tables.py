"""What a build is asked to make of the lm_head and the embeddings, held against the model."""

from trtc.builder.request import BuildRequest
from trtc.builder.spec import DecoderSpec
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.quant.recipe import FormatRecipe
from trtc.quant.scheme import Scheme
from trtc.quant.site_format import (
    EMBEDDING,
    LM_HEAD,
    TABLE_FORMATS,
    SiteFormat,
    TableFormats,
)

TABLE_OPTIONS = {LM_HEAD: "--lm-head-dtype", EMBEDDING: "--embedding-dtype"}
"""Of trtc build, by site."""


def has_tied_embeddings(spec: DecoderSpec) -> bool:
    """Whether one table is the lm_head's weight and that of the embeddings."""
    return f"{spec.lm_head.name}.weight" == spec.embedding


def table_shapes(spec: DecoderSpec) -> dict[str, tuple[int, int]]:
    """[vocab_size, hidden_size] of the tables that a model has, by site."""
    sites = (EMBEDDING,) if has_tied_embeddings(spec) else (LM_HEAD, EMBEDDING)
    return dict.fromkeys(sites, (spec.vocab_size, spec.hidden_size))


def open_tables(spec: DecoderSpec, said: TableFormats) -> tuple[str, ...]:
    """Sites of tables that nothing was said of."""
    return tuple(site for site in table_shapes(spec) if site not in said.names)


def table_formats(
    request: BuildRequest, spec: DecoderSpec, scheme: Scheme, recipe: FormatRecipe | None
) -> TableFormats:
    """The formats that the options or the recipe say; of tied embeddings both are the same.

    Raises:
        RequestError: they contradict each other, or the recipe has an lm_head that the model has
            not.
        UnsupportedError: a format that cannot hold the table, or in fp32.
    """
    asked = request.tables
    said = TableFormats() if recipe is None else recipe.tables
    for site in asked.names.keys() & said.names.keys():
        raise RequestError(
            f"--recipe says what {site} is",
            field=TABLE_OPTIONS[site],
            remedy="Leave one of the two out",
        )
    tables = TableFormats(asked.lm_head or said.lm_head, asked.embedding or said.embedding)
    if has_tied_embeddings(spec):
        if said.lm_head is not None:
            raise RequestError(
                "the embeddings are tied: the model has one table for both",
                field=f"--recipe: {LM_HEAD}",
                remedy=f"Give the format of {EMBEDDING} alone",
            )
        if None not in (tables.lm_head, tables.embedding) and tables.lm_head != tables.embedding:
            raise RequestError(
                "the embeddings are tied to the lm_head, which has another format",
                field=TABLE_OPTIONS[EMBEDDING],
                remedy="Leave one of the two out",
            )
        tables = tables.tied()
    given = {LM_HEAD: tables.lm_head, EMBEDDING: tables.embedding}
    for field, one in ((TABLE_OPTIONS[site], one) for site, one in given.items()):
        if one is not None and one.is_quantized:
            _check(field, one, spec, scheme)
    return tables


def _check(field: str, one: SiteFormat, spec: DecoderSpec, scheme: Scheme) -> None:
    if scheme.dtype == "f32":
        raise UnsupportedError(
            f"{scheme.name} rounds nothing", field=field, remedy="Leave it out, or use --dtype bf16"
        )
    # A last group of int8 may be shorter.
    if one.weight != "i8" and (why := one.why_not(spec.vocab_size, spec.hidden_size)):
        fitting = [
            name
            for name, other in TABLE_FORMATS.items()
            if other.weight == "i8" or not other.why_not(spec.vocab_size, spec.hidden_size)
        ]
        raise UnsupportedError(
            f"the table {why}, which {one.name} needs",
            field=field,
            remedy=f"Use one of {', '.join(fitting)}",
        )
