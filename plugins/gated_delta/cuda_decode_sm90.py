"""Steps of one token a sequence on sm_90, in one launch (decode_sm90.cu)."""

from collections.abc import Mapping

from trtc.plugins.gpu.lowering import DIMS, ONE, Extent, Launch, Site
from trtc.plugins.gpu.sources import CPP_TYPES, CudaSource, KernelParameter

_WIDTH = 128
"""Channels of a key, and of a value."""
_THREADS = 320
_STAGES = 3
"""States of 64 KB on their way."""
_STATE_BYTES = 4 * _WIDTH * _WIDTH
_PART_BYTES = 2 * 2 * 8 * _WIDTH * 4
_ENTRY_BYTES = 5 * _WIDTH * 4 + 128
"""Of a row, with barriers."""
_INPUTS: Mapping[str, str] = {
    "qkv": "bf16", "z": "bf16", "b": "bf16", "a": "bf16",
    "query_start": "i32", "context_lens": "i32", "page_table": "i32", "slots": "i32",
    "rate": "f32", "dt_bias": "f32", "norm": "f32", "pre_scale": "f32", "out_scale": "f32",
    DIMS: "i32",
}  # fmt: skip
"""Parameters before out and state_out, and the types that the kernel takes."""


def takes(site: Site) -> bool:
    """Whether the kernel runs the site: bf16, heads of 128 channels, scales of all or none."""
    sizes = {site.axes["key_dim"], site.axes["value_dim"]}
    types = all(site.dtypes[name] == "bf16" for name in ("qkv", "z", "b", "a"))
    return (
        site.arch.has_wgmma
        and sizes == {_WIDTH}
        and types
        and site.dtypes["state_out"] == "f32"
        and site.dtypes["out"] in CPP_TYPES
    )


def decode_launch(site: Site) -> Launch:
    """All heads of all sequences, whatever their number."""
    present = tuple(name for name in _INPUTS if site.has(name) or name == DIMS)
    arguments = (*present, "out", "state_out")
    types = {**_INPUTS, "out": site.dtypes["out"], "state_out": "f32"}
    shared = _STAGES * _STATE_BYTES + _PART_BYTES + (_STAGES + 1) * _ENTRY_BYTES
    strides = ("state_out", "qkv", "z", "a", "b", "out")
    return Launch(
        kernel=CudaSource(
            file="gated_delta/decode_sm90.cu",
            entry="delta_decode",
            parameters=tuple(KernelParameter(name, types[name]) for name in arguments),
            constants={
                "KEY_HEADS": site.axes["key_heads"],
                "VALUE_HEADS": site.axes["value_heads"],
                "DECAYS": int(site.attributes["decays"]),
                "WRITE_SCALE": float(site.attributes["write_scale"]),
                "PAGE_SIZE": site.page_size,
                "TABLE_WIDTH": site.table_width,
                **{_stride_macro(name): site.strides[name] for name in strides},
                "EPS": float(site.attributes["eps"]),
                "SIGMOID_GATE": int(site.attributes["gate"] == "sigmoid"),
                "OUT_TYPE": CPP_TYPES[site.dtypes["out"]],
                "HAS_PRE_SCALE": int(site.has("pre_scale")),
                "HAS_OUT_SCALE": int(site.has("out_scale")),
                "BLOCKS": site.arch.multiprocessors,
                "STAGES": _STAGES,
                "SHARED_BYTES": shared,
            },
            num_threads=_THREADS,
            shared_bytes=shared,
        ),
        arguments=arguments,
        grid=(Extent(times=site.arch.multiprocessors), ONE, ONE),
        overlaps=site.arch.has_pdl,
    )


def _stride_macro(parameter: str) -> str:
    return f"{parameter.removesuffix('_out').upper()}_STRIDE"
