"""Train a small hybrid model: gated delta nets, gated attention and routed experts.

    python -m examples.models.train_hybrid OUTPUT --minutes 5 --source DIR --source DIR

The model is a Qwen3-Next of eight million parameters with the tokenizer of the bundled pyllama. It
learns to continue Python source: all `.py` files below the directories given, by default those of
the standard library. One file in 64 is held out, and measured at the end. The result is a
checkpoint in bf16 as Transformers saves it. A GPU is used where there is one; a few minutes on one
give a model of pyllama's quality. It needs torch and transformers, and nothing of trtc.
"""

import argparse
import hashlib
import json
import math
import shutil
import sys
import sysconfig
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

PYLLAMA = Path(__file__).parent / "pyllama"
SHAPE: dict[str, Any] = {
    "vocab_size": 4096,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "layer_types": ["linear_attention", "linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "shared_expert_intermediate_size": 128,
    "intermediate_size": 512,
    "max_position_embeddings": 2048,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
    },
    "router_aux_loss_coef": 0.01,
    "output_router_logits": True,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 0,
    "pad_token_id": 3,
}
"""Of Qwen3NextConfig."""
LENGTH = 1024
"""Tokens of a training sequence."""
END_OF_FILE = 0
HELD_OUT = 64
"""One file of so many is held out."""
MAX_FILE_BYTES = 1 << 20
WARM_UP = 0.02
"""Share of the time in which the learning rate rises."""


@dataclass(frozen=True)
class Corpus:
    """Token ids of files, one after another, with END_OF_FILE after each: [T] int64 on the CPU."""

    training: Tensor
    held_out: Tensor


def read_corpus(sources: Sequence[Path], tokenizer: Tokenizer, length: int = LENGTH) -> Corpus:
    """Tokenise the Python files below some directories; equal files count once.

    Raises:
        SystemExit: there is less text than one sequence to train on, or to hold out.
    """
    parts: dict[bool, list[int]] = {True: [], False: []}
    seen: set[bytes] = set()
    for texts in batched(_texts(sources), 256):
        new = {hashlib.sha256(text.encode()).digest(): text for text in texts}
        new = {digest: text for digest, text in new.items() if digest not in seen}
        seen.update(new)
        encodings = tokenizer.encode_batch(list(new.values()))
        for digest, encoding in zip(new, encodings, strict=True):
            parts[digest[0] % HELD_OUT == 0] += [*encoding.ids, END_OF_FILE]
    for what, ids in (("to train on", parts[False]), ("to hold out", parts[True])):
        if len(ids) <= length:
            raise SystemExit(f"{len(ids)} tokens {what}, and {length + 1} are needed: add --source")
    return Corpus(*(torch.tensor(parts[one], dtype=torch.int64) for one in (False, True)))


def batched(items: Iterable[str], size: int) -> Iterator[list[str]]:
    """Lists of `size` items in order, and a shorter one at the end."""
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _texts(sources: Sequence[Path]) -> Iterator[str]:
    for source in sources:
        for path in sorted(source.rglob("*.py")):
            if path.is_file() and path.stat().st_size <= MAX_FILE_BYTES:
                yield path.read_text(encoding="utf-8", errors="replace")


def learning_rate(progress: float, peak: float) -> float:
    """A linear warm-up, then a cosine to a tenth of the peak.

    Args:
        progress: share of the training that is done, 0 to 1.
    """
    if progress < WARM_UP:
        return peak * progress / WARM_UP
    cosine = 0.5 * (1 + math.cos(math.pi * (progress - WARM_UP) / (1 - WARM_UP)))
    return peak * (0.1 + 0.9 * cosine)


def train(
    model: Any,
    tokens: Tensor,
    seconds: float,
    batch: int,
    peak: float,
    length: int = LENGTH,
    clock: Callable[[], float] = time.monotonic,
) -> int:
    """Train on random sequences for a time; returns the number of steps.

    Args:
        tokens: [T] int64.
        seconds: by `clock`, which is read before each step.
        batch: sequences of a step, each of `length` tokens.
        peak: the largest learning rate.
    """
    device = model.device
    matrices = [one for one in model.parameters() if one.ndim > 1]
    vectors = [one for one in model.parameters() if one.ndim < 2]
    optimizer = torch.optim.AdamW(
        [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
        betas=(0.9, 0.95),
    )
    tokens = tokens.to(device)
    generator = torch.Generator(device).manual_seed(0)
    offsets = torch.arange(length, device=device)
    began, step = clock(), 0
    model.train()
    while (progress := (clock() - began) / seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(progress, peak)
        starts = torch.randint(len(tokens) - length, (batch, 1), generator=generator, device=device)
        ids = tokens[starts + offsets]
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if step % 100 == 0:
            print(f"step {step}, {progress:.0%}, loss {loss.item():.3f}", flush=True)
        step += 1
    return step


@torch.no_grad()
def held_out_loss(model: Any, tokens: Tensor, batch: int, length: int = LENGTH) -> float:
    """Mean cross entropy in nats a token, over whole sequences of `length`."""
    model.eval()
    sequences = tokens[: len(tokens) // length * length].view(-1, length)
    total = 0.0
    for begin in range(0, len(sequences), batch):
        ids = sequences[begin : begin + batch].to(model.device)
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1].float()
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"
        )
        total += losses.item()
    return total / (len(sequences) * (length - 1))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("output", type=Path, help="a directory for the checkpoint")
    parser.add_argument("--source", type=Path, action="append", help="a directory of Python files")
    parser.add_argument("--minutes", type=float, default=5.0, help="how long to train")
    parser.add_argument("--batch", type=int, default=48, help="sequences of a step")
    parser.add_argument("--learning-rate", type=float, default=3e-3, help="its peak")
    arguments = parser.parse_args()
    if arguments.minutes <= 0 or arguments.batch < 1:
        parser.error("--minutes and --batch must be positive")
    from transformers import AutoModelForCausalLM, Qwen3NextConfig

    sources = arguments.source or [Path(sysconfig.get_path("stdlib"))]
    corpus = read_corpus(sources, Tokenizer.from_file(str(PYLLAMA / "tokenizer.json")))
    print(f"{len(corpus.training):,} tokens to train on, {len(corpus.held_out):,} held out")
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    # Grouped GEMMs do not take the f32 weights that autocast leaves.
    model = AutoModelForCausalLM.from_config(
        Qwen3NextConfig(**SHAPE), experts_implementation="eager"
    ).to(device)
    steps = train(
        model, corpus.training, arguments.minutes * 60, arguments.batch, arguments.learning_rate
    )
    model = model.to(torch.bfloat16)
    model.config.output_router_logits = False
    loss = held_out_loss(model, corpus.held_out, arguments.batch)
    model.save_pretrained(arguments.output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PYLLAMA / name, arguments.output / name)
    facts = {
        "parameters": sum(one.numel() for one in model.parameters()),
        "training_tokens": len(corpus.training),
        "seen_tokens": steps * arguments.batch * LENGTH,
        "held_out_loss": round(loss, 4),
        "held_out_perplexity": round(math.exp(loss), 2),
    }
    print(json.dumps(facts, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
