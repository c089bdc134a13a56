"""A batch of paged_attention as it is lowered for a GPU, run on the CPU."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tests.support import cuda_on_cpu
from tests.support.attention_case import Batch, Sequence, make_batch
from tests.support.cuda_on_cpu import poisoned
from tests.support.operands import attention_sinks
from tests.support.triton_kernels import Work, interpret_work, programs
from trtc.plugins.attention.split_kv import CUDA
from trtc.plugins.gpu.lowering import DIMS, SCRATCH, Launch, Site, Variant
from trtc.plugins.gpu.sources import CudaSource
from trtc.plugins.paged_attention.cuda_cpp import PARTIAL, STATS
from trtc.plugins.paged_attention.reference import reference
from trtc.plugins.rounding import NUMPY_DTYPES
from trtc.protos.manifest import Limits

Array = NDArray[Any]

_STALE_SEQUENCES, _STALE_TOKENS = 2, 3
_STALE_LENGTH = 1 << 20
_GUARD = 32  # elements after each row of q and out
KV_SCALES = {"k_scale": 0.5, "v_scale": 2.0}
BF16_UNIT = 2.0**-7
"""Between neighbouring values, relative: a rounding may fall the other way."""
_NAMES = {dtype: name for name, dtype in NUMPY_DTYPES.items()}


@dataclass(frozen=True)
class Attention:
    """One call of the operator."""

    batch: Batch
    attributes: Mapping[str, Any]
    """Complete."""
    options: Mapping[str, Array] = field(default_factory=dict)
    """The optional inputs that are there, one-dimensional."""

    @property
    def num_tokens(self) -> int:
        return len(self.batch.q)

    @property
    def num_kv_heads(self) -> int:
        return self.batch.pool.shape[3]

    def expected(self) -> NDArray[np.float32]:
        """What the reference gives before it divides by out_scale and rounds to `out_dtype`."""
        scales = {name: array for name, array in self.options.items() if len(array) == 1}
        by_k, by_v = (
            scales[name][0] if name in scales else None for name in ("k_scale", "v_scale")
        )
        (out,) = reference(
            self.batch.q,
            self.batch.pool,
            self.batch.query_start,
            self.batch.context_lens,
            self.batch.page_table,
            by_k,
            by_v,
            self.options.get("pre_scale"),
            None,
            self.options.get("sinks"),
            **{**self.attributes, "out_dtype": "f32"},
        )
        return out.astype(np.float32)

    def found(self, out: Array) -> NDArray[np.float32]:
        """An output in the units of `expected`."""
        scale = self.options["out_scale"][0] if "out_scale" in self.options else np.float32(1)
        return out.astype(np.float32) * scale

    def site(self, sm: int) -> Site:
        width = int(self.attributes["num_heads"]) * int(self.attributes["head_dim"])
        _, _, page_size, num_kv_heads, stored = self.batch.pool.shape
        head_dim = int(self.attributes["head_dim"])
        dtypes = dtype_names(self.batch)
        return Site(
            dtypes={
                **dtypes,
                **dict.fromkeys(("query_start", "context_lens", "page_table"), "i32"),
                **dict.fromkeys(self.options, "f32"),
                "out": self.attributes["out_dtype"],
            },
            strides={"q": width + _GUARD, "out": width + _GUARD},
            axes={
                "num_kv_heads": num_kv_heads,
                "head_dim": head_dim,
                "stored_width": stored,
            },
            attributes=self.attributes,
            rows="tokens",
            page_size=page_size,
            limits=Limits(
                max_batch_size=len(self.batch.context_lens) + _STALE_SEQUENCES,
                max_seq_len=self.batch.page_table.shape[1] * page_size,
                max_num_tokens=self.num_tokens + _STALE_TOKENS,
            ),
            sm=sm,
        )

    def arrays(self, site: Site) -> dict[str, Array]:
        """Every argument by name, with stale rows after the real ones; outputs are poison."""
        batch, rows = self.batch, self.num_tokens + _STALE_TOKENS
        stale = np.full(_STALE_SEQUENCES, _STALE_LENGTH, np.int32)
        q = poisoned((rows, site.strides["q"]), batch.q.dtype)
        q[: self.num_tokens, :-_GUARD] = batch.q
        return {
            "q": q,
            "pool": batch.pool,
            "query_start": np.concatenate([batch.query_start, stale]),
            "context_lens": np.concatenate([batch.context_lens, stale]),
            "page_table": np.ascontiguousarray(batch.page_table),
            **self.options,
            DIMS: np.array([self.num_tokens, len(batch.context_lens), 0, 0], np.int32),
            "out": poisoned((rows, site.strides["out"]), NUMPY_DTYPES[site.dtypes["out"]]),
        }

    def bucket(self) -> dict[str, int]:
        return {
            "one": 1,
            "tokens": self.num_tokens + _STALE_TOKENS,
            "sequences": len(self.batch.context_lens) + _STALE_SEQUENCES,
            "splits": CUDA.most(int(self.batch.context_lens.max())),
        }

    def checked(self, out: Array) -> Array:
        """The rows of an output.

        Raises:
            AssertionError: something beside them was written.
        """
        for beside in (out[:, -_GUARD:], out[self.num_tokens :]):
            assert (np.ascontiguousarray(beside).view(np.uint8) == 0xFF).all(), "written past rows"
        return np.ascontiguousarray(out[: self.num_tokens, :-_GUARD])


def dtype_names(batch: Batch) -> dict[str, str]:
    """Element types of `q` and `pool` by their names in protos/dtypes.py."""
    return {"q": _NAMES[batch.q.dtype], "pool": _NAMES[batch.pool.dtype]}


def make_call(sequences: list[Sequence], **case: Any) -> Attention:
    """`case` overrides a small Llama in bf16."""
    chosen: dict[str, Any] = {
        "dtype": "bf16",
        "heads": 4,
        "kv_heads": 2,
        "head_dim": 64,
        "page_size": 16,
        "pool": "bf16",
    } | case
    heads, head_dim, out = chosen["heads"], chosen["head_dim"], chosen.get("out", "bf16")
    batch = make_batch(
        sequences,
        num_heads=heads,
        num_kv_heads=chosen["kv_heads"],
        head_dim=head_dim,
        page_size=chosen["page_size"],
        dtype=chosen["dtype"],
        pool_dtype=chosen["pool"],
        window=chosen.get("window", 0),
    )
    options = {name: np.full(1, value, np.float32) for name, value in chosen.get("by", {}).items()}
    if chosen.get("sinks"):
        options["sinks"] = attention_sinks(heads)
    if out in ("f8e4m3", "i8"):
        options["out_scale"] = np.full(1, 1 / 8, np.float32)
        rng = np.random.default_rng(0)
        options["pre_scale"] = rng.uniform(0.5, 2, heads * head_dim).astype(np.float32)
    attributes = {
        "num_heads": heads,
        "num_kv_heads": chosen["kv_heads"],
        "head_dim": head_dim,
        "scale": head_dim**-0.5,
        "window": chosen.get("window", 0),
        "chunked": chosen.get("chunked", 0),
        "softcap": chosen.get("softcap", 0.0),
        "out_dtype": out,
    }
    return Attention(batch, attributes, options)


def assert_close(call: Attention, out: Any, rows: Any, weights: float) -> None:
    """`weights` is the rounding of attention weights, relative; that of results comes on top."""
    found, expected = call.found(out)[rows], call.expected()[rows]
    size = np.abs(expected)
    allowed = weights * size.max(axis=1, keepdims=True)
    allowed = allowed + BF16_UNIT * size * (2 if "pre_scale" in call.options else 1)
    if "out_scale" in call.options:
        unit = call.options["out_scale"][0]
        fine = call.attributes["out_dtype"] == "f8e4m3"
        allowed = allowed + (size / 16 + unit / 1024 if fine else unit / 2)
    error = np.abs(found - expected)
    assert (error <= allowed).all(), f"off by {error.max()}"


def run_cuda(call: Attention, site: Site, variant: Variant, *, lazy: bool = False) -> Array:
    """The output of a variant whose launches are CUDA C++."""
    arrays, bucket = call.arrays(site), call.bucket()
    for name, num_bytes in variant.scratch.items():
        arrays[SCRATCH + name] = poisoned((num_bytes // 4,), np.float32)
    read = {
        "attention_split": [arrays["q"], *_new_rows(call.batch)],
        "attention_combine": [arrays[SCRATCH + PARTIAL], arrays[SCRATCH + STATS]],
        "attention_prefill": [arrays["q"], *_new_rows(call.batch)],
    }
    for launch in variant.work:
        assert isinstance(launch, Launch)
        assert isinstance(launch.kernel, CudaSource)
        if bucket["splits"] < launch.least_splits:
            continue
        cuda_on_cpu.launch(
            launch.kernel,
            [
                *(arrays[name] for name in launch.arguments),
                *(cuda_on_cpu.map_array(one, arrays[one.parameter]) for one in launch.maps),
            ],
            tuple(programs(extent, bucket) for extent in launch.grid),  # type: ignore[arg-type]
            lazy=lazy,
            late=read[launch.kernel.entry],
        )
    return call.checked(arrays["out"])


def run_triton(call: Attention, lower: str, sm: int) -> Array:
    """The output of the last variant of `module:function`, whose launches are Triton's."""
    return run_variant(call, lower, sm, -1, interpret_work)


def run_variant(
    call: Attention,
    lower: str,
    sm: int,
    variant: int,
    run: Callable[[Work], Mapping[str, Array]],
) -> Array:
    """The output of one variant of `module:function`."""
    site = call.site(sm)
    work = Work(
        lower=lower, arguments=(site,), pick=variant, bucket=call.bucket(), arrays=call.arrays(site)
    )
    return call.checked(run(work)["out"])


def part(call: Attention, sequence: int, first: int, last: int) -> Attention:
    """The call of some new tokens of one sequence alone, [first, last) of them."""
    batch = call.batch
    begin, end = (int(row) for row in batch.query_start[sequence : sequence + 2])
    return Attention(
        Batch(
            q=batch.q[begin + first : begin + last],
            pool=batch.pool,
            slots=batch.slots[begin + first : begin + last],
            query_start=np.asarray([0, last - first], np.int32),
            context_lens=batch.context_lens[sequence : sequence + 1] - (end - begin - last),
            page_table=batch.page_table[sequence : sequence + 1],
        ),
        call.attributes,
        call.options,
    )


def _new_rows(batch: Batch) -> list[Array]:
    """Where in the pool the step's keys and values are."""
    page_size = batch.pool.shape[2]
    return [
        batch.pool[slot // page_size, which, slot % page_size]
        for slot in batch.slots
        for which in (0, 1)
    ]
