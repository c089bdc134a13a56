"""Weights in a file for engines that were built without any."""

import shutil
from collections.abc import Iterable
from pathlib import Path

import msgspec
import numpy as np
from numpy.typing import NDArray

from trtc.builder.package import seal
from trtc.builder.weights_file import header
from trtc.protos.manifest import PLAN_FILE, WEIGHTS_FILE, read_manifest
from trtc.protos.plan import Weight, read_plan
from trtc.runtime.executors.dummy_weights import fill_weights

_BLOCK = 1 << 22
_VLLM_SPREAD = 1e-3
_E4M3_LEAST = 2.0**-9


def with_weights(engine: Path, output: Path, *, like_vllm: bool = False) -> Path:
    """A copy of an engine that was built without weights, with `--dummy-weights` in a file.

    Args:
        like_vllm: E4M3 weights are what vLLM's `--load-format dummy` makes of them.
    """
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(engine, output)
    plan = read_plan(engine / PLAN_FILE)
    data = fill_weights(plan.weights, plan.weights_bytes)
    if like_vllm:
        fill_like_vllm(data, plan.weights)
    with (output / WEIGHTS_FILE).open("wb") as file:
        file.write(header(plan.weights))
        file.write(data.data)
    manifest = read_manifest(engine)
    seal(output, msgspec.structs.replace(manifest, dummy_weights=False), manifest.files)
    return output


def fill_like_vllm(data: NDArray[np.uint8], weights: Iterable[Weight]) -> None:
    """Write vLLM's dummies over those of `weights` that are E4M3."""
    block = vllm_e4m3_dummies()
    for weight in weights:
        if weight.fill.element == "f8e4m3":
            area = data[weight.offset : weight.offset + weight.bytes]
            area[:] = np.resize(block, weight.bytes)


def vllm_e4m3_dummies() -> NDArray[np.uint8]:
    """A block of them: uniform in +-1e-3, rounded to E4M3, whose least number is 2^-9, so that 98%
    are zeros (`initialize_dummy_weights` in vLLM's model_executor/model_loader/weight_utils.py).

    A GPU that multiplies by zeros draws less power and keeps a higher clock.
    """
    values = np.random.Generator(np.random.Philox(0)).uniform(-_VLLM_SPREAD, _VLLM_SPREAD, _BLOCK)
    least = np.abs(values) > _E4M3_LEAST / 2
    return (np.signbit(values) * np.uint8(0x80) | least).astype(np.uint8)
