"""--family: a user's description of a model, and how wrong ones are refused."""

import dataclasses
import inspect
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trtc.builder.spec
import trtc.families
from tests.builder.test_families import config_of
from tests.support.engines import build_tiny
from tests.support.evaluate import LIMITS, PAGE_SIZE
from tests.support.models import FAMILIES, random_prompt, tiny_checkpoint, transformers_logits
from tests.support.steps import Stepper
from trtc.builder.dry_run import dry_run
from trtc.builder.evaluator import Evaluator
from trtc.builder.families.own import load_family
from trtc.builder.families.registry import decoder_spec
from trtc.builder.families.spec_check import check_spec
from trtc.builder.graph import GraphRequest, build_graph
from trtc.builder.request import BuildRequest
from trtc.builder.source import open_source
from trtc.builder.spec import NO_ROPE, DecoderSpec, LinearSpec, NormSpec
from trtc.protos.errors import CheckpointError, RequestError

MINE = """
from trtc.families import Config, DecoderSpec, Dense, dense

def family(config: Config, max_seq_len: int) -> DecoderSpec:
    return dense(config, max_seq_len, Dense("mine", qkv_bias=config.flag("biased", True)))
"""


def write(directory: Path, text: str = MINE) -> Path:
    path = directory / "mine.py"
    path.write_text(text)
    return path


def strange_checkpoint(directory: Path) -> Path:
    """A Qwen2 that no longer says so."""
    path = tiny_checkpoint("qwen2", directory, use_sliding_window=False)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "architectures": ["MineForCausalLM"]}))
    return path


def test_a_model_of_its_own_builds_and_says_by_what(tmp_path: Path) -> None:
    checkpoint, mine = strange_checkpoint(tmp_path), write(tmp_path)
    manifest = build_tiny(checkpoint, tmp_path / "engine", family=mine).manifest
    assert (manifest.model.family, manifest.model.architecture) == ("mine", "MineForCausalLM")
    assert re.fullmatch(r"mine\.py, sha256 [0-9a-f]{64}", manifest.provenance.options["family"])
    found = dry_run(BuildRequest(str(checkpoint), tmp_path / "e", family=mine))
    assert found.family == "mine" and found.builds


def test_its_logits_are_those_of_the_model(tmp_path: Path) -> None:
    known = tiny_checkpoint("qwen2", tmp_path / "known", use_sliding_window=False)
    own = strange_checkpoint(tmp_path)
    source = open_source(
        BuildRequest(str(own), tmp_path / "e", dtype="fp32", family=write(tmp_path))
    )
    request = GraphRequest(source.scheme, "f32", LIMITS, None, PAGE_SIZE)
    module = build_graph(source.spec, request, source.reader)
    prompt = random_prompt(40)
    found = Stepper(Evaluator(module, source.reader).run, module.kv).prefill(prompt, 23)
    np.testing.assert_allclose(found, transformers_logits(known, prompt), rtol=0, atol=1e-4)


def test_tensors_that_it_promises_must_be_there(tmp_path: Path) -> None:
    checkpoint = tiny_checkpoint("llama", tmp_path)
    with pytest.raises(CheckpointError, match=r"tensors are missing: .*q_proj\.bias"):
        open_source(BuildRequest(str(checkpoint), tmp_path / "e", family=write(tmp_path)))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def other(): pass", "has no function family"),
        ("family = 3", "has no function family"),
        ("def family(", "SyntaxError"),
        ("import not_there_at_all", "ModuleNotFoundError"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_has_no_family(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        load_family(write(tmp_path, text))
    assert "mine.py" in caught.value.field and "\n" not in str(caught.value)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="there is no such file"):
        load_family(tmp_path / "none.py")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("return None", "returns None, not a DecoderSpec"),
        ("return {}", "returns an object of 0, not a DecoderSpec"),
        ("return config.fields['nothing']", "KeyError: 'nothing'"),
        ("return config.integer('nothing')", "nothing: is missing"),
    ],
)
def test_a_function_that_gives_no_spec(body: str, message: str, tmp_path: Path) -> None:
    path = write(tmp_path, f"def family(config, max_seq_len):\n    {body}\n")
    with pytest.raises((RequestError, CheckpointError), match=message):
        decoder_spec(config_of("llama"), 64, load_family(path))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_families_of_trtc_pass(family: str) -> None:
    check_spec(decoder_spec(config_of(family), 64), "config.json")


Change = Callable[[DecoderSpec], DecoderSpec]


GATE = LinearSpec("model.layers.0.mlp.shared_expert_gate", 64, 1)


def at(place: str, value: Any) -> Change:
    """Replace one field, given by its place."""

    def changed(part: Any, names: list[str]) -> Any:
        name, *rest = names
        if isinstance(part, tuple):
            index = int(name)
            return (*part[:index], changed(part[index], rest), *part[index + 1 :])
        inner = value if not rest else changed(getattr(part, name), rest)
        return dataclasses.replace(part, **{name: inner})

    return lambda spec: changed(spec, re.findall(r"\w+", place))


@pytest.mark.parametrize(
    ("family", "place", "value", "message"),
    [
        ("llama", "vocab_size", "many", "is 'many', not int"),
        ("llama", "vocab_size", True, "is True, not int"),
        ("llama", "vocab_size", 2**40, "not from 1 to"),
        ("llama", "hidden_size", -64, "is -64, not from 1 to"),
        ("llama", "layers", (), "is 0, not from 1 to 1024"),
        ("llama", "layers", [], "is a list of 0, not a tuple of LayerSpec"),
        ("llama", "embedding", 3, "is 3, not str"),
        ("llama", "logit_softcap", 0.0, "is 0.0, not a positive number"),
        ("llama", "final_norm.eps", math.nan, "is nan, not a finite number"),
        ("llama", "lm_head.in_features", 8, "is 8, and the layer makes it 64"),
        ("llama", "layers[1].mixer.num_heads", 10**9, "not from 1 to 4096"),
        ("llama", "layers[1].mixer.num_kv_heads", 3, "3 does not divide the 4 heads"),
        ("llama", "layers[1].mixer.k.out_features", 64, "is 64, and the layer makes it 32"),
        ("llama", "layers[0].mixer.o.in_features", 7, "is 7, and the layer makes it 64"),
        ("llama", "layers[0].mixer.scale", -1.0, "is -1.0, not a positive number"),
        ("llama", "layers[0].mixer.window", 0, "is 0, not from 1 to"),
        ("llama", "layers[0].mixer.qk_norm", "column", "'head' or 'row'"),
        ("llama", "layers[0].mixer.rope.rotary_dim", 5, "is 5, not a pair of halves"),
        ("llama", "layers[0].mixer.rope.rotary_dim", 32, "is 32, not from 2 to 16"),
        ("llama", "layers[0].mixer.rope.inv_freq", (1.0,), "is 1, and rotary_dim makes it 8"),
        ("llama", "layers[0].mixer.rope.inv_freq", (math.inf,) * 8, "not finite"),
        ("llama", "layers[0].mixer.q.rows", (0, 3), "not 64 rows"),
        ("llama", "layers[0].mlp.activation", "gelu", "'silu' or 'gelu_tanh' or 'relu2'"),
        ("llama", "layers[0].mlp.activation", "relu2", "beside a gate"),
        ("llama", "layers[0].mlp.down.in_features", 5, "is 5, and the layer makes it 96"),
        ("llama", "layers[0].mlp", 1, "is 1, not DenseMlpSpec or MoeMlpSpec or None"),
        ("nemotron_h", "layers[0].mixer", None, "is None, and a layer has a mixer, an MLP or both"),
        ("nemotron_h_moe", "layers[0].mlp.latent[1].in_features", 7, "the layer makes it 32"),
        ("nemotron_h_moe", "layers[0].mlp.experts[1].gate", GATE, "some experts of the layer"),
        ("nemotron_h_moe", "layers[0].mlp.experts[0].limit", 7.0, "for experts with a gate"),
        ("llama", "layers[0].attention_norm", "norm", "is 'norm', not NormSpec or None"),
        ("cohere", "layers[0].mixer.k.interleaved", None, "is not that of q"),
        ("cohere", "layers[0].mixer.rope", NO_ROPE, "is 16, and rope makes it 2"),
        ("deepseek_v32", "layers[0].mixer.indexer.q.in_features", 5, "the layer makes it 40"),
        ("deepseek_v32", "layers[0].mixer.indexer.head_dim", 12, "is 12, not from 16 to"),
        ("deepseek_v32", "layers[0].mixer.indexer.top_k", 0, "is 0, not from 1 to 65536"),
        (
            "deepseek_v32",
            "layers[0].mixer.indexer.k_norm",
            NormSpec("a", 1.0),
            "LayerNorm with a bias",
        ),
        ("deepseek_v32", "layers[1].mixer.selection_layer", 0, "is given beside an indexer"),
        ("glm_moe_dsa", "layers[3].mixer.selection_layer", 3, "is 3, not from 0 to 2"),
        ("glm_moe_dsa", "layers[3].mixer.selection_layer", 1, "is 1, which has no indexer"),
        ("glm_moe_dsa", "layers[0].mixer.indexer.k.interleaved", None, "that of q and k_norm"),
        ("qwen3", "layers[0].mixer.q_norm.centered", True, "RMS norms only"),
        ("olmo2", "layers[0].mixer.norm_after_rope", True, "norms over all heads are before"),
        ("mixtral", "layers[0].mlp.router.top_k", 5, "is 5, not from 1 to 4"),
        ("mixtral", "layers[0].mlp.router.num_groups", 3, "3 does not divide the 4 experts"),
        ("mixtral", "layers[0].mlp.router.num_groups", 4, "a group of one expert has no top2_sum"),
        ("mixtral", "layers[0].mlp.router.top_groups", 2, "is 2, not from 1 to 1"),
        ("mixtral", "layers[0].mlp.router.epsilon", -1.0, "is -1.0, a negative number"),
        ("phimoe", "layers[0].mlp.router.margin", -1.0, "is -1.0, a negative number"),
        ("glm4_moe", "layers[1].mlp.router.score", "sparsemixer", "neither a bias nor groups"),
        ("mixtral", "layers[0].mlp.router.scale", 0.0, "is 0.0, not a positive number"),
        (
            "mixtral",
            "layers[0].mlp.router.score",
            "tanh",
            "'sigmoid' or 'sparsemixer'",
        ),
        ("mixtral", "layers[0].mlp.shared_gate", GATE, "there is no shared expert"),
        (
            "qwen2_moe",
            "layers[1].mlp.shared_gate.out_features",
            2,
            "is 2, and the layer makes it 1",
        ),
        ("qwen2_moe", "layers[1].mlp.shared.down.out_features", 2, "and the layer makes it 64"),
        ("mixtral", "layers[0].mlp.experts", (), "is 0, not from 1 to"),
        ("gemma4_moe", "layers[0].mlp.shared", None, "is None, and norms are for"),
        ("gemma4_moe", "layers[0].mlp.shared_gate", GATE, "branches with norms have none"),
        ("gemma4_moe", "layers[0].mlp.norms.router.centered", True, "RMS norms only"),
        ("llama", "layers[0].mixer.chunked", True, "is True, and there is no window"),
        ("jamba", "layers[0].mixer.taps", 1, "is 1, not from 2 to 64"),
        ("jamba", "layers[0].mixer.state_size", 513, "is 513, not from 1 to 512"),
        ("jamba", "layers[0].mixer.c.out_features", 7, "the layer makes it 8"),
        ("jamba", "layers[0].mixer.dt.in_features", 7, "the layer makes it 6"),
        ("jamba", "layers[0].mixer.b_norm.centered", True, "RMS norms only"),
        ("lfm2", "layers[0].mixer.taps", 1, "is 1, not from 2 to 64"),
        ("qwen3_5", "layers[0].mixer.taps", 65, "is 65, not from 2 to 64"),
        ("granite_moe_hybrid", "layers[0].mixer.num_groups", 3, "3 does not divide the 8 heads"),
        ("granite_moe_hybrid", "layers[0].mixer.state_size", 513, "is 513, not from 1 to 512"),
        ("granite_moe_hybrid", "layers[0].mixer.head_dim", 513, "is 513, not from 1 to 512"),
        ("granite_moe_hybrid", "layers[0].mixer.taps", 1, "is 1, not from 2 to 64"),
        ("granite_moe_hybrid", "layers[0].mixer.dt.out_features", 7, "the layer makes it 8"),
        ("granite_moe_hybrid", "layers[0].mixer.norm.centered", True, "RMS norms only"),
        ("granite_moe_hybrid", "layers[0].mixer.dt_max", 0.0, "is 0.0, and dt_min 0.0"),
        ("qwen3_5", "layers[0].mixer.num_key_heads", 3, "3 does not divide the 4 value heads"),
        ("olmo_hybrid", "layers[0].mixer.write_scale", 2.5, "is 2.5, not from 0 to 2"),
        ("qwen3_5", "layers[0].mixer.key_dim", 513, "is 513, not from 1 to 512"),
        ("qwen3_5", "layers[0].mixer.z.out_features", 7, "is 7, and the layer makes it 96"),
        ("qwen3_5", "layers[1].mixer.gate.out_features", 7, "is 7, and the layer makes it 128"),
        ("qwen3_5", "layers[1].mixer.q.grouped.parts", ((0, 65),), "has (0, 65) of 64 rows"),
        ("qwen3_5", "layers[1].mixer.q.grouped.parts", ((0, 48),), "are 48 rows, and 128 are no"),
        ("qwen3_5", "layers[1].mixer.q.rows", (0, 128), "is given beside grouped"),
    ],
)
def test_a_wrong_field_is_named_by_its_place(
    family: str, place: str, value: Any, message: str
) -> None:
    spec = at(place, value)(decoder_spec(config_of(family), 64))
    with pytest.raises(RequestError, match=re.escape(message)) as caught:
        check_spec(spec, "--family mine.py")
    # Both sides of a disagreement are right to name.
    last = place.rpartition(".")[2].partition("[")[0]
    assert last in caught.value.field or "makes it" in message


def test_the_public_types_are_those_of_a_spec() -> None:
    types = {
        name
        for name, kind in vars(trtc.builder.spec).items()
        if dataclasses.is_dataclass(kind) and inspect.isclass(kind)
    }
    assert types <= set(trtc.families.__all__)
    assert all(hasattr(trtc.families, name) for name in trtc.families.__all__)
