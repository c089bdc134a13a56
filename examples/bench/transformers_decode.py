"""Decode speed beside Transformers: both greedy, on this machine, in turns, medians and ratios.

    python -m examples.bench.transformers_decode [--hidden 1024 --layers 8] [--batches 1,4] ...

A random Llama of the given shape is written once, served by both in bf16, and timed in turns: on a
shared machine only the ratio of neighbouring runs means anything.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from trtc import open_engine
from trtc.builder.pipeline import build
from trtc.builder.request import BuildRequest


@dataclass(frozen=True)
class Workload:
    batch: int
    input_len: int
    output_len: int
    vocab_size: int
    turn: int = 0
    """Every turn has prompts of its own: a prefix cache must not answer for the work."""

    def prompts(self) -> list[list[int]]:
        rng = np.random.default_rng((self.batch, self.turn))
        ids = rng.integers(4, self.vocab_size, (self.batch, self.input_len))
        return [row.tolist() for row in ids]


def write_model(path: Path, hidden: int, layers: int, vocab_size: int) -> None:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=max(1, hidden // 256),
        vocab_size=vocab_size,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)


def transformers_seconds(model: torch.nn.Module, load: Workload) -> float:
    """Wall time of prefill and greedy decode of one batch."""
    ids = torch.tensor(load.prompts())
    begin = time.perf_counter()
    with torch.inference_mode():
        model.generate(  # type: ignore[operator]
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=load.output_len,
            min_new_tokens=load.output_len,
            do_sample=False,
            pad_token_id=0,
        )
    return time.perf_counter() - begin


def compare(
    runs: dict[str, Callable[[Workload], float]], load: Workload, repeats: int
) -> dict[str, float]:
    """Median tokens a second of each contestant, run in turns after one warm-up each."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(repeats + 1):
        for name, run in runs.items():
            taken = run(replace(load, turn=turn))
            if turn:
                seconds[name].append(taken)
    tokens = load.batch * load.output_len
    return {name: tokens / statistics.median(taken) for name, taken in seconds.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocab", type=int, default=8192)
    parser.add_argument("--batches", default="1,4")
    parser.add_argument("--input-len", type=int, default=64)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        model_dir, engine_dir = Path(folder) / "model", Path(folder) / "engine"
        write_model(model_dir, options.hidden, options.layers, options.vocab)
        # Without a probe: random weights have no accuracy worth measuring.
        build(BuildRequest(model=str(model_dir), dtype="bf16", target="cpu", output=engine_dir))
        model = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.bfloat16).eval()
        with open_engine(engine_dir, num_threads=options.threads) as engine:

            def trtc_seconds(load: Workload) -> float:
                begin = time.perf_counter()
                running = [
                    engine.generate(
                        ids, max_tokens=load.output_len, temperature=0.0, ignore_eos=True
                    )
                    for ids in load.prompts()
                ]
                for generation in running:
                    generation.result()
                return time.perf_counter() - begin

            for batch in map(int, options.batches.split(",")):
                load = Workload(batch, options.input_len, options.output_len, options.vocab)
                rates = compare(
                    {
                        "trtc": trtc_seconds,
                        "transformers": lambda work: transformers_seconds(model, work),
                    },
                    load,
                    options.repeats,
                )
                ratio = rates["trtc"] / rates["transformers"]
                print(json.dumps({"batch": batch, **rates, "ratio": ratio}))


if __name__ == "__main__":
    main()
