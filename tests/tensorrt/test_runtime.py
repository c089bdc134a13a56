"""Engines of plans in the whole runtime, over a fake library and a fake GPU that compute.

Real are: the cut graph, stages.json, kernels' launches and arguments, the executor and the loop.
Not real are plans (ONNX files, run by the reference evaluator) and kernels (the references, and in
one test Triton's interpreter).
"""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import replace

from tests.support.drafts import Replaying
from tests.support.engines import build_tiny, engine_stepper
from tests.support.fake_gpu import FakeGpu
from tests.support.masks import SomeTokens
from tests.support.models import random_prompt, tiny_checkpoint
from tests.support.plan_engines import build_plans, compile_dummy_rtx, fake_machine, run_interpreted
from tests.support.small_steps import with_small_steps
from tests.support.steps import Stepper
from tests.support.triton_kernels import needs_triton
from trtc.builder.evaluator import Evaluator
from trtc.protos.errors import InvariantError
from trtc.protos.stages import read_stages
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import LoopConfig, LoopStats
from trtc.runtime.engine.probe import greedy, sequence_logits, solo_batch
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.executors import tensorrt_graphs
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.sampling.sampler import SamplingBatch

needs_triton()

Requests = list[tuple[list[int], int]]

PREFIX = random_prompt(24, seed=99)
REQUESTS: Requests = [
    (PREFIX + random_prompt(3, seed=3), 14),
    (random_prompt(5, seed=5), 40),
    (random_prompt(23, seed=23), 30),
    (random_prompt(90, seed=90), 14),
    (random_prompt(11, seed=11), 40),
    (PREFIX + random_prompt(30, seed=30), 14),
]
"""Prompts and how many tokens each wants."""
GROWING: Requests = [(random_prompt(length, seed=length), 60) for length in (6, 12, 7, 9, 10)]
"""All fit a small pool at first, and not for long."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Biases, and a window in the second layer."""
    return tiny_checkpoint("qwen2", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def engines(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    directory = tmp_path_factory.mktemp("engines")
    with pytest.MonkeyPatch.context() as patch:
        compiled = build_plans(checkpoint, directory / "compiled", "fp32", patch)
        rtx = build_plans(checkpoint, directory / "rtx", "fp32", patch, "tensorrt-rtx")
    cpu = build_tiny(checkpoint, directory / "cpu", "fp32").path
    return {"cpu": cpu, "rtx": rtx, "compiled": compiled}


@pytest.fixture(scope="module")
def expected(engines: dict[str, Path]) -> list[tuple[int, ...]]:
    return cpu_tokens(engines, REQUESTS)


def cpu_tokens(engines: dict[str, Path], requests: Requests) -> list[tuple[int, ...]]:
    """Greedy tokens of the CPU engine, each request alone."""
    with closing(open_session(engines["cpu"], num_threads=1, num_pages=32)) as session:
        return [greedy(session.executor, *request) for request in requests]


@pytest.fixture(params=["rtx", "compiled"])
def opened(
    request: pytest.FixtureRequest, engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Session, FakeGpu]]:
    engine = engines[request.param]
    with (
        fake_machine(monkeypatch, engine) as machine,
        closing(open_session(engine, num_pages=64)) as session,
    ):
        yield session, machine.gpu


def run_together(session: Session, requests: Requests) -> tuple[list[tuple[int, ...]], LoopStats]:
    """All requests at once; their tokens, and the loop's counters."""
    with LocalEngine(with_small_steps(session, 20), LoopConfig()) as engine:
        running = [
            engine.generate(prompt, max_tokens=n, temperature=0.0, ignore_eos=True)
            for prompt, n in requests
        ]
        tokens = [one.result().token_ids for one in running]
        return tokens, engine.stats()


def test_batching_prefixes_and_preemption_give_the_tokens_of_the_cpu(
    opened: tuple[Session, FakeGpu], expected: list[tuple[int, ...]]
) -> None:
    session, gpu = opened
    tokens, stats = run_together(session, REQUESTS)
    assert tokens == expected
    assert stats.prefix_hit_tokens >= 16
    assert gpu.closed


def test_drafts_change_no_token(
    opened: tuple[Session, FakeGpu], expected: list[tuple[int, ...]]
) -> None:
    session, _ = opened
    config = LoopConfig(drafts=DraftConfig())
    with LocalEngine(with_small_steps(session, 20), config) as engine:
        engine._loop._pipeline._drafter = Replaying(expected, session.executor.vocab_size)
        running = [
            engine.generate(prompt, max_tokens=n, temperature=0.0, ignore_eos=True)
            for prompt, n in REQUESTS
        ]
        assert [one.result().token_ids for one in running] == expected
        stats = engine.stats()
    assert stats.draft_tokens > stats.accepted_draft_tokens > 10


@pytest.mark.parametrize("kind", ["rtx", "compiled"])
def test_a_small_pool_preempts_and_changes_no_token(
    kind: str, engines: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_machine(monkeypatch, engines[kind]):
        session = open_session(engines[kind], num_pages=16)
        tokens, stats = run_together(session, GROWING)
    assert tokens == cpu_tokens(engines, GROWING)
    assert stats.preemptions > 0


def test_forks_copy_pages(opened: tuple[Session, FakeGpu], engines: dict[str, Path]) -> None:
    """Three sequences of one prompt, drawn with one seed, as on the CPU."""

    def forked(engine: LocalEngine) -> list[tuple[int, ...]]:
        options: dict[str, Any] = {"max_tokens": 12, "seed": 7, "n": 3, "ignore_eos": True}
        return [
            one.token_ids for one in engine.generate(REQUESTS[1][0], **options).result().completions
        ]

    with LocalEngine.open(engines["cpu"], num_threads=1, kv_bytes=1 << 20) as cpu:
        wanted = forked(cpu)
    session, gpu = opened
    with LocalEngine(session, LoopConfig()) as engine:
        assert forked(engine) == wanted
    assert len(set(wanted)) == 3
    assert "copy" in gpu.events


def test_masks_and_penalties_give_the_tokens_of_the_cpu(
    opened: tuple[Session, FakeGpu], engines: dict[str, Path]
) -> None:
    """Masks are computed while the plans run."""

    def drawn(engine: LocalEngine) -> list[tuple[int, ...]]:
        vocab_size = engine.manifest.model.vocab_size
        drafts = [
            RequestInput(
                token_ids=tuple(prompt),
                sampling={"presence_penalty": 0.9 * (at % 2), "seed": at},
                max_tokens=10,
                ignore_eos=True,
            )
            for at, (prompt, _) in enumerate(REQUESTS[:4])
        ]
        masks = [SomeTokens(vocab_size, at) if at < 3 else None for at in range(len(drafts))]
        running = [
            engine.submit(draft, masks=mask) for draft, mask in zip(drafts, masks, strict=True)
        ]
        tokens = [one.result().token_ids for one in running]
        for mask, told in zip(masks[:3], tokens, strict=False):
            assert mask is not None
            assert all(mask.tokens(told[:at])[token] for at, token in enumerate(told))
        return tokens

    with LocalEngine.open(engines["cpu"], num_threads=1, kv_bytes=1 << 20) as cpu:
        wanted = drawn(cpu)
    session, _ = opened
    with LocalEngine(session, LoopConfig()) as engine:
        assert drawn(engine) == wanted


def test_pages_written_back_elsewhere_continue_alike(opened: tuple[Session, FakeGpu]) -> None:
    session, _ = opened
    executor = session.executor
    size, prompt = executor.kv.page_size, np.asarray(REQUESTS[3][0], np.int32)
    executor.logits(solo_batch(executor, prompt[: 2 * size], 0, [0]))
    following = solo_batch(executor, prompt[2 * size : 3 * size], 2 * size, range(size))
    expected = executor.logits(following)
    table = following.page_table.copy()
    old = table[:, :2].reshape(-1).tolist()
    data = executor.read_pages(old).wait()
    executor.write_pages(old, np.zeros_like(data))
    assert (executor.logits(following) != expected).any()
    table[:, :2] = np.arange(20, 20 + len(old)).reshape(-1, 2)
    executor.write_pages(table[:, :2].reshape(-1).tolist(), data)
    found = executor.logits(replace(following, page_table=table))
    np.testing.assert_array_equal(found, expected)


def test_logits_of_every_row_are_those_of_the_cpu(
    opened: tuple[Session, FakeGpu], engines: dict[str, Path]
) -> None:
    """More rows than plans give at once: the step runs several times."""
    prompt = np.asarray(REQUESTS[3][0], np.int32)
    with closing(open_session(engines["cpu"], num_threads=1, num_pages=32)) as cpu:
        wanted = np.concatenate(list(sequence_logits(cpu.executor, prompt)))
    session, gpu = opened
    found = np.concatenate(list(sequence_logits(session.executor, prompt)))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)
    assert gpu.events.count("download") == 16 + 7


# Order.


def step(session: Session, tokens: list[int], begin: int = 0, *, samples: bool = True) -> StepBatch:
    """A chunk of one sequence on the pool's first pages."""
    rows = [len(tokens) - 1] if samples else []
    return solo_batch(session.executor, np.asarray(tokens, np.int32), begin, rows)


def test_a_step_without_logit_rows_fills_the_cache(opened: tuple[Session, FakeGpu]) -> None:
    session, _ = opened
    executor = session.executor
    prompt = REQUESTS[3][0][:12]
    wanted = executor.logits(step(session, prompt))
    executor.logits(step(session, prompt[::-1]))
    assert executor.logits(step(session, prompt[:7], samples=False)).shape == (0, wanted.shape[1])
    found = executor.logits(step(session, prompt[7:], 7))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-4)


def run(session: Session, batch: StepBatch) -> list[int]:
    sampling = SamplingBatch.greedy(len(batch.logit_rows))
    return session.executor.launch(batch, sampling).wait().token_ids.tolist()


def test_a_step_is_uploaded_run_in_order_and_downloaded(
    opened: tuple[Session, FakeGpu],
) -> None:
    session, gpu = opened
    session.executor.launch(step(session, [5, 6, 7, 8, 9, 10]), SamplingBatch.greedy(1)).wait()
    gpu.events.clear()
    run(session, step(session, [11], 6))
    layer = ["launch kv_write", "launch paged_attention"]
    between = layer if session.manifest.target.kind == "tensorrt_rtx" else []
    run_once = ["execute profile 0", *between]
    whole = [*run_once, *run_once, "execute profile 0"] if between else run_once
    uploads = ["upload"] * len(session.executor.kv.groups)
    assert gpu.events == [*uploads, *whole, "download"]


def test_the_narrowest_profile_that_fits_is_taken(opened: tuple[Session, FakeGpu]) -> None:
    session, gpu = opened
    for tokens, profile in ((4, 0), (5, 1), (64, 1)):
        gpu.events.clear()
        run(session, step(session, list(range(3, 3 + tokens))))
        used = {event for event in gpu.events if event.startswith("execute")}
        assert used == {f"execute profile {profile}"}
    with pytest.raises(InvariantError, match="no profile takes"):
        run(session, step(session, list(range(3, 68))))


def test_a_chunk_without_samples_writes_its_keys(
    opened: tuple[Session, FakeGpu], expected: list[tuple[int, ...]]
) -> None:
    session, gpu = opened
    prompt = REQUESTS[0][0]
    assert run(session, step(session, prompt[:10], samples=False)) == []
    assert "download" not in gpu.events
    assert run(session, step(session, prompt[10:], 10)) == [expected[0][0]]


def test_sizes_that_come_again_are_captured_after_they_have_settled(
    opened: tuple[Session, FakeGpu], expected: list[tuple[int, ...]]
) -> None:
    """Seen, then run and recorded, then replayed; other sizes in between change nothing."""
    session, gpu = opened
    prompt, _ = REQUESTS[1]
    found = run(session, step(session, prompt))
    for index in range(6):
        gpu.events.clear()
        found += run(session, step(session, [found[-1]], len(prompt) + index))
        events = [event.split()[0] for event in gpu.events]
        captured = "captured" in events
        width_changed = (len(prompt) + index) % 8 == 0  # a second page: another key
        first_of_width = index == 0 or width_changed
        if first_of_width:
            seen = 0
        seen += 1
        assert captured == (seen == 2), (index, gpu.events)
        assert ("replay" in events) == (seen > 2)
        assert ("execute" in events) == (seen <= 2)
    assert tuple(found) == expected[1][:7]


def test_graphs_are_dropped_when_there_are_too_many(
    opened: tuple[Session, FakeGpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    session, gpu = opened
    monkeypatch.setattr(tensorrt_graphs, "MAX_GRAPHS", 2)
    for tokens in (1, 2, 3):
        for _ in range(2):
            run(session, step(session, list(range(3, 3 + tokens))))
    assert gpu.events.count("dropped") == 1
    gpu.events.clear()
    run(session, step(session, [3, 4, 5]))
    assert "replay" in gpu.events
    gpu.events.clear()
    run(session, step(session, [3]))
    assert "replay" not in gpu.events


def test_a_step_that_cannot_be_captured_runs_call_by_call(
    opened: tuple[Session, FakeGpu], caplog: pytest.LogCaptureFixture
) -> None:
    session, gpu = opened
    gpu.refuse_capture = True
    answers = {run(session, step(session, [3, 4]))[0] for _ in range(4)}
    assert len(answers) == 1
    assert "replay" not in gpu.events
    assert caplog.text.count("cannot be captured") == 1


def test_a_second_step_before_the_first_is_waited_for_is_refused(
    opened: tuple[Session, FakeGpu],
) -> None:
    session, _ = opened
    pending = session.executor.launch(step(session, [3, 4]), SamplingBatch.greedy(1))
    with pytest.raises(InvariantError, match="never waited for"):
        session.executor.launch(step(session, [3, 4]), SamplingBatch.greedy(1))
    pending.wait()
    session.close()
    with pytest.raises(InvariantError, match="closed"):
        run(session, step(session, [3, 4]))


# Kernels and types.


def test_triton_kernels_between_plans_give_the_tokens_of_the_cpu(
    engines: dict[str, Path], expected: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with (
        fake_machine(monkeypatch, engines["rtx"]) as machine,
        closing(open_session(engines["rtx"], num_pages=32)) as session,
    ):
        machine.gpu.run_kernel = run_interpreted
        prompt, _ = REQUESTS[2]
        assert greedy(session.executor, prompt, 5) == expected[2][:5]


@pytest.mark.parametrize(
    ("family", "scheme", "kv_dtype"),
    [
        ("gemma2", "bf16", "bf16"),
        ("gemma2", "fp8", "f8e4m3"),
        ("gemma2", "int8_sq", "bf16"),
        ("gemma2", "w4a8_awq", "f8e4m3"),
        ("gemma2", "nvfp4", "bf16"),
        ("qwen3_moe", "fp8", "bf16"),
        ("mixtral", "int4_awq", "bf16"),
    ],
)
def test_cutting_changes_no_bit_of_any_scheme(
    family: str, scheme: str, kv_dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plans and kernels one after another against the evaluator over the whole graph."""
    engine, module, reader = compile_dummy_rtx(family, scheme, kv_dtype, tmp_path, monkeypatch)
    prompt = random_prompt(40)
    wanted = Stepper(Evaluator(module, reader).run, module.kv, scramble=1).prefill(prompt, 17)
    with (
        fake_machine(monkeypatch, engine),
        closing(open_session(engine, num_pages=16)) as session,
    ):
        found = engine_stepper(session.executor, num_pages=16).prefill(prompt, 17)
    assert np.array_equal(found, wanted)


def test_stages_share_an_arena_and_name_one_memory_for_a_pool(engines: dict[str, Path]) -> None:
    stages = read_stages(engines["rtx"])
    sizes = {one.name: one for one in stages.buffers}
    total = sum(64 * one.columns * 4 for one in sizes.values())
    assert stages.arena_bytes < total
    assert all(one.offset % 256 == 0 for one in stages.buffers)
    assert len(stages.plans) == len(stages.pool.places) + 1
