"""Other libraries quantise a checkpoint: what examples/bench/accuracy.py starts with their Python.

    PYTHON accuracy_rivals.py LIBRARY CHECKPOINT TOKENS.npy WEIGHTS.safetensors

Their versions of torch and Transformers need not be those of trtc, of which nothing is imported.
Every linear of the decoder layers gets 4 bits in groups of 128, symmetric, calibrated on exactly
the windows of token ids in TOKENS.npy [windows, tokens]; what its weights stand for is written.
"""

import os
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

ITERATIONS = 200
_BATCH = 8


Weights = dict[str, torch.Tensor]
"""[N, K] f32 that linears stand for, by their names in Transformers' model."""


def auto_round(checkpoint: str, ids: torch.Tensor) -> Weights:
    """Intel's AutoRound: signed gradient descent on rounding and clipping, a decoder layer at a
    time. 200 iterations are its default."""
    from auto_round import AutoRound

    windows: Any = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids]
    quantizer = AutoRound(
        *_opened(checkpoint),
        scheme="W4A16",
        iters=ITERATIONS,
        dataset=torch.utils.data.DataLoader(windows, batch_size=_BATCH),
        seqlen=ids.shape[1],
        nsamples=len(ids),
        batch_size=_BATCH,
        device_map="cpu",
        enable_torch_compile=False,
    )
    return _linears(quantizer.quantize()[0])


def llm_compressor(checkpoint: str, ids: torch.Tensor) -> Weights:
    """vLLM's llm-compressor: GPTQ with its default settings."""
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.quantization import GPTQModifier

    model, tokenizer = _opened(checkpoint)
    columns = {"input_ids": ids.tolist(), "attention_mask": torch.ones_like(ids).tolist()}
    made = oneshot(
        model=model,
        tokenizer=tokenizer,
        dataset=Dataset.from_dict(columns),
        recipe=GPTQModifier(targets="Linear", scheme="W4A16", ignore=["lm_head"]),
        max_seq_length=ids.shape[1],
        num_calibration_samples=len(ids),
        shuffle_calibration_samples=False,
    )
    return _linears(made)


def gptqmodel(checkpoint: str, ids: torch.Tensor) -> Weights:
    """GPTQModel, the successor of AutoGPTQ: GPTQ with its default settings."""
    # With two cores its default is one worker, which it refuses.
    os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")
    from gptqmodel import BACKEND, GPTQModel, QuantizeConfig

    settings = QuantizeConfig(bits=4, group_size=128, sym=True, device="cpu", offload_to_disk=False)
    model = GPTQModel.load(checkpoint, settings)
    windows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in ids[:, None]]
    model.quantize(windows, batch_size=_BATCH, backend=BACKEND.TORCH)
    with tempfile.TemporaryDirectory() as directory:
        # Before it has been saved, its zero points are stored less 1 and read as they are.
        model.save(directory)
        made = GPTQModel.load(directory, backend=BACKEND.TORCH, device="cpu")
        return {
            name: module.dequantize_weight().T.float().contiguous()
            for name, module in made.model.named_modules()
            if hasattr(module, "dequantize_weight")
        }


def _opened(checkpoint: str) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return model, AutoTokenizer.from_pretrained(checkpoint)


def _linears(model: Any) -> Weights:
    """Of a library that leaves rounded values in the model."""
    return {
        name: module.weight.detach().float().contiguous()
        for name, module in model.named_modules()
        if ".layers." in name and isinstance(module, torch.nn.Linear)
    }


LIBRARIES: dict[str, Callable[[str, torch.Tensor], Weights]] = {
    "auto-round": auto_round,
    "llm-compressor": llm_compressor,
    "gptqmodel": gptqmodel,
}


def main() -> None:
    library, checkpoint, tokens, output = sys.argv[1:]
    torch.set_num_threads(1)
    ids = torch.from_numpy(np.load(tokens).astype(np.int64))
    found = LIBRARIES[library](checkpoint, ids)
    save_file({f"{name}.weight": weight for name, weight in found.items()}, output)


if __name__ == "__main__":
    main()
