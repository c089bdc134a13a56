"""Drafts on a GPU: do they change tokens, and what are they worth?

    python -m examples.bench.gpu_drafts make DIR    anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu_drafts run DIR     on the GPU, with trtc[cuda]

`make` builds fp32 and bf16 engines of the bundled pyllama, one of the shape of Llama-3.1-8B without
weights, and engines of a small random LFM2, whose convolutions keep states. `run` serves prompts
with and without drafts, one at a time and eight at once, and prints tokens a second. The prompts of
pyllama are Python that ends by repeating its beginning. Those of the others are random: answers of
the shape come to repeat themselves, because its weights are random too, and LFM2 draws one of two
tokens, so that drafts are right now and then.

Exit status 1: a greedy token of an fp32 engine was another with drafts, or none of the drafts of
pyllama or LFM2 was right. With bf16, and where tokens are drawn, steps of other rows round
otherwise: how many tokens come before the first that differs is printed.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from msgspec.structs import replace

from examples.bench.gpu_groups import VOCABULARY, random_checkpoint
from examples.bench.gpu_shapes import LLAMA_8B
from examples.bench.loops import serve
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.engine.session import Session, open_session
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.text.tokenizer import Tokenizer

REPOSITORY = Path(__file__).parents[2]
PYLLAMA = REPOSITORY / "examples" / "models" / "pyllama"
SHAPE = "8b-bf16"
"""Of dummy weights."""
STATES = "lfm2-fp32", "lfm2-bf16"
DTYPES = {
    "fp32": "fp32",
    "bf16": "bf16",
    SHAPE: "bf16",
    "lfm2-fp32": "fp32",
    "lfm2-bf16": "bf16",
}
"""Engine -> scheme."""
TWO_TOKENS = {5: 50.0, 6: 50.0}
"""Biases for models with states."""
BATCHES, TEMPERATURES = (1, 8), (0.0, 0.8)
PROMPTS_FILE, NUM_PROMPTS = "prompts.json", max(BATCHES)
BODY, REPEATED = 1500, 300
"""Characters of a prompt, and of its beginning once more."""
RANDOM_LENGTH = 500
MAX_TOKENS = 256
MAX_SEQ_LEN, MAX_NUM_TOKENS = 1024, 512
"""All prompts at once take several steps, which check drafts of those that came first."""
NUM_PAGES = 1024


@dataclass(frozen=True)
class Served:
    """What prompts were answered that came together."""

    tokens: list[tuple[int, ...]]
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def make(directory: Path, target: str, engines: Sequence[str]) -> None:
    """Engines, and the token ids of their prompts."""
    from trtc.api import build

    for engine in engines:
        began, is_shape = time.monotonic(), engine == SHAPE
        build(
            model_of(engine, directory / "models"),
            directory / engine,
            dtype=DTYPES[engine],
            target=target,
            force=True,
            eval_tokens=None if is_shape else 0,
            dummy_weights=is_shape,
            max_seq_len=MAX_SEQ_LEN,
            max_num_tokens=MAX_NUM_TOKENS,
        )
        print(f"{engine}: {target} built in {time.monotonic() - began:.1f} s", flush=True)
    source = prompts_of_source()
    vocabularies = {SHAPE: 128_000} | dict.fromkeys(STATES, VOCABULARY)
    prompts = {
        one: random_prompts(vocabularies[one]) if one in vocabularies else source for one in engines
    }
    (directory / PROMPTS_FILE).write_bytes(msgspec.json.encode(prompts))


def model_of(engine: str, directory: Path) -> Path:
    """What an engine is built from; made if need be."""
    if engine in STATES:
        return random_checkpoint(directory, "lfm2")
    if engine != SHAPE:
        return PYLLAMA
    shape = directory / "shape"
    shape.mkdir(parents=True, exist_ok=True)
    (shape / "config.json").write_text(json.dumps(LLAMA_8B))
    return shape


def prompts_of_source() -> list[list[int]]:
    """Files of trtc, in the tokens of pyllama."""
    texts = [path.read_text() for path in sorted((REPOSITORY / "runtime").rglob("*.py"))]
    long = [text for text in texts if len(text) > 2 * BODY][:NUM_PROMPTS]
    with closing(Tokenizer.load(PYLLAMA)) as tokenizer:
        return [list(tokenizer.encode(text[:BODY] + "\n\n" + text[:REPEATED])) for text in long]


def random_prompts(vocabulary: int) -> list[list[int]]:
    random = np.random.default_rng(0)
    return [random.integers(10, vocabulary, RANDOM_LENGTH).tolist() for _ in range(NUM_PROMPTS)]


def run(directory: Path, num_drafts: int, engines: Sequence[str]) -> int:
    prompts = msgspec.json.decode(
        (directory / PROMPTS_FILE).read_bytes(), type=dict[str, list[list[int]]]
    )
    problems: list[str] = []
    for engine in engines:
        began, is_shape = time.perf_counter(), engine == SHAPE
        session = open_session(directory / engine, num_pages=NUM_PAGES, dummy_weights=is_shape)
        print(f"{engine}: opened in {time.perf_counter() - began:.1f} s", flush=True)
        with closing(session):
            problems += compare(engine, session, prompts[engine], num_drafts)
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


def compare(
    engine: str, session: Session, prompts: Sequence[Sequence[int]], num_drafts: int
) -> list[str]:
    """Serve prompts with and without drafts; what is wrong with the tokens."""
    samplings = [
        SamplingParams(temperature=temperature, logit_bias=TWO_TOKENS if engine in STATES else {})
        for temperature in (TEMPERATURES[:1] if engine == SHAPE else TEMPERATURES)
    ]
    plain = serve_all(session, prompts, samplings, None)
    drafted = serve_all(session, prompts, samplings, DraftConfig(num_tokens=num_drafts))
    problems = []
    for (batch, temperature), one in plain.items():
        other = drafted[batch, temperature]
        same = sum(map(_num_same, one.tokens, other.tokens))
        total = sum(map(len, one.tokens))
        print(
            f"  {batch} at once, temperature {temperature}: tokens/s {one.per_second:.0f} without, "
            f"{other.per_second:.0f} with drafts ({other.per_second / one.per_second:.2f} x); "
            f"{one.steps}, {other.steps} steps; {other.accepted} of {other.drafted} drafts right; "
            f"{same} of {total} tokens before one differs",
            flush=True,
        )
        if temperature > 0:
            continue
        if same < total and DTYPES[engine] == "fp32":
            problems.append(f"{engine}, {batch} at once: drafts changed greedy tokens")
        if other.accepted == 0 and engine != SHAPE:
            problems.append(f"{engine}, {batch} at once: no draft was right")
    return problems


def serve_all(
    session: Session,
    prompts: Sequence[Sequence[int]],
    samplings: Sequence[SamplingParams],
    drafts: DraftConfig | None,
) -> Mapping[tuple[int, float], Served]:
    """Every batch at every temperature, each twice: the first time graphs are captured."""
    loop = EngineLoop(session.executor, None, LoopConfig(drafts=drafts))
    loop.start()
    try:
        found = {}
        for batch in BATCHES:
            for sampling in samplings:
                serve_once(loop, prompts[:batch], sampling)
                served = serve_once(loop, prompts[:batch], sampling)
                found[batch, sampling.temperature] = served
        return found
    finally:
        loop.stop()


def serve_once(
    loop: EngineLoop, prompts: Sequence[Sequence[int]], sampling: SamplingParams
) -> Served:
    """
    Raises:
        RuntimeError: a request failed.
    """
    requests = [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=tuple(prompt),
            sampling=replace(sampling, seed=number),
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        for number, prompt in enumerate(prompts)
    ]
    before, began = loop.stats(), time.perf_counter()
    answers = serve(loop, requests)
    seconds, after = time.perf_counter() - began, loop.stats()
    tokens = []
    for answer in answers:
        if isinstance(answer, str):
            raise RuntimeError(answer)
        tokens.append(answer)
    return Served(
        tokens,
        seconds,
        after.steps - before.steps,
        after.draft_tokens - before.draft_tokens,
        after.accepted_draft_tokens - before.accepted_draft_tokens,
    )


def _num_same(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens before the first that differs."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((at for at, (first, second) in pairs if first != second), len(one))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--engines", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--draft-tokens", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.directory, arguments.target, arguments.engines)
        return 0
    return run(arguments.directory, arguments.draft_tokens, arguments.engines)


if __name__ == "__main__":
    sys.exit(main())
