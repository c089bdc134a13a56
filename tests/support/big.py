"""Checkpoints of any size, made without a model: for measuring what a build takes."""

import json
import shutil
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from trtc.builder.checkpoint.verify import expected_tensors
from trtc.builder.families.registry import decoder_spec

_BLOCK = 1 << 20


def write_big_checkpoint(directory: Path, config: dict[str, Any], tokenizer: Path) -> int:
    """A bf16 checkpoint of `config` with random weights; returns the bytes of its weights.

    One block of random numbers is repeated, so that gigabytes take seconds.
    """
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copyfile(tokenizer / name, directory / name)
    shapes = expected_tensors(decoder_spec(config, 256))
    entries, end = {}, 0
    for name, shape in shapes.items():
        size = 2 * int(np.prod(shape))
        entries[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [end, end + size]}
        end += size
    header = json.dumps(entries).encode()
    noise = np.random.default_rng(0).standard_normal(_BLOCK, np.float32)
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        for shape in shapes.values():
            count = int(np.prod(shape))
            scaled = noise * 0.02 if len(shape) > 1 else 1 + 0.02 * noise
            block = scaled.astype(ml_dtypes.bfloat16).tobytes()
            for begin in range(0, 2 * count, len(block)):
                file.write(block[: 2 * count - begin])
    return end
