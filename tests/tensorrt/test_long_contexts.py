"""Engines whose contexts are attended to in splits, from the graph to the runtime's tokens."""

from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from tests.support.bundles import NoReader, bundle_module
from tests.support.engines import build_tiny
from tests.support.fake_gpu import CubinKernel, run_reference
from tests.support.models import random_prompt, tiny_checkpoint, transformers_logits
from tests.support.plan_engines import build_plans, fake_machine, run_interpreted
from tests.support.steps import Stepper
from tests.support.triton_kernels import needs_triton
from trtc.builder.evaluator import Evaluator
from trtc.protos.bundle import read_recipe
from trtc.protos.stages import Launch, read_stages
from trtc.runtime.engine.loop import LoopConfig
from trtc.runtime.engine.probe import greedy
from trtc.runtime.engine.session import open_session
from trtc.runtime.frontends.local import LocalEngine

needs_triton()

MAX_SEQ_LEN = 1024
LONG, SHORT = random_prompt(600, seed=1), random_prompt(11, seed=2)
REQUESTS = [(LONG, 6), (SHORT, 12), (random_prompt(300, seed=3), 8)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A window in the second layer, too short to be split."""
    directory = tmp_path_factory.mktemp("model")
    return tiny_checkpoint("qwen2", directory, max_position_embeddings=2 * MAX_SEQ_LEN)


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("engines")
    options: dict[str, Any] = {"max_seq_len": MAX_SEQ_LEN}
    with pytest.MonkeyPatch.context() as patch:
        compiled = build_plans(checkpoint, directory / "compiled", "fp32", patch, **options)
        rtx = build_plans(checkpoint, directory / "rtx", "fp32", patch, "tensorrt-rtx", **options)
    return {
        "cpu": build_tiny(checkpoint, directory / "cpu", "fp32", **options).path,
        "rtx": rtx,
        "compiled": compiled,
    }


@pytest.fixture(scope="module")
def expected(engines: dict[str, Path]) -> list[tuple[int, ...]]:
    with closing(
        open_session(engines["cpu"], num_threads=1, num_pages=256)
    ) as session:  # two groups
        return [greedy(session.executor, *request) for request in REQUESTS]


def test_two_plugins_take_the_place_of_one_where_contexts_are_long(
    engines: dict[str, Path],
) -> None:
    model = onnx.load(engines["compiled"] / "graph.onnx", load_external_data=False)
    plugins = [node.op_type for node in model.graph.node if node.domain == "trtc"]
    split = ["kv_write", "attention_split", "attention_combine"]
    assert plugins == [*split, "kv_write", "paged_attention"]
    kernels = [(one.op, one.tactic) for one in read_recipe(engines["compiled"]).kernels]
    assert [one for one in kernels if one[0].startswith("attention")] == [
        (op, tactic) for op in split[1:] for tactic in (1, 2)
    ]
    stages = read_stages(engines["rtx"])
    assert [one.op for one in stages.stages if isinstance(one, Launch)] == plugins
    sums = {one.name.rpartition(".")[2]: one for one in stages.buffers if one.rows == "B"}
    assert {name: one.columns for name, one in sums.items()} == {
        "partial": 4 * 4 * 16,
        "stats": 4 * 4 * 2,
    }


def test_the_graph_file_is_the_model(engines: dict[str, Path], checkpoint: Path) -> None:
    """The exact file in the evaluator against Transformers: a prompt, then token by token."""
    ids = [*LONG, *SHORT[:3]]
    wanted = transformers_logits(checkpoint, ids)
    module = bundle_module(engines["compiled"])
    stepper = Stepper(Evaluator(module, NoReader()).run, module.kv, scramble=1, num_pages=128)
    found = [stepper.step({"a": LONG[:300]})["a"], stepper.step({"a": LONG[300:]})["a"]]
    found += [stepper.step({"a": [token]})["a"] for token in SHORT[:3]]
    np.testing.assert_allclose(np.concatenate(found), wanted, rtol=0, atol=2e-4)


@pytest.mark.parametrize("kind", ["rtx", "compiled"])
def test_long_and_short_together_give_the_tokens_of_the_cpu(
    kind: str,
    engines: dict[str, Path],
    expected: list[tuple[int, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with (
        fake_machine(monkeypatch, engines[kind]) as machine,
        closing(open_session(engines[kind], num_pages=160)) as session,
        LocalEngine(session, LoopConfig()) as engine,
    ):
        running = [
            engine.generate(prompt, max_tokens=n, temperature=0.0, ignore_eos=True)
            for prompt, n in REQUESTS
        ]
        assert [one.result().token_ids for one in running] == expected
    launched = {event for event in machine.gpu.events if event.startswith("launch")}
    assert ("launch attention_combine" in launched) == (kind == "rtx")


def test_triton_kernels_between_plans_give_the_tokens_of_the_cpu(
    engines: dict[str, Path], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token by the kernels themselves, the prompt before them by the references."""
    seen = set()

    def run(kernel: CubinKernel, arrays: dict[str, Any], grid: tuple[int, int]) -> dict[str, Any]:
        if len(arrays.get("q", arrays.get("rows", arrays.get("k")))) > 1:
            return run_reference(kernel, arrays, grid)
        seen.add((kernel.facts.op, grid[1]))
        return run_interpreted(kernel, arrays, grid)

    with (
        fake_machine(monkeypatch, engines["rtx"]) as machine,
        closing(open_session(engines["rtx"], num_pages=256)) as session,
    ):
        machine.gpu.run_kernel = run
        assert greedy(session.executor, LONG, 4) == expected[0][:4]
    assert {("attention_split", 2 * 4), ("attention_combine", 4)} <= seen
