"""builder/family_support.py: the list of families says what builds do."""

from typing import Any

import pytest

from tests.builder.test_families import config_of
from tests.support import families_page
from tests.support.models import FAMILIES as TINY
from trtc.builder.families.features import FEATURES, features
from trtc.builder.families.registry import FAMILIES, decoder_spec
from trtc.builder.family_support import SCHEMES_BUILT, TARGETS_SHOWN, FamilyRow, family_rows


@pytest.fixture(scope="module")
def rows() -> dict[str, FamilyRow]:
    return {row.architecture: row for row in family_rows()}


def test_every_architecture_has_a_row(rows: dict[str, FamilyRow]) -> None:
    assert set(rows) == set(FAMILIES)
    for row in rows.values():
        assert set(row.targets) <= set(TARGETS_SHOWN)
        missing = set(SCHEMES_BUILT) - set(row.targets["cpu"])
        unquantized = set(SCHEMES_BUILT) - {"fp32", "bf16"}
        assert missing == (unquantized if row.family == "gpt_oss" else {"nvfp4"})


def test_the_table_of_families_is_current(rows: dict[str, FamilyRow]) -> None:
    expected = families_page.page(rows.values())
    assert families_page.PAGE.read_text() == expected, "run python -m tests.support.families_page"


def test_what_targets_lack(rows: dict[str, FamilyRow]) -> None:
    assert set(rows["Lfm2ForCausalLM"].targets) == {"cpu", "cuda"}
    assert "nvfp4" in rows["LlamaForCausalLM"].targets["tensorrt"]
    assert "nvfp4" not in rows["MixtralForCausalLM"].targets["tensorrt"]


def test_every_feature_is_in_some_tested_family() -> None:
    tested = {name for family in TINY for name in features(decoder_spec(config_of(family), 64))}
    assert set(FEATURES) == tested


@pytest.mark.parametrize(
    ("family", "fields", "expected"),
    [
        ("llama", {}, ()),
        ("olmo2", {"attention_bias": False}, ("norms after", "no norms before")),
        ("cohere2", {}, ("LayerNorm", "parallel residual", "layers without rotary embedding")),
        ("nemotron", {}, ("LayerNorm", "norm weights plus 1", "MLP without gate")),
        ("mixtral", {}, ("routed experts",)),
    ],
)
def test_features_of_a_family(
    family: str, fields: dict[str, Any], expected: tuple[str, ...]
) -> None:
    found = features(decoder_spec(config_of(family, **fields), 64))
    assert set(expected) <= set(found) and (expected or not found)
