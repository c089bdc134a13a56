"""gated_delta for GPUs: the recurrence, then the gated norm over whole heads; on sm_90 both in one
launch for steps of one token each of several sequences (cuda_decode_sm90.py)."""

import math

from trtc.plugins.gated_delta.cuda_decode_sm90 import decode_launch, takes
from trtc.plugins.gated_delta.triton import (
    FACTORS,
    delta_chunks,
    delta_pairs,
    delta_rows,
    gated_norm,
)
from trtc.plugins.gpu.lowering import ONE, Extent, Site, Variant
from trtc.plugins.gpu.scratch_launch import scratch_launch
from trtc.plugins.gpu.triton_launch import power_of_two
from trtc.protos.dtypes import DTYPES

_BLOCK, _WIDE_BLOCK = 32, 64
"""Columns of a head's state in a program: 16 KB of registers, of a key of 128. The products of a
chunk's keys are each program's own, so wide blocks take 0.6 of the time (H100), where their
programs fill the GPU."""
_FILLED = 0.9
"""Programs for each multiprocessor that fill it."""
_WARPS = 4
_NORM_BLOCK, _NORM_WARPS = 1024, 4
"""Values of a program of the norm."""
_FEW_SEQUENCES = 4
"""Up to so many, a program for some columns of a head and another launch for the norm are faster
than decode_sm90.cu, whose blocks have a head each then: 3.06 and 3.08 ms for a step of four
sequences of Qwen3.5-35B-A3B on an H200, but of 16 5.50 and 5.41, of 256 24.56 and 23.66."""
_ANY = 1 << 30
_LEAST_ROWS = 16
"""Of a chunk, and of operands of products."""
_MOST_ROWS = {("bf16", False): 64}
"""Of a chunk, where not _LEAST_ROWS, by the type of activations and whether channels have decays.
Chunks go one after the other. The error of f32 grows with the square of a chunk's rows where keys
are alike, and so does the work where channels have decays."""
_PRECISION = {"f32": ("ieee", "ieee"), "bf16": ("tf32", "tf32x3")}
"""Of products with the state, and of those that are inverted, by the type of activations."""


def lower(site: Site) -> tuple[Variant, ...]:
    heads, width = site.axes["value_heads"], site.axes["value_dim"]
    norm_heads = min(max(1, _NORM_BLOCK // power_of_two(width)), power_of_two(heads))
    decays = int(site.attributes["decays"])
    most = _MOST_ROWS.get((site.dtypes["qkv"], decays > 1), _LEAST_ROWS)
    chunk = max(_LEAST_ROWS, min(most, site.page_size))  # none has rows of two pages
    found = {"found": "f32"}
    of_row = {"solved": chunk, "seen": chunk, **({"factors": FACTORS.value} if decays == 1 else {})}
    pairs = dict.fromkeys(of_row, "f32")
    block = min(_BLOCK, max(_LEAST_ROWS, power_of_two(width)))
    by_sequence = (Extent("sequences", times=heads * -(-width // block)), ONE, ONE)
    of_inputs: dict[str, int | float | str] = {
        "KEY_HEADS": site.axes["key_heads"],
        "KEY_DIM": site.axes["key_dim"],
        "VALUE_HEADS": heads,
        "DECAYS": decays,
        "WRITE_SCALE": float(site.attributes["write_scale"]),
        "QKV_STRIDE": site.strides["qkv"],
        "A_STRIDE": site.strides["a"],
        "B_STRIDE": site.strides["b"],
        "KEYS": max(_LEAST_ROWS, power_of_two(site.axes["key_dim"])),
    }
    shared: dict[str, int | float | str] = {
        **of_inputs,
        "VALUE_DIM": width,
        "PAGE_SIZE": site.page_size,
        "TABLE_WIDTH": site.table_width,
        "STATE_STRIDE": site.strides["state_out"],
        "BLOCK": block,
    }
    precision, of_inverse = _PRECISION[site.dtypes["qkv"]]
    of_chunks: dict[str, int | float | bool | str] = {
        "CHUNK": chunk,
        "ROWS": min(chunk, site.page_size),
        "PRECISION": precision,
        "SCALED": decays > 1 or precision == "ieee",
    }
    rows = scratch_launch(site, delta_rows, shared, by_sequence, num_warps=_WARPS, scratch=found)
    solve = scratch_launch(
        site,
        delta_pairs,
        {
            **of_inputs,
            **of_chunks,
            "INVERSE_PRECISION": of_inverse,
            "SEQUENCES": power_of_two(site.limits.max_batch_size),
        },
        (Extent("tokens", block=chunk, times=heads), ONE, ONE),
        num_warps=_WARPS,
        scratch=pairs,
    )
    chunks = tuple(
        scratch_launch(
            site,
            delta_chunks,
            {
                **shared,
                **of_chunks,
                "BLOCK": columns,
                "LEAST_SEQUENCES": least,
                "MOST_SEQUENCES": last,
            },
            (Extent("sequences", times=heads * -(-width // columns)), ONE, ONE),
            num_warps=_WARPS,
            scratch=found | pairs,
        )
        for columns, least, last in _blocks(site, block)
    )
    norm = scratch_launch(
        site,
        gated_norm,
        {
            "HEADS": heads,
            "WIDTH": width,
            "EPS": site.attributes["eps"],
            "GATE": site.attributes["gate"],
            "Z_STRIDE": site.strides["z"],
            "OUT_STRIDE": site.strides["out"],
            "BLOCK_HEADS": norm_heads,
            "BLOCK": power_of_two(width),
        },
        (Extent("tokens", times=-(-heads // norm_heads)), ONE, ONE),
        num_warps=_NORM_WARPS,
        scratch=found,
    )
    most = site.limits.max_num_tokens
    found_bytes = DTYPES["f32"].num_bytes(most * heads * width)
    scratch = {"found": found_bytes}
    apart = min(most, _FEW_SEQUENCES) if takes(site) else most
    decodes = [Variant(work=(rows, norm), max_rows=apart, kind="decode", scratch=scratch)]
    if apart < most:
        decodes.append(Variant(work=(decode_launch(site),), max_rows=most, kind="decode"))
    of_pairs = {
        name: DTYPES["f32"].num_bytes(most * heads * numbers) for name, numbers in of_row.items()
    }
    return (
        *decodes,
        Variant(work=(solve, *chunks, norm), max_rows=most, scratch=scratch | of_pairs),
    )


def _blocks(site: Site, block: int) -> tuple[tuple[int, int, int], ...]:
    """(columns of a program, least and most sequences of a step that takes them)."""
    heads, width = site.axes["value_heads"], site.axes["value_dim"]
    if width < _WIDE_BLOCK:
        return ((block, 0, _ANY),)
    programs = heads * -(-width // _WIDE_BLOCK)
    least = math.ceil(_FILLED * site.arch.multiprocessors / programs)
    return ((block, 0, least - 1), (_WIDE_BLOCK, least, _ANY))
