"""A CUDA engine of several ranks on the CPU: each its own weights, pool and launches, interpreted,
meeting at collectives; against the graph of the whole model.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import safetensors.numpy

from tests.support.caches import kv_heads
from tests.support.cuda_engines import lower_ranks, stand_in_for_compiler
from tests.support.engines import NUM_PAGES, engine_stepper
from tests.support.models import random_prompt, tiny_checkpoint
from tests.support.steps import Stepper
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest
from trtc.builder.targets import cuda_lowering
from trtc.protos.kv import CacheLayout
from trtc.protos.manifest import Limits, read_manifest
from trtc.quant.scheme import SCHEMES
from trtc.runtime.executors.base import Float32s, StepBatch
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.integrity.verify import verify_files
from trtc.runtime.sampling.sampler import SamplingBatch

needs_triton()


ONE_LAYER = {"num_hidden_layers": 1}


class AllRanks:
    """Ranks that run the same steps at once, and must give the same."""

    def __init__(self, executors: tuple[CudaExecutor, ...]) -> None:
        self._executors = executors

    @property
    def kv(self) -> CacheLayout:
        return self._executors[0].kv

    @property
    def limits(self) -> Limits:
        return self._executors[0].limits

    def logits(self, batch: StepBatch) -> Float32s:
        first, *others = self._each(lambda executor: executor.logits(batch))
        for other in others:
            np.testing.assert_array_equal(other, first)
        return first

    def draw(self, batch: StepBatch) -> Any:
        """Greedy tokens, drawn by every rank for itself."""
        sampling = SamplingBatch.greedy(len(batch.logit_rows))
        drawn = self._each(lambda executor: executor.launch(batch, sampling).wait().token_ids)
        return np.array(drawn)

    def _each(self, work: Any) -> list[Any]:
        with ThreadPoolExecutor(len(self._executors)) as pool:
            return list(pool.map(work, self._executors))


def run_ranks(
    scheme: str,
    directory: str,
    ranks: int,
    family: str,
    overrides: Mapping[str, Any],
    ep: bool = False,
) -> dict[str, Any]:
    """Over a prefill, a chunk beside a decode, and a decode."""
    lowered = lower_ranks(family, SCHEMES[scheme], Path(directory), ranks, ep=ep, **overrides)
    all_ranks: Any = AllRanks(lowered.executors)
    engine = engine_stepper(all_ranks)
    expected = Stepper(lowered.evaluator.run, lowered.kv, NUM_PAGES, scramble=1)
    worst = 0.0
    for chunks in ({"a": random_prompt(9, seed=1)}, {"a": [5], "b": [7, 8, 9]}, {"b": [8]}):
        found, wanted = engine.step(chunks), expected.step(chunks)
        for name in chunks:
            error = np.abs(found[name] - wanted[name]).max() / np.abs(wanted[name]).max()
            worst = max(worst, float(error))
    return {
        "worst": worst,
        "launched": lowered.launched,
        "heads": sorted(kv_heads(all_ranks.kv)),
        "drawn": _drawn(all_ranks),
    }


def _drawn(all_ranks: AllRanks) -> Any:
    """[ranks, 2] tokens, or none where a step has more than one page table."""
    if len(all_ranks.kv.groups) > 1:
        return None
    return all_ranks.draw(
        StepBatch(
            token_ids=np.array([3, 4], np.int32),
            positions=np.arange(2, dtype=np.int32),
            slots=np.arange(2, dtype=np.int32),
            query_start=np.array([0, 2], np.int32),
            context_lens=np.array([2], np.int32),
            page_table=np.zeros((1, 1), np.int32),
            logit_rows=np.arange(2, dtype=np.int32),
        )
    )


def test_an_fp32_engine_of_two_ranks_is_the_whole_graph(tmp_path: Path) -> None:
    result = in_interpreter(run_ranks, "fp32", str(tmp_path), 2, "llama", ONE_LAYER)
    assert result["worst"] < 1e-5
    assert result["heads"] == [1]
    first, other = result["launched"]
    assert other == first, "the ranks ran other work than each other"
    # Two a layer, and one for the logits, a step.
    assert first.count("all_reduce") == 2 * first.count("all_gather") > 0
    assert (result["drawn"] == result["drawn"][0]).all()


GLM = {
    "num_hidden_layers": 2,
    "mlp_layer_types": ["dense", "dense"],
    "indexer_types": ["full", "shared"],
}


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("qwen3_next", {"num_hidden_layers": 2}),
        ("deepseek_v2_lite", {"num_hidden_layers": 2}),
        ("glm_moe_dsa", GLM),
        ("nemotron_h", {}),
        ("granite_moe_hybrid", {}),
        ("lfm2", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
        ("olmo2", ONE_LAYER),
        (
            "olmo_hybrid",
            {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
        ),
        ("gemma4_e", {}),
    ],
)
def test_states_and_latents_of_two_ranks_are_those_of_the_whole_graph(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    """And norms over all heads, of which a rank reads its own."""
    result = in_interpreter(run_ranks, "fp32", str(tmp_path), 2, family, overrides)
    assert result["worst"] < 1e-5
    first, other = result["launched"]
    assert other == first, "the ranks ran other work than each other"


@pytest.mark.parametrize(
    ("family", "overrides"),
    [("mixtral", ONE_LAYER), ("granite_moe_hybrid", {"num_local_experts": 4})],
)
def test_two_ranks_with_half_of_the_experts_are_the_whole_graph(
    family: str, overrides: dict[str, Any], tmp_path: Path
) -> None:
    result = in_interpreter(run_ranks, "fp32", str(tmp_path), 2, family, overrides, True)
    assert result["worst"] < 1e-5


def test_a_build_holds_the_weights_of_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_lowering, "compile_source", cuda_lowering.compile_source)
    stand_in_for_compiler()
    model = tiny_checkpoint("qwen2", tmp_path / "model")
    small: dict[str, Any] = {"max_batch_size": 2, "max_seq_len": 64, "max_num_tokens": 16}
    for ranks in (1, 2):
        output = tmp_path / str(ranks)
        request = BuildRequest(
            model=str(model), output=output, dtype="fp32", target="cuda:sm_90", tp=ranks, **small
        )
        build(request)
        verify_files(output, read_manifest(output))
    one, two = (read_manifest(tmp_path / str(ranks)) for ranks in (1, 2))
    assert (one.target.tp, two.target.tp) == (1, 2)
    assert {2 * heads for heads in kv_heads(two.kv)} == kv_heads(one.kv)
    assert two.ledger.page * 2 == one.ledger.page
    assert one.ledger.weights / 2 < two.ledger.weights < one.ledger.weights
    weights = {name for name in two.files if name.startswith("weights")}
    assert weights == {"weights.rank0.safetensors", "weights.rank1.safetensors"}
    whole = safetensors.numpy.load_file(tmp_path / "1" / "weights.safetensors")
    shards = [safetensors.numpy.load_file(tmp_path / "2" / name) for name in sorted(weights)]
    assert shards[0].keys() == shards[1].keys()
    down = "layers.1.mlp.down.weight"
    halves = [shard[f"{down}.shard"] for shard in shards]
    np.testing.assert_array_equal(np.concatenate(halves, axis=1), whole[down])
    head = [shard["lm_head.weight.shard"] for shard in shards]
    np.testing.assert_array_equal(np.concatenate(head), whole["lm_head.weight"])
    graph = onnx.load(str(tmp_path / "2" / "graph.onnx"), load_external_data=False)
    places = {entry.value for tensor in graph.graph.initializer for entry in tensor.external_data}
    assert "weights.rank0.safetensors" in places and "weights.safetensors" not in places
