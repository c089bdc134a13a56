"""Formats of the lm_head and the embeddings: what options and recipes say, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.builder.passes.tiny import VOCAB, Tiny, spec_of
from trtc.builder.request import BuildRequest
from trtc.builder.tables import table_formats, table_shapes
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.quant.recipe import FormatRecipe
from trtc.quant.scheme import SCHEMES
from trtc.quant.site_format import BF16, TABLE_FORMATS, TableFormats

IQ4, INT8 = TABLE_FORMATS["iq4"], TABLE_FORMATS["int8_g128"]


def settled(recipe: TableFormats | None = None, tied: bool = False, **options: Any) -> TableFormats:
    request = BuildRequest(model="", output=Path(), **options)
    request.check()
    spec = replace(spec_of(Tiny(tied=tied)), hidden_size=256)
    scheme = SCHEMES[options.get("dtype", "bf16")]
    given = None if recipe is None else FormatRecipe({}, recipe)
    return table_formats(request, spec, scheme, given)


def test_each_table_has_what_was_asked() -> None:
    assert settled() == TableFormats()
    assert settled(lm_head_dtype="iq4") == TableFormats(IQ4)
    assert settled(embedding_dtype="int8_g128") == TableFormats(None, INT8)
    assert settled(exact_lm_head=True) == TableFormats(BF16)
    assert settled(TableFormats(IQ4), embedding_dtype="int8_g128") == TableFormats(IQ4, INT8)


def test_tied_embeddings_are_one_table() -> None:
    assert settled(tied=True, lm_head_dtype="iq4") == TableFormats(IQ4, IQ4)
    assert settled(tied=True, embedding_dtype="iq4") == TableFormats(IQ4, IQ4)
    assert settled(TableFormats(None, INT8), tied=True) == TableFormats(INT8, INT8)
    assert set(table_shapes(spec_of(Tiny(tied=True)))) == {"embed_tokens"}
    assert table_shapes(spec_of(Tiny()))["lm_head"][0] == VOCAB
    with pytest.raises(RequestError, match=r"--embedding-dtype.*tied"):
        settled(tied=True, lm_head_dtype="iq4", embedding_dtype="int8_g128")
    with pytest.raises(RequestError, match=r"--recipe: lm_head.*embed_tokens"):
        settled(TableFormats(IQ4), tied=True)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"lm_head_dtype": "int4"},
            "--lm-head-dtype.*'int4'.*iq4, iq4_g16, int6_g128, int8_g128, bf16",
        ),
        ({"embedding_dtype": "fp8"}, "--embedding-dtype.*'fp8'"),
        ({"lm_head_dtype": "iq4", "exact_lm_head": True}, "--exact-lm-head"),
    ],
)
def test_what_contradicts_itself_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        settled(**options)


def test_what_the_model_cannot_have_is_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"--lm-head-dtype.*fp32 rounds nothing"):
        settled(lm_head_dtype="iq4", dtype="fp32")
    with pytest.raises(RequestError, match=r"--lm-head-dtype.*--recipe says"):
        settled(TableFormats(IQ4), lm_head_dtype="iq4")
    request = BuildRequest(model="", output=Path(), lm_head_dtype="iq4")
    spec = replace(spec_of(Tiny()), hidden_size=40)
    with pytest.raises(UnsupportedError, match=r"40 input features.*Use one of int8_g128, bf16"):
        table_formats(request, spec, SCHEMES["bf16"], None)
