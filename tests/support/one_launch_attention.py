"""Attention by the kernels that TensorRT's plugins launch, in Triton's interpreter."""

from typing import Any

import numpy as np

from tests.support.attention_case import Array
from tests.support.attention_launches import Attention, dtype_names
from tests.support.triton_kernels import Launch, interpret

_TOLERANCES = {"f32": (1e-5, 1e-4), "f16": (1e-3, 1 / 256)}


def attend(call: Attention, tactic: int) -> Array:
    """`out` of paged_attention's kernel, poisoned where it writes nothing."""
    from trtc.plugins.paged_attention import tensorrt_kernel

    arguments = (dtype_names(call.batch), call.attributes, call.batch.pool.shape[2], tactic)
    launch = Launch(
        module="paged_attention.tensorrt_kernel",
        arguments=arguments,
        grid=(num_tiles(call, tensorrt_kernel.kernel(*arguments)), call.num_kv_heads, 1),
        arrays={**inputs(call), "out": np.full_like(call.batch.q, np.nan)},
    )
    return interpret(launch)["out"]


def num_tiles(call: Attention, source: Any) -> int:
    """Programs of a kernel along the first axis."""
    from trtc.plugins.attention.tensorrt_tiles import block_q

    return call.num_tokens // block_q(source) + len(call.batch.context_lens)


def inputs(call: Attention) -> dict[str, Any]:
    """What both attentions read, by parameter name."""
    batch, one = call.batch, np.ones(1, np.float32)
    return {
        "q": batch.q,
        "pool": batch.pool,
        "query_start": batch.query_start,
        "context_lens": batch.context_lens,
        "page_table": batch.page_table,
        "k_scale": call.options.get("k_scale", one),
        "v_scale": call.options.get("v_scale", one),
        "num_sequences": len(batch.context_lens),
        "table_width": batch.page_table.shape[1],
    }


def assert_is_reference(call: Attention, out: Array) -> None:
    """An f32 or f16 output, not quantised."""
    absolute, relative = _TOLERANCES[dtype_names(call.batch)["q"]]
    np.testing.assert_allclose(
        out.astype(np.float32), call.expected(), rtol=relative, atol=absolute
    )
