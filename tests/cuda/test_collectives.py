"""The collectives of a launch plan: addresses, sizes and kernels, with the ranks as threads."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.caches import uniform_layout
from tests.support.compiled import compile_sources
from tests.support.cuda_engines import stand_in_for_compiler
from tests.support.ranks import Meeting
from tests.support.triton_kernels import in_interpreter, needs_triton
from trtc.builder.memory import align
from trtc.builder.targets import cuda_lowering
from trtc.builder.targets.cuda_lowering import write_launches
from trtc.plugins.gpu.arch import ARCHS
from trtc.plugins.gpu.lowering import Launch, Site
from trtc.plugins.gpu.sources import KernelSource
from trtc.plugins.rounding import cast
from trtc.protos.errors import InvariantError
from trtc.protos.launch_plan import CollectiveCall, LaunchPlan
from trtc.protos.manifest import Limits
from trtc.protos.plan import Argument, Buffer, Call, Plan
from trtc.runtime.executors.cuda.buckets import Bucket
from trtc.runtime.executors.cuda.device import HostArray
from trtc.runtime.executors.cuda.program import CudaEngineFiles, Program

needs_triton()

from trtc.plugins.all_gather import cuda as all_gather  # noqa: E402
from trtc.plugins.all_reduce import cuda as all_reduce  # noqa: E402

LOWERINGS = {"all_reduce": all_reduce.lower, "all_gather": all_gather.lower}
LIMITS = Limits(max_batch_size=6, max_seq_len=64, max_num_tokens=16)
KV = uniform_layout(num_layers=1, page_size=8, num_kv_heads=1, head_dim=8, dtype="f32")
WIDTH, DTYPE = 40, "bf16"
RANKS = (2, 4)


def buffer(name: str, dtype: Any, rows: Any, offset: int) -> Buffer:
    return Buffer(name=name, dtype=dtype, rows=rows, columns=WIDTH, offset=offset)


def argument(parameter: str, of: Buffer, **fields: Any) -> Argument:
    return Argument(
        parameter=parameter,
        kind=fields.pop("kind", "buffer"),
        name=of.name,
        dtype=of.dtype,
        row_stride=fields.pop("row_stride", of.columns),
        columns=fields.pop("columns", of.columns),
    )


def make_plan(ranks: int, **x: Any) -> Plan:
    """x = all_reduce(x), in place, for tokens; logits = all_gather(head), for rows."""
    hidden = buffer("hidden", DTYPE, "T", 64)
    head = buffer("head", "f32", "R", align(64 + 2 * LIMITS.max_num_tokens * WIDTH))
    logits = Buffer(name="logits", dtype="f32", rows="R", columns=ranks * WIDTH, offset=0)
    calls = (
        Call(
            operator="all_reduce",
            site="o.all_reduce",
            arguments=(argument("x", hidden, **x), argument("out", hidden)),
            attributes={"ranks": ranks},
            axes={"M": "T", "K": WIDTH},
        ),
        Call(
            operator="all_gather",
            site="lm_head.all_gather",
            arguments=(argument("x", head), argument("out", logits, kind="logits")),
            attributes={"ranks": ranks},
            axes={"M": "R", "K": WIDTH},
        ),
    )
    return Plan(
        limits=LIMITS,
        kv=KV,
        vocab_size=ranks * WIDTH,
        buffers=(hidden, head),
        weights=(),
        calls=calls,
        arena_bytes=head.offset + 4 * LIMITS.max_batch_size * WIDTH,
        weights_bytes=0,
    )


def lowered(plan: Plan, engine: Path) -> LaunchPlan:
    return write_launches(
        plan, 90, LOWERINGS, engine, lambda message: None, is_uniform=lambda name: False
    )


def run_all(directory: str) -> dict[int, dict[str, Any]]:
    return {ranks: run_ranks(Path(directory) / str(ranks), ranks) for ranks in RANKS}


def run_ranks(engine: Path, ranks: int) -> dict[str, Any]:
    """Every rank's arena and logits after one step of 5 tokens and 3 rows, in larger buckets."""
    from tests.support.interpreted_device import InterpretedDevice

    sources = stand_in_for_compiler()
    engine.mkdir()
    plan = make_plan(ranks)
    launches = lowered(plan, engine)
    meeting = Meeting(ranks)
    bucket = Bucket("mixed", tokens=8, sequences=4, rows=4, splits=1)

    def run(rank: int) -> dict[str, Any]:
        device = InterpretedDevice(sources, exchange=meeting.exchange_of(rank))
        files = CudaEngineFiles(engine, launches, HostArray(np.zeros(0, np.uint8)))
        program = Program(files, device, kv=KV, vocab_size=plan.vocab_size, num_pages=1)
        random = np.random.default_rng(rank)
        hidden = cast(random.standard_normal((8, WIDTH)).astype(np.float32), DTYPE)
        head = random.standard_normal((4, WIDTH)).astype(np.float32)
        arena: Any = program.spaces["arena"]
        for one, values in zip(plan.buffers, (hidden, head), strict=True):
            data = np.ascontiguousarray(values).view(np.uint8).reshape(-1)
            arena.tensor.numpy()[one.offset : one.offset + len(data)] = data
        step: Any = program.spaces["step"]
        step.tensor.numpy().view(np.int32)[:4] = (5, 3, 3, 0)
        program.run(bucket)
        logits: Any = program.spaces["logits"]
        return {
            "given": (hidden.astype(np.float32), head),
            "hidden": arena.tensor.numpy()[64 : 64 + 2 * 8 * WIDTH].copy(),
            "logits": logits.tensor.numpy().view(np.float32).reshape(-1, plan.vocab_size).copy(),
            "launched": device.launched,
        }

    with ThreadPoolExecutor(ranks) as pool:
        return {"ranks": list(pool.map(run, range(ranks))), "launches": launches}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, Any]]:
    return in_interpreter(run_all, str(tmp_path_factory.mktemp("collectives")))


@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_end_with_the_sum_and_the_whole_logits(
    ranks: int, results: dict[int, dict[str, Any]]
) -> None:
    given = [one["given"] for one in results[ranks]["ranks"]]
    total = cast(np.sum([hidden for hidden, _ in given], axis=0, dtype=np.float32), DTYPE)
    whole = np.concatenate([head for _, head in given], axis=1)
    for one in results[ranks]["ranks"]:
        np.testing.assert_array_equal(one["hidden"].view(total.dtype).reshape(total.shape), total)
        np.testing.assert_array_equal(one["logits"][:3], whole[:3])
        assert np.isnan(one["logits"][3:]).all(), "rows that are not real were written"
        assert one["launched"] == ["all_reduce", "all_gather", "join_columns"]


def test_the_plan_says_what_is_exchanged(results: dict[int, dict[str, Any]]) -> None:
    launches = results[2]["launches"]
    reduce, gather = (call.variants[0].work[0] for call in launches.calls)
    assert isinstance(reduce, CollectiveCall) and isinstance(gather, CollectiveCall)
    assert (reduce.kind, reduce.dtype, reduce.columns) == ("all_reduce", DTYPE, WIDTH)
    assert reduce.source == reduce.target
    assert (gather.kind, gather.dtype, gather.columns) == ("all_gather", "f32", WIDTH)
    assert gather.target.space == "scratch"
    assert launches.scratch_bytes >= 2 * LIMITS.max_batch_size * WIDTH * 4
    assert [call.rows for call in launches.calls] == ["tokens", "rows"]


@pytest.mark.parametrize("sm", ARCHS)
def test_the_kernel_compiles_for_every_sm(sm: int) -> None:
    site = Site(
        dtypes={"x": "f32", "out": "f32"},
        strides={"x": 32064, "out": 128256},
        axes={"K": 32064},
        attributes={"ranks": 4},
        rows="rows",
        page_size=KV.page_size,
        limits=LIMITS,
        sm=sm,
    )
    _, join = all_gather.lower(site)[0].work
    assert isinstance(join, Launch) and isinstance(join.kernel, KernelSource)
    (compiled,) = compile_sources([join.kernel], sm)
    assert compiled.entry == "join_columns" and compiled.cubin
    assert len(compiled.parameters) == len(join.arguments)


def test_rows_with_gaps_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL takes one range of memory."""
    monkeypatch.setattr(cuda_lowering, "compile_source", cuda_lowering.compile_source)
    stand_in_for_compiler()
    plan = make_plan(2, row_stride=2 * WIDTH)
    with pytest.raises(InvariantError, match=r"o\.all_reduce: x has gaps"):
        lowered(plan, tmp_path)
