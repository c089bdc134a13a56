"""`trtc quantize`, `trtc eval` and `trtc compare` as a user types them."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.support.engines import build_tiny
from tests.support.models import tiny_checkpoint
from tests.support.recipes import in_turn, write_recipe
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.cli import main

MODEL = Path(__file__).parents[2] / "examples" / "models" / "pyllama-draft"
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def trtc(capsys: pytest.CaptureFixture[str]) -> Run:
    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        status = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return status, out, err

    return run


def text_of(path: Path, paragraphs: int = 700) -> Path:
    words = sorted({word for word in Path(__file__).read_text().split() if word.isalpha()})
    rng = np.random.default_rng(0)
    lines = (" ".join(rng.choice(words, 12)) for _ in range(paragraphs))
    path.write_text("\n".join(lines))
    return path


def test_a_scheme_or_a_recipe_is_needed(trtc: Run, tmp_path: Path) -> None:
    arguments = ("quantize", "--model", MODEL, "--output", tmp_path / "out")
    status, _, err = trtc(*arguments)
    assert status == 2 and "--dtype: is missing" in err and "--recipe" in err
    recipe = write_recipe(tmp_path / "recipe.json", in_turn(3, "int4_g128"))
    status, _, err = trtc(*arguments, "--recipe", recipe)
    assert status == 2 and "no site 'model.layers.2.self_attn.qkv_proj'" in err
    status, _, err = trtc(*arguments, "--recipe", recipe, "--dtype", "int4")
    assert status == 2 and "--dtype: says how" in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("table", ["lm_head", "embed_tokens"])
def test_quantize_refuses_recipes_with_tables_that_layouts_do_not_hold(
    trtc: Run, table: str, tmp_path: Path
) -> None:
    sites = {**in_turn(2, "int4_g128"), table: "int8_g128"}
    recipe = write_recipe(tmp_path / "recipe.json", sites)
    status, _, err = trtc(
        "quantize", "--model", MODEL, "--output", tmp_path / "out", "--recipe", recipe
    )
    option = {"lm_head": "--lm-head-dtype", "embed_tokens": "--embedding-dtype"}[table]
    assert status == 2 and f"--recipe: {table}: " in err
    assert f"trtc build {option} int8_g128" in " ".join(err.split())
    assert not (tmp_path / "out").exists()


def test_quantize_says_that_activations_are_rotated(trtc: Run, tmp_path: Path) -> None:
    said = "a reader has to apply transform_config"
    for scheme, is_rotated in (("int8_hadamard", True), ("int8_dynamic", False)):
        output = tmp_path / scheme
        status, out, _ = trtc("quantize", "--model", MODEL, "--dtype", scheme, "--output", output)
        assert status == 0 and (said in " ".join(out.split())) is is_rotated


def test_quantize(trtc: Run, tmp_path: Path) -> None:
    output = tmp_path / "out"
    calib = text_of(tmp_path / "calib.txt")
    arguments = ("quantize", "--model", MODEL, "--dtype", "fp8", "--output", output)
    status, out, err = trtc(*arguments, "--calib", calib, "--json")
    assert status == 0, err
    document = json.loads(out)
    assert document["output"] == str(output)
    assert document["source"] == "calib.txt"
    assert document["tokens"] >= 4096
    assert {"layer", "sqnr_db", "max_abs_error"} == set(document["layers"][0])
    index = json.loads((output / "model.safetensors.index.json").read_text())
    assert {path.name for path in output.glob("*.safetensors")} == set(index["weight_map"].values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calib.txt", "out"]

    status, _, err = trtc(*arguments)
    assert (status, "exists already" in err) == (2, True)

    status, out, _ = trtc(*arguments, "--calib", calib, "--force", "--kv-dtype", "fp8")
    assert status == 0
    assert "model.layers." in out and f"wrote {output}" in out.replace("\n", "")
    written = json.loads((output / "hf_quant_config.json").read_text())
    assert written["quantization"]["kv_cache_quant_algo"] == "FP8"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dtype", "fp7"), "--dtype: 'fp7' is not a scheme"),
        (("--dtype", "bf16"), "nothing to quantise to"),
        (("--dtype", "fp8_weights"), "nothing to quantise to"),
        (("--dtype", "fp8", "--kv-dtype", "int8"), "--kv-dtype: is 'int8'"),
        (("--dtype", "fp8", "--calib", "/absent.txt"), "--calib /absent.txt: cannot be read"),
    ],
)
def test_quantize_refuses(
    trtc: Run, tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    output = tmp_path / "out"
    status, _, err = trtc("quantize", "--model", MODEL, "--output", output, *arguments)
    assert status == 2
    assert message in err
    assert list(tmp_path.iterdir()) == []


def test_quantize_leaves_nothing_when_it_fails(trtc: Run, tmp_path: Path) -> None:
    (tmp_path / "few.txt").write_text("too few words")
    status, _, err = trtc(
        "quantize", "--model", MODEL, "--output", tmp_path / "out", "--dtype", "fp8",
        "--calib", tmp_path / "few.txt",
    )  # fmt: skip
    assert status == 2
    assert "Give at least 4096 tokens" in err
    assert [path.name for path in tmp_path.iterdir()] == ["few.txt"]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundled model in bf16."""
    output = tmp_path_factory.mktemp("engines") / "draft"
    build(BuildRequest(str(MODEL), output, dtype="bf16", target="cpu", max_seq_len=256))
    return output


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of 160 tokens, without a tokenizer."""
    return tiny_checkpoint("llama", tmp_path_factory.mktemp("tiny"), "bfloat16")


@pytest.fixture(scope="module")
def tiny_engine(tiny: Path) -> Path:
    """Of `tiny`, for sequences of 64 tokens."""
    return build_tiny(tiny, tiny.parent / "engine", "bf16", max_seq_len=64).path


def test_eval_against_a_reference(trtc: Run, engine: Path, tmp_path: Path) -> None:
    text = text_of(tmp_path / "text.txt", 16)
    status, out, err = trtc("eval", engine, "--text", text, "--reference", MODEL, "--json")
    assert status == 0, err
    found = json.loads(out)
    assert found["tokens"] > 256
    assert 0 <= found["kl"] < 0.01
    assert found["top1"] > 0.9
    assert found["perplexity"] == pytest.approx(found["reference_perplexity"], rel=0.02)


def test_eval_without_a_reference(trtc: Run, engine: Path, tmp_path: Path) -> None:
    text = text_of(tmp_path / "text.txt", 16)
    status, out, _ = trtc("eval", engine, "--text", text, "--json", "--max-tokens", "256")
    found = json.loads(out)
    assert status == 0
    assert found["tokens"] == 255
    assert (found["kl"], found["top1"]) == (None, None)
    _, table, _ = trtc("eval", engine, "--text", text, "--max-tokens", "256")
    assert f"{found['perplexity']:.4f}" in table
    assert "KL" not in table


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"\xff", "line 1 is not UTF-8"), (b"\n\n", "no text in it")],
)
def test_eval_refuses_text(
    trtc: Run, engine: Path, tmp_path: Path, content: bytes, message: str
) -> None:
    (tmp_path / "text.txt").write_bytes(content)
    status, _, err = trtc("eval", engine, "--text", tmp_path / "text.txt", "--max-tokens", "64")
    assert status == 2
    assert message in err


def test_eval_of_no_engine(trtc: Run, tmp_path: Path) -> None:
    status, _, err = trtc("eval", tmp_path)
    assert status == 4
    assert "manifest.json cannot be read" in err


def test_eval_without_a_tokenizer_takes_token_ids(
    trtc: Run, tiny: Path, tiny_engine: Path, tmp_path: Path
) -> None:
    status, _, err = trtc("eval", tiny_engine)
    assert (status, "no tokenizer" in err) == (6, True)

    ids = tmp_path / "ids.jsonl"
    ids.write_text(json.dumps({"token_ids": [n % 150 + 3 for n in range(100)]}))
    status, out, err = trtc("eval", tiny_engine, "--text", ids, "--reference", tiny, "--json")
    assert status == 0, err
    # Windows of 64 and 36 tokens, the first of each not predicted.
    assert json.loads(out)["tokens"] == 63 + 35


@pytest.fixture(scope="module")
def wide_engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model in fp32, under the same name."""
    output = tmp_path_factory.mktemp("wide") / "draft"
    request = BuildRequest(
        str(MODEL), output, dtype="fp32", target="cpu", max_seq_len=256, eval_tokens=0
    )
    build(request)
    return output


def test_compare(trtc: Run, engine: Path, wide_engine: Path, tmp_path: Path) -> None:
    """Beside fp32 an engine is where `trtc eval` says that it is beside the checkpoint."""
    text, page = text_of(tmp_path / "text.txt", 16), tmp_path / "page.html"
    arguments = ("compare", wide_engine, engine, "--text", text)
    status, out, err = trtc(*arguments, "--json", "--page", page)
    assert status == 0, err
    found = json.loads(out)
    _, out, _ = trtc("eval", engine, "--text", text, "--reference", MODEL, "--json")
    expected = json.loads(out)
    assert found["tokens"] == expected["tokens"] == sum(one["tokens"] for one in found["bands"])
    assert found["kl"] == pytest.approx(expected["kl"], rel=0.05)
    assert found["top1"] == pytest.approx(expected["top1"], abs=0.01)
    assert found["perplexities"] == pytest.approx(
        [expected["reference_perplexity"], expected["perplexity"]], rel=1e-3
    )
    assert [one["prompt"] for one in found["continuations"]] == list(
        range(len(found["continuations"]))
    )
    shown = page.read_text()
    assert str(engine) in shown and "By position" in shown and "Where their texts part" in shown
    assert "<script" not in shown

    status, table, _ = trtc(*arguments, "--max-tokens", "64")
    assert status == 0 and "63 tokens: KL 0.0" in table and "tokens 32-63" in table


def test_compare_of_an_engine_with_itself(trtc: Run, engine: Path) -> None:
    status, out, _ = trtc("compare", engine, engine, "--max-tokens", "64", "--json")
    found = json.loads(out)
    assert (status, found["kl"], found["top1"], found["splits"]) == (0, 0.0, 1.0, [])
    assert all(one["choices"] is None for one in found["continuations"])
    status, _, err = trtc("compare", engine, engine, "--page", "/absent/page.html")
    assert status == 2 and "--page: is in no directory" in err


def test_compare_refuses_another_vocabulary(trtc: Run, engine: Path, tiny_engine: Path) -> None:
    status, _, err = trtc("compare", engine, tiny_engine)
    assert status == 2 and f"{tiny_engine}: vocabulary: has" in err
    assert "engines of one model" in err
