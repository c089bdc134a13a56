"""Recipes: what is read, what is refused by name, and what they are as schemes."""

import json
from pathlib import Path

import pytest

from tests.support.recipes import in_turn, write_recipe
from trtc.protos.errors import RequestError, UnsupportedError
from trtc.quant.recipe import FormatRecipe, read_recipe
from trtc.quant.site_format import FORMATS

LAYER = "model.layers.0"
SHAPES = {
    f"{LAYER}.self_attn.q_proj": (256, 256),
    f"{LAYER}.self_attn.k_proj": (128, 256),
    f"{LAYER}.self_attn.v_proj": (128, 256),
    f"{LAYER}.self_attn.o_proj": (256, 256),
    f"{LAYER}.mlp.gate_proj": (768, 256),
    f"{LAYER}.mlp.up_proj": (768, 256),
    f"{LAYER}.mlp.down_proj": (256, 96),
}
GOOD = in_turn(1, "int4_g128", "int8_g128", "bf16", "fp8")


def recipe_of(sites: dict[str, str]) -> FormatRecipe:
    return FormatRecipe({site: FORMATS[name] for site, name in sites.items()})


def test_a_file_gives_every_linear_its_format(tmp_path: Path) -> None:
    recipe = read_recipe(write_recipe(tmp_path / "recipe.json", GOOD))
    found = {name: one.name for name, one in recipe.of_linears(SHAPES).items()}
    assert list(found) == list(SHAPES)
    assert found[f"{LAYER}.self_attn.k_proj"] == "int4_g128"
    assert found[f"{LAYER}.mlp.up_proj"] == "bf16"
    scheme = recipe.scheme
    assert (scheme.name, scheme.weight, scheme.group_size) == ("mixed", "i4", 128)
    assert {part.weight for part in recipe.parts} == {"i4", "i8", "bf16", "f8e4m3"}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    recipe = recipe_of(GOOD)
    path = tmp_path / "recipe.json"
    path.write_bytes(recipe.to_json())
    assert read_recipe(path) == recipe
    assert json.loads(path.read_text())["sites"] == GOOD


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "--recipe: .*recipe.json"),
        ('{"trtc_recipe": 2, "sites": {}}', r"2.*trtc_recipe"),
        ('{"sites": {}}', "trtc_recipe"),
        ('{"trtc_recipe": 1, "sites": {}, "extra": 1}', "extra"),
        ('{"trtc_recipe": 1, "sites": {"a": 4}}', "sites"),
        ('{"trtc_recipe": 1, "sites": {"a": "int5"}}', "'int5' of site 'a'.*int4_g128"),
        ('{"trtc_recipe": 1, "sites": {"a": "bf16"}}', "quantises no site"),
    ],
)
def test_files_that_are_no_recipes_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "recipe.json"
    path.write_text(content)
    with pytest.raises(RequestError, match=message):
        read_recipe(path)


def test_a_recipe_may_have_tables(tmp_path: Path) -> None:
    sites = {**GOOD, "lm_head": "iq4", "embed_tokens": "int8_g128"}
    recipe = read_recipe(write_recipe(tmp_path / "recipe.json", sites))
    assert recipe.names == sites and list(recipe.of_linears(SHAPES)) == list(SHAPES)
    wrong = write_recipe(tmp_path / "wrong.json", {**GOOD, "lm_head": "int8"})
    with pytest.raises(
        RequestError, match=r"'int8' of site 'lm_head'.*iq4, iq4_g16, int6_g128, int8_g128"
    ):
        read_recipe(wrong)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=r"nowhere\.json"):
        read_recipe(tmp_path / "nowhere.json")


def test_recipes_of_other_models_are_refused() -> None:
    with pytest.raises(RequestError, match=r"no site 'model\.layers\.1\.self_attn\.qkv_proj'.*0"):
        recipe_of(in_turn(2, "int4_g32")).of_linears(SHAPES)
    some = {site: name for site, name in GOOD.items() if "mlp" not in site}
    with pytest.raises(RequestError, match=r"no format for .*gate_up_proj, .*down_proj"):
        recipe_of(some).of_linears(SHAPES)


def test_a_linear_that_its_format_cannot_hold_is_named() -> None:
    wrong = {**GOOD, f"{LAYER}.mlp.down_proj": "int4_g64"}
    with pytest.raises(UnsupportedError, match=r"down_proj: has 96 input.*int4_g64.*int4_g32, "):
        recipe_of(wrong).of_linears(SHAPES)
