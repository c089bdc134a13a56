"""Searches for recipes of a tiny model: scores against measured divergences; the same again."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.quant.test_calibrate import calibration_ids, wide_checkpoint
from tests.support.models import VOCAB_SIZE
from tests.support.torch_gpu import needs_torch_gpu
from trtc.protos.errors import EnvironmentFault
from trtc.protos.progress import Step
from trtc.quant.calibration_text import TokenSet
from trtc.quant.checkpoint_search import recipe_search
from trtc.quant.layer_source import WholeModel
from trtc.quant.recipe import FormatRecipe, recipe_named
from trtc.quant.recipe_divergence import Divergence, RecipeMeter
from trtc.quant.recipe_path import Scores
from trtc.quant.recipe_search import RecipeSearch
from trtc.quant.reference_model import load_model
from trtc.quant.site_format import BF16, TABLES, site_of

IDS = np.random.default_rng(7).integers(3, VOCAB_SIZE, (8, 32)).astype(np.int32)
HELDOUT = TokenSet("ids", "", tuple(IDS))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    directory = tmp_path_factory.mktemp("search")
    return wide_checkpoint("llama", directory), calibration_ids(directory / "ids.jsonl")


@pytest.fixture(scope="module")
def search(inputs: tuple[Path, Path]) -> Iterator[RecipeSearch]:
    with recipe_search(*inputs, HELDOUT, lambda step: None, TABLES) as found:
        yield found


def only(search: RecipeSearch, site: str, name: str) -> FormatRecipe:
    """One site in a format, all others unquantised."""
    sites = dict.fromkeys((site_of(linear) for linear in search.shapes), BF16.name)
    return recipe_named({**sites, site: name})


def test_scores_rank_as_measured_divergences_do(search: RecipeSearch) -> None:
    keys = [key for key in search.scores if key[1] in ("int4_g128", "iq4_g16", "int8_g128")]
    measured = [search.measure(only(search, *key)).mean for key in keys]
    scores = [search.scores[key] for key in keys]
    ranks = [np.argsort(np.argsort(values)) for values in (scores, measured)]
    assert np.corrcoef(ranks[0], ranks[1])[0, 1] > 0.9, "Spearman's correlation"
    for table in TABLES:
        of_table = [(scores[at], measured[at]) for at, key in enumerate(keys) if key[0] == table]
        assert len(of_table) == 2, "iq4_g16 and int8_g128"
        assert all(0.3 < score / found < 3 for score, found in of_table)
    assert 0.3 < sum(scores) / sum(measured) < 3


def test_an_unquantised_recipe_costs_nothing_and_weights_come_back(search: RecipeSearch) -> None:
    narrow = search.measure(search.path[0].recipe)
    assert narrow.mean > 0 < narrow.error
    nothing = search.measure(search.path[-1].recipe)
    assert not search.path[-1].recipe.is_quantized
    assert nothing.mean == pytest.approx(0, abs=1e-12)


def test_the_narrowest_recipe_within_a_divergence_is_found(search: RecipeSearch) -> None:
    narrow = search.measure(search.path[0].recipe)
    assert search.within_kl(2 * narrow.mean) == search.path[0]
    found = search.within_kl(0.5 * narrow.mean)
    assert found is not None and found.bits > search.path[0].bits
    measured = search.measure(found.recipe)
    assert measured.mean + measured.error <= 0.5 * narrow.mean
    before = search.path[search.path.index(found) - 1]
    worse = search.measure(before.recipe)
    assert worse.mean + worse.error > 0.5 * narrow.mean
    assert search.within_kl(0.0) is None


def test_recipes_that_are_measured_at_once_cost_what_each_does_alone(
    search: RecipeSearch,
) -> None:
    chosen = search.within_bits(5.0)
    frontier = search.frontier(chosen)
    bits = [point.bits for point, _ in frontier]
    assert bits == sorted(set(bits)) and len(bits) >= 11
    assert chosen in [point for point, _ in frontier]
    for point, divergence in (frontier[0], frontier[3], frontier[-1]):
        assert search.measure(point.recipe) == divergence


def test_logits_in_parts_give_the_same_divergences(
    search: RecipeSearch, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, narrow = search._meter, search.path[0].recipe
    (wanted,) = whole.measure([narrow])
    monkeypatch.setattr("trtc.quant.layerwise._LOGIT_BYTES", 5 * 4 * VOCAB_SIZE)
    parts = RecipeMeter(
        whole._source,
        whole._texts,
        whole._inputs | whole._outputs,
        whole._rounded,
        lambda step: None,
    )
    (found,) = parts.measure([narrow])
    assert [len(part) for part in parts._reference[0]] == [5] * 6 + [2]
    assert found.mean == pytest.approx(wanted.mean, rel=1e-4)
    assert found.error == pytest.approx(wanted.error, rel=1e-4)


@pytest.mark.gpu
def test_a_gpu_finds_the_same_again_and_what_a_cpu_does(
    inputs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    needs_torch_gpu()

    def found() -> tuple[Scores, Divergence]:
        with recipe_search(*inputs, HELDOUT, lambda step: None, TABLES) as one:
            return one.scores, one.measure(one.path[0].recipe)

    scores, divergence = found()
    assert found() == (scores, divergence)
    monkeypatch.setattr("trtc.quant.device.visible_gpus", lambda: ())
    wanted, of_cpu = found()
    assert divergence.mean == pytest.approx(of_cpu.mean, rel=0.1)
    # Labels are others.
    assert sum(scores.values()) == pytest.approx(sum(wanted.values()), rel=0.3)


def test_an_interrupted_search_goes_on_and_finds_the_same(
    search: RecipeSearch, inputs: tuple[Path, Path], tmp_path: Path
) -> None:
    def interrupted(when: str) -> list[Step]:
        steps: list[Step] = []

        def interrupt(step: Step) -> None:
            steps.append(step)
            if when in step and step.done == 1:
                raise KeyboardInterrupt

        with (
            pytest.raises(KeyboardInterrupt),
            recipe_search(*inputs, HELDOUT, interrupt, TABLES, tmp_path),
        ):
            pass
        return steps

    interrupted("iq4_g16")
    rounding = [step for step in interrupted("forward") if "rounding all" in step]
    assert [step.done for step in rounding] == [2, 2, 1, 2, 0, 1, 2], rounding
    steps: list[Step] = []
    with recipe_search(*inputs, HELDOUT, steps.append, TABLES, tmp_path) as again:
        assert again.scores == search.scores
        chosen = again.within_bits(5.0)
        assert chosen == search.within_bits(5.0)
        known = search.frontier(chosen)
        assert all(point in known for point in again.frontier(chosen))
    scoring = "scoring 6 formats of every site"
    assert any(scoring in step for step in steps)
    measuring = [step.done for step in steps if "measuring" in step]
    assert measuring == [0, 1, 2], "all recipes in one pass over the layers"
    steps.clear()
    with recipe_search(*inputs, HELDOUT, steps.append, TABLES, tmp_path) as saved:
        assert saved.scores == search.scores
    assert not any(scoring in step for step in steps)


def test_a_model_that_is_in_memory_whole_gives_the_same(
    search: RecipeSearch, inputs: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One without a tokenizer, which writes its own text, is."""
    models = []

    def whole(model_dir: Path, dtype: str) -> WholeModel:
        models.append(load_model(model_dir, dtype))
        return WholeModel(models[-1])

    monkeypatch.setattr("trtc.quant.layer_source.LayeredModel", whole)
    narrow = search.path[0].recipe
    with recipe_search(*inputs, HELDOUT, lambda step: None, TABLES) as found:
        assert found.scores == search.scores
        assert found.measure(narrow) == search.measure(narrow)
    (model,) = models
    before = load_model(inputs[0], "float32").state_dict()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, before[name]), "it has its own weights again"


def test_a_disk_without_the_room_is_refused_before_the_work(
    inputs: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    steps: list[Step] = []
    searching = recipe_search(*inputs, HELDOUT, steps.append, TABLES, tmp_path / "journal")
    with pytest.raises(EnvironmentFault, match=r"takes about 0\.\d GB of disk, and 0\.0 GB are"):
        searching.__enter__()
    assert not steps
