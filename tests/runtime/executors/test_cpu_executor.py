"""The compiled step through its C ABI: bad steps are refused, pools are the caller's."""

import ctypes
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec.structs import asdict, replace

from tests.support.engines import NUM_PAGES, build_tiny, engine_stepper, fill_pool, open_executor
from tests.support.models import random_prompt, tiny_checkpoint
from trtc.protos.errors import EnvironmentFault, InvariantError
from trtc.protos.plan import read_plan
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.probe import solo_batch
from trtc.runtime.executors.base import StepBatch
from trtc.runtime.executors.cpu import CpuExecutor, _Step
from trtc.runtime.executors.cpu_pool import KvPool
from trtc.runtime.sampling.masks import RowMasks, pack_mask, read_mask
from trtc.runtime.sampling.sampler import SamplingBatch

PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("executor")
    build_tiny(tiny_checkpoint("qwen2", directory), directory / "engine", "bf16")
    return directory / "engine"


@pytest.fixture
def executor(engine: Path) -> Iterator[CpuExecutor]:
    opened = open_executor(engine)
    yield opened
    opened.close()


def batch_of(executor: CpuExecutor, tokens: int = 10) -> StepBatch:
    chunk = np.array(random_prompt(tokens), np.int32)
    return solo_batch(executor, chunk, 0, np.arange(tokens))


def with_element(array: np.ndarray, index: Any, value: int) -> np.ndarray:
    changed = array.copy()
    changed[index] = value
    return changed


@pytest.mark.parametrize(
    ("field", "index", "value", "message"),
    [
        ("token_ids", 3, 160, "token id"),
        ("token_ids", 0, -1, "token id"),
        ("positions", 9, 128, "position"),
        ("positions", 0, -1, "position"),
        ("slots", 5, NUM_PAGES * 8, "slot"),
        ("slots", 5, -1, "slot"),
        ("query_start", 0, 1, "query_start"),
        ("query_start", 1, 9, "query_start"),
        ("context_lens", 0, 9, "context length"),
        ("context_lens", 0, 129, "context length"),
        ("context_lens", 0, 17, "page table"),
        ("page_table", (0, 1), NUM_PAGES, "page id"),
        ("page_table", (0, 0), -1, "page id"),
        ("logit_rows", 0, 10, "logit row"),
        ("logit_rows", 0, -1, "logit row"),
    ],
)
def test_a_bad_index_is_refused_and_harms_nothing(
    executor: CpuExecutor, field: str, index: Any, value: int, message: str
) -> None:
    good = batch_of(executor)
    expected = executor.logits(good)
    changed = with_element(getattr(good, field), index, value)
    with pytest.raises(InvariantError, match=message):
        executor.logits(replace(good, **{field: changed}))
    np.testing.assert_array_equal(executor.logits(good), expected)


def test_sizes_beyond_the_limits_are_refused(executor: CpuExecutor) -> None:
    with pytest.raises(InvariantError, match="num_tokens"):
        executor.logits(batch_of(executor, 65))
    good = batch_of(executor)
    five = np.arange(6, dtype=np.int32)
    with pytest.raises(InvariantError, match="num_sequences"):
        executor.logits(
            replace(
                good,
                query_start=five,
                context_lens=np.ones(5, np.int32),
                slots=np.zeros(10 * len(executor.kv.groups), np.int32),
                page_table=np.zeros((5 * len(executor.kv.groups), 1), np.int32),
            )
        )
    empty = np.zeros(0, np.int32)
    with pytest.raises(InvariantError, match="num_tokens"):
        executor.logits(replace(good, token_ids=empty, positions=empty, slots=empty))


def test_sequences_must_bring_tokens(executor: CpuExecutor) -> None:
    good = batch_of(executor)
    with pytest.raises(InvariantError, match="no new token"):
        executor.logits(
            replace(
                good,
                query_start=np.array([0, 10, 10], np.int32),
                context_lens=np.array([10, 1], np.int32),
                page_table=np.zeros((2 * len(executor.kv.groups), 2), np.int32),
            )
        )


def test_tables_of_other_groups_are_refused_before_anything_reads_them(
    executor: CpuExecutor,
) -> None:
    good = batch_of(executor)
    with pytest.raises(InvariantError, match="group"):
        executor.logits(replace(good, page_table=good.page_table[:-1]))
    with pytest.raises(InvariantError, match="group"):
        executor.logits(replace(good, slots=good.slots[:-1]))


def test_any_integer_arrays_will_do(executor: CpuExecutor) -> None:
    """Other integer types and strided views are converted, not misread."""
    good = batch_of(executor)
    expected = executor.logits(good)
    wide = {
        name: value.astype(np.int64) for name, value in asdict(good).items() if value is not None
    }
    np.testing.assert_array_equal(executor.logits(StepBatch(**wide)), expected)
    strided = np.repeat(good.token_ids, 2)[::2]
    np.testing.assert_array_equal(executor.logits(replace(good, token_ids=strided)), expected)


def test_a_step_without_logit_rows_fills_the_cache(executor: CpuExecutor) -> None:
    """What chunked prefill does but for its last chunk."""
    good = batch_of(executor, 20)
    expected = executor.logits(good)[-1]
    fill_pool(executor, 0xFF)
    first = solo_batch(executor, good.token_ids[:12], 0, [])
    assert executor.logits(first).shape == (0, 160)
    rest = solo_batch(executor, good.token_ids[12:], 12, [7])
    np.testing.assert_array_equal(executor.logits(rest)[0], expected)


def test_copied_pages_continue_alike(executor: CpuExecutor) -> None:
    prompt = np.array(random_prompt(16), np.int32)
    executor.logits(solo_batch(executor, prompt, 0, [15]))
    following = solo_batch(executor, prompt[:1], 16, [0])
    table = following.page_table.copy()
    full = table[:, :2].reshape(-1).tolist()  # of each group
    table[:, :2] = np.arange(40, 40 + len(full)).reshape(-1, 2)
    executor.copy_pages(full, table[:, :2].reshape(-1).tolist())
    moved = replace(following, page_table=table)
    np.testing.assert_array_equal(executor.logits(moved), executor.logits(following))


def test_pages_written_back_elsewhere_continue_alike(executor: CpuExecutor) -> None:
    """Of all groups, into a pool that holds NaN everywhere else."""
    prompt = np.array(random_prompt(16), np.int32)
    executor.logits(solo_batch(executor, prompt, 0, [15]))
    following = solo_batch(executor, prompt[:4], 16, range(4))
    table = following.page_table.copy()
    full = table[:, :2].reshape(-1).tolist()
    table[:, :2] = np.arange(40, 40 + len(full)).reshape(-1, 2)
    data = executor.read_pages(full).wait()
    assert data.shape == (len(full), executor.kv.page_bytes)
    expected = executor.logits(following)
    fill_pool(executor, 0xFF)
    executor.write_pages(table[:, :2].reshape(-1).tolist(), data)
    found = executor.logits(replace(following, page_table=table))
    np.testing.assert_array_equal(found, expected)
    assert executor.read_pages([]).wait().shape == (0, executor.kv.page_bytes)


def test_threads_change_no_bit(engine: Path) -> None:
    prompt = random_prompt(50)
    results = []
    for num_threads in (1, 2, 3, 5):
        executor = open_executor(engine, num_threads=num_threads)
        results.append(engine_stepper(executor).prefill(prompt, 17))
        executor.close()
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


def test_the_gil_is_free_during_a_step(executor: CpuExecutor) -> None:
    """Another thread counts while the engine computes.

    The interpreter takes the GIL from nobody here, so the other thread has it only where a
    step gives it up. On a busy machine that thread may sleep through many steps.
    """
    batch = batch_of(executor, 64)
    stop, counted = threading.Event(), [0]

    def count() -> None:
        while not stop.is_set():
            counted[0] += 1
            time.sleep(0)  # gives up the GIL

    counter = threading.Thread(target=count)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(PATIENCE_S)
    counter.start()
    try:
        deadline = time.monotonic() + PATIENCE_S
        before = after = 0
        while after == before and time.monotonic() < deadline:
            before = counted[0]
            executor.logits(batch)
            after = counted[0]
    finally:
        stop.set()
        counter.join()
        sys.setswitchinterval(interval)
    assert after > before


def test_engines_do_not_disturb_each_other(engine: Path) -> None:
    """Two engines of one file, each with its own pool and threads, driven by two threads."""
    executors = [open_executor(engine, num_threads=2) for _ in range(2)]
    prompts = [random_prompt(40, seed=seed) for seed in range(2)]
    alone = [engine_stepper(e).greedy(p, 20) for e, p in zip(executors, prompts, strict=True)]
    together: dict[int, list[int]] = {}

    def run(index: int) -> None:
        together[index] = engine_stepper(executors[index]).greedy(prompts[index], 20)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [together[0], together[1]] == alone
    for executor in executors:
        executor.close()


def test_a_closed_executor_says_so(engine: Path) -> None:
    executor = open_executor(engine)
    batch = batch_of(executor)
    executor.close()
    executor.close()
    with pytest.raises(InvariantError, match="closed"):
        executor.logits(batch)


def test_a_file_that_is_no_shared_object(engine: Path, tmp_path: Path) -> None:
    from trtc.runtime.executors.cpu import CpuEngineFiles

    broken = tmp_path / "engine.so"
    broken.write_bytes(b"not an object")
    opened = open_executor(engine)
    files = CpuEngineFiles(broken, opened._weights, "0" * 64)
    with pytest.raises(EnvironmentFault, match=r"engine\.so: cannot be loaded"):
        CpuExecutor(
            files, limits=opened.limits, kv=opened.kv, vocab_size=160, num_pages=1, num_threads=1
        )
    opened.close()


def test_too_many_threads_are_refused(engine: Path) -> None:
    with pytest.raises(EnvironmentFault, match=r"did not start: num_threads is outside 1\.\.1024"):
        open_executor(engine, num_threads=2_000_000_000)


_FEW_THREADS = """
import os, resource, sys
from pathlib import Path
from trtc.protos.errors import EnvironmentFault
from trtc.protos.manifest import read_manifest
from trtc.runtime.executors.cpu_opening import prepare_cpu
from trtc.runtime.executors.opening import OpenRequest
engine = Path(sys.argv[1])
opening = prepare_cpu(OpenRequest(engine, read_manifest(engine), 1, dummy_weights=False))
request = opening.request._replace(num_threads=1024)
pages = int(Path("/proc/self/statm").read_text().split()[0])
limit = pages * os.sysconf("SC_PAGE_SIZE") + (2 << 30)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
try:
    opening._replace(request=request).open(64)
except EnvironmentFault as error:
    print("refused:", error)
"""


def test_threads_that_the_system_refuses_end_no_process(engine: Path) -> None:
    """Each thread's stack is address space, so a limit on that is met half way to 1024."""
    command = [sys.executable, "-c", _FEW_THREADS, str(engine)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.stdout.startswith("refused:"), result


def test_a_pool_beyond_the_address_space(executor: CpuExecutor) -> None:
    with pytest.raises(EnvironmentFault, match="--kv-bytes"):
        KvPool(executor.kv, 1 << 45, ahead_bytes=0)


@pytest.mark.parametrize("scheme", ["int8_sq", "fp8"])
def test_greedy_steps_draw_the_largest_of_all_logits(scheme: str, tmp_path: Path) -> None:
    """They look for it in half of the lm_head; other steps, and `logits`, read all of it."""
    build_tiny(tiny_checkpoint("llama", tmp_path), tmp_path / "engine", scheme)
    plan = read_plan(tmp_path / "engine" / "plan.json")
    assert [weight.name for weight in plan.weights if weight.layout == "planes"]
    opened = open_executor(tmp_path / "engine", num_threads=2)
    for tokens in (1, 5, 8, 9, 20):
        batch = batch_of(opened, tokens)
        drawn = opened.launch(batch, SamplingBatch.greedy(tokens)).wait().token_ids
        every = opened.logits(batch)
        assert np.array_equal(drawn, every.argmax(axis=1))
        asked = SamplingBatch.of([SamplingParams(temperature=0.0)], num_logprobs=[3])
        last = replace(batch, logit_rows=batch.logit_rows[-1:])
        logprobs = opened.launch(last, asked).wait().logprobs
        assert logprobs is not None
        exact = every[-1].astype(np.float64)
        exact -= exact.max() + np.log(np.exp(exact - exact.max()).sum())
        assert np.allclose(logprobs.top[0], np.sort(exact)[::-1][:3], atol=1e-5)
    opened.close()


def test_a_step_that_is_drawn_late_draws_under_its_masks(executor: CpuExecutor) -> None:
    batch = batch_of(executor)
    logits = executor.logits(batch)
    number, vocab = logits.shape
    allowed = np.asarray(np.random.default_rng(0).random(vocab) < 0.1)
    words = np.array([read_mask(pack_mask(allowed), vocab)])
    masks = RowMasks(np.array([number - 1], np.int32), words)
    step = executor.launch_forward(batch)
    tokens = step.draw(replace(SamplingBatch.greedy(number), masks=masks)).wait().token_ids
    assert tokens[:-1].tolist() == logits[:-1].argmax(axis=1).tolist()
    assert tokens[-1] == np.where(allowed, logits[-1], -np.inf).argmax()


def test_the_step_struct_is_the_one_in_the_header() -> None:
    """Seven pointers, four sizes, pools, pages, logits: in the order of engine.hpp."""
    header = (Path(__file__).parents[3] / "plugins" / "cpu" / "engine.hpp").read_text()
    body = header.split("struct trtc_engine_step_t {")[1].split("};")[0]
    declared = [
        line.split(";")[0].split()[-1].lstrip("*") for line in body.splitlines() if ";" in line
    ]
    assert [field[0] for field in _Step._fields_] == declared
    assert ctypes.sizeof(_Step) == 8 * len(declared)


def test_calls_are_timed_one_by_one(engine: Path, executor: CpuExecutor) -> None:
    plan = read_plan(engine / "plan.json")
    batch = batch_of(executor)
    begin = time.perf_counter()
    seconds = executor.time_calls(batch, len(plan.calls))
    whole = time.perf_counter() - begin
    assert len(seconds) == len(plan.calls) and (seconds > 0).all()
    assert seconds.sum() < whole
    with pytest.raises(InvariantError, match="number of calls"):
        executor.time_calls(batch, len(plan.calls) - 1)
