"""Masks, penalties and late draws on a GPU: does an engine draw what its CPU twin draws?

    python -m examples.bench.gpu_sampling make DIR    anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu_sampling run DIR     on the GPU, with trtc[cuda]; under a minute

`make` builds a small random Llama with a vocabulary of 32,003 in fp32 for CPUs and for CUDA, and
records what the CPU draws for a few kinds of requests. `run` serves them on the GPU, all of a kind
at once, and prints a table: how many tokens are the twin's before one differs; how many are those
that the host's sampler draws from the GPU's own logits of the same text, which leaves the sampler
alone to differ; and the milliseconds of a step. Exit status 1: something was wrong.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from msgspec.structs import replace

from trtc.protos.sampling import SamplingOptions, SamplingParams
from trtc.runtime.engine.probe import sequence_logits
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor, Float32s
from trtc.runtime.frontends.local import LocalEngine
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.sampling.masks import RowMasks, pack_mask, read_mask
from trtc.runtime.sampling.sampler import SamplingBatch, TokenCounts, sample

MODEL: dict[str, Any] = {
    "vocab_size": 32_003,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": True,
}
NUM_REQUESTS, PROMPT, MAX_TOKENS = 8, 24, 48
_POOL: dict[str, Any] = {"kv_bytes": 16 << 20}
MOST_OTHERS = 0.01
"""Share of tokens that rounding may decide: logits of one text differ in their last bits between
batches."""


@dataclass(frozen=True)
class Mask:
    """Allows a share of the vocabulary, another part after each output."""

    vocab_size: int
    seed: int
    late_s: float
    """What each fourth answer takes."""

    def allowed(self, output_ids: Sequence[int]) -> bytes:
        if self.late_s and len(output_ids) % 4 == 3:
            time.sleep(self.late_s)
        key = [self.seed, len(output_ids), sum(output_ids)]
        allowed = np.random.default_rng(key).random(self.vocab_size) < 0.03
        allowed[key[-1] % self.vocab_size] = True
        return pack_mask(allowed)


@dataclass(frozen=True)
class Kind:
    """Requests that run at once."""

    name: str
    sampling: Sequence[SamplingOptions]
    """Of the requests, in turn."""
    masked: int = 0
    """Each so many a request has masks; 0: none has."""
    late_s: float = 0.0
    logprobs: int | None = None


GREEDY, DRAWN = SamplingOptions(temperature=0.0), SamplingOptions(temperature=0.9)
NARROW = SamplingOptions(temperature=0.8, top_k=50, top_p=0.9)
PENALTIES = (
    SamplingOptions(temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5),
    SamplingOptions(temperature=0.9, frequency_penalty=0.7, logit_bias={7: 2.0, 100: 3.0}),
    SamplingOptions(temperature=0.0, repetition_penalty=0.8),
    SamplingOptions(temperature=0.7, top_p=0.9, presence_penalty=1.5),
)
KINDS = (
    Kind("plain", (GREEDY, DRAWN, NARROW)),
    Kind("penalties", PENALTIES),
    Kind("penalties, logprobs", PENALTIES, logprobs=5),
    Kind("masks", (GREEDY, DRAWN, NARROW), masked=1),
    Kind("masks, every other", (GREEDY, DRAWN, NARROW), masked=2),
    Kind("masks, late", (GREEDY, DRAWN, NARROW), masked=2, late_s=0.02),
    Kind("masks and penalties", PENALTIES, masked=2, logprobs=5),
)


Answers = Mapping[str, list[tuple[int, ...]]]
"""What the twin draws for the requests of each kind."""


@dataclass(frozen=True)
class Request:
    prompt_ids: tuple[int, ...]
    sampling: SamplingOptions
    mask: Mask | None


@dataclass(frozen=True)
class Served:
    tokens: list[tuple[int, ...]]
    """Of each request."""
    ms_a_step: float


def requests_of(kind: Kind, vocab_size: int) -> list[Request]:
    """The same wherever they run."""
    requests = []
    for number in range(NUM_REQUESTS):
        prompt = np.random.default_rng(number).integers(3, vocab_size, PROMPT).tolist()
        sampling = SamplingOptions(seed=number) | kind.sampling[number % len(kind.sampling)]
        is_masked = kind.masked and number % kind.masked == 0
        mask = Mask(vocab_size, number, kind.late_s) if is_masked else None
        requests.append(Request(tuple(prompt), sampling, mask))
    return requests


def serve(engine: LocalEngine, kind: Kind) -> Served:
    """All requests of a kind at once."""
    before = engine.stats()
    running = [
        engine.submit(
            RequestInput(
                token_ids=one.prompt_ids,
                sampling=one.sampling,
                max_tokens=MAX_TOKENS,
                ignore_eos=True,
                logprobs=kind.logprobs,
            ),
            masks=one.mask,
        )
        for one in requests_of(kind, engine.manifest.model.vocab_size)
    ]
    tokens = [one.result().token_ids for one in running]
    after = engine.stats()
    seconds = after.work_seconds - before.work_seconds
    return Served(tokens, 1e3 * seconds / max(1, after.steps - before.steps))


def drawn_by_the_host(executor: Executor, request: Request, output: Sequence[int]) -> list[int]:
    """What the host's sampler draws at each place of an output, from the executor's logits."""
    text = np.array([*request.prompt_ids, *output[:-1]], np.int32)
    logits: Float32s = np.concatenate(list(sequence_logits(executor, text)))
    params, places = SamplingParams(**request.sampling), list(range(len(output)))
    counts = {at: _counts(request.prompt_ids, output[:at]) for at in places if params.has_penalty}
    sampling = SamplingBatch.of([params] * len(places), position=places, counts=counts)
    if request.mask is not None:
        masks = [request.mask.allowed(output[:at]) for at in places]
        words = np.array([read_mask(one, executor.vocab_size) for one in masks])
        sampling = replace(sampling, masks=RowMasks(np.array(places, np.int32), words))
    token_ids = sample(logits[len(request.prompt_ids) - 1 :], sampling).token_ids
    return [int(token) for token in token_ids]


def _counts(prompt: Sequence[int], output: Sequence[int]) -> TokenCounts:
    in_output = Counter(output)
    seen = sorted({*prompt, *output})
    return TokenCounts(
        np.array(seen, np.int32), np.array([in_output[token] for token in seen], np.int32)
    )


def check(engine: Path, answers: Answers, kinds: Sequence[Kind] = KINDS) -> list[str]:
    """Serve every kind of requests twice, print the table, and say what is wrong."""
    with LocalEngine.open(engine, generation_config="trtc", **_POOL) as served:
        first = [serve(served, kind) for kind in kinds]  # captures graphs
        again = [serve(served, kind) for kind in kinds]
    problems = []
    print(f"{'':24}{'tokens':>8}{'as the twin':>13}{'as the host':>13}{'ms a step':>11}")
    with closing(open_session(engine, **_POOL)) as session:
        for kind, one, other in zip(kinds, first, again, strict=True):
            requests = requests_of(kind, session.executor.vocab_size)
            same = others = 0
            for request, twin, *found in zip(
                requests, answers[kind.name], one.tokens, other.tokens, strict=True
            ):
                same += _num_equal(found[1], twin)
                for tokens in found:
                    drawn = drawn_by_the_host(session.executor, request, tokens)
                    others += sum(a != b for a, b in zip(drawn, tokens, strict=True))
            total = NUM_REQUESTS * MAX_TOKENS
            print(
                f"{kind.name:24}{total:8}{same:13}{2 * total - others:8} / {2 * total}"
                f"{other.ms_a_step:9.2f}",
                flush=True,
            )
            if others > 2 * total * MOST_OTHERS:
                problems.append(f"{kind.name}: {others} tokens are not those of the host's sampler")
            if same < total / 2:
                problems.append(f"{kind.name}: {same} tokens are the twin's before one differs")
    return problems


def _num_equal(found: Sequence[int], expected: Sequence[int]) -> int:
    """Tokens before the first one that differs."""
    pairs = enumerate(zip(found, expected, strict=True))
    return next((at for at, (a, b) in pairs if a != b), len(found))


def make(directory: Path, sm: int) -> None:
    """The checkpoint, both engines, and the twin's answers."""
    directory.mkdir(parents=True, exist_ok=True)
    model = _checkpoint(directory / "model")
    for target in ("cpu", f"cuda:sm_{sm}"):
        _build(model, directory / target.partition(":")[0], target)
    (directory / "answers.json").write_bytes(msgspec.json.encode(answers_of(directory / "cpu")))


def answers_of(twin: Path, kinds: Sequence[Kind] = KINDS) -> Answers:
    with LocalEngine.open(twin, generation_config="trtc", **_POOL) as engine:
        return {kind.name: serve(engine, kind).tokens for kind in kinds}


def _checkpoint(directory: Path) -> Path:
    """A random model whose layers matter."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**MODEL))
    with torch.no_grad():
        for parameter in model.parameters():
            spread = 0.2 if parameter.dim() == 1 else 2.5 / parameter.shape[-1] ** 0.5
            parameter.copy_(torch.randn(parameter.shape) * spread)
    model.save_pretrained(directory)
    return directory


def _build(model: Path, output: Path, target: str) -> None:
    from trtc.api import build

    build(
        model,
        output,
        dtype="fp32",
        target=target,
        force=True,
        eval_tokens=0,
        max_batch_size=NUM_REQUESTS,
        max_seq_len=512,
    )
    print(f"{output}: built for {target}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--engine", default="cuda", help="of the directory: cuda, or cpu")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.directory, arguments.sm)
        return 0
    content = (arguments.directory / "answers.json").read_bytes()
    answers = msgspec.json.decode(content, type=dict[str, list[tuple[int, ...]]])
    problems = check(arguments.directory / arguments.engine, answers)
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
