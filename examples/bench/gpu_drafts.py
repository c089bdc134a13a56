"""Drafts on a GPU: do they change tokens, and what are they worth?

    python -m examples.bench.gpu_drafts make DIR    anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu_drafts run DIR     on the GPU, with trtc[cuda]

`make` builds fp32 and bf16 engines of a checkpoint (the bundled pyllama), and writes down prompts
of Python that end by repeating their beginning. `run` serves them with and without drafts, one at a
time and eight at once, and prints tokens a second. Exit status 1: a greedy token of an fp32 engine
was another with drafts, or no draft was right. With bf16, and where tokens are drawn, steps of
other rows round otherwise: how many tokens come before the first that differs is printed.
"""

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from trtc.api import open_engine
from trtc.runtime.frontends.local import LocalEngine

REPOSITORY = Path(__file__).parents[2]
MODEL = REPOSITORY / "examples" / "models" / "pyllama"
DTYPES = ("fp32", "bf16")
BATCHES, TEMPERATURES = (1, 8), (0.0, 0.8)
PROMPTS_FILE, NUM_PROMPTS = "prompts.json", 8
BODY, REPEATED = 1500, 300
"""Characters of a prompt, and of its beginning once more."""
MAX_TOKENS = 160
MAX_SEQ_LEN, MAX_NUM_TOKENS = 1024, 512
"""All prompts at once take several steps, which check drafts of those that came first."""


@dataclass(frozen=True)
class Served:
    """What prompts were answered that came together."""

    tokens: tuple[tuple[int, ...], ...]
    seconds: float
    steps: int
    drafted: int
    accepted: int

    @property
    def per_second(self) -> float:
        return sum(map(len, self.tokens)) / self.seconds


def make(directory: Path, model: Path, target: str) -> None:
    """Engines, and the prompts."""
    from trtc.api import build

    directory.mkdir(parents=True, exist_ok=True)
    for dtype in DTYPES:
        began = time.monotonic()
        output = directory / dtype
        build(
            model,
            output,
            dtype=dtype,
            target=target,
            force=True,
            eval_tokens=0,
            max_seq_len=MAX_SEQ_LEN,
            max_num_tokens=MAX_NUM_TOKENS,
        )
        print(f"{dtype}: {target} built in {time.monotonic() - began:.1f} s", flush=True)
    (directory / PROMPTS_FILE).write_bytes(msgspec.json.encode(prompts()))


def prompts() -> list[str]:
    """Of source files of trtc."""
    texts = [path.read_text() for path in sorted((REPOSITORY / "runtime").rglob("*.py"))]
    long = [text for text in texts if len(text) > 2 * BODY]
    return [text[:BODY] + "\n\n" + text[:REPEATED] for text in long[:NUM_PROMPTS]]


def run(directory: Path, num_drafts: int) -> int:
    texts = msgspec.json.decode((directory / PROMPTS_FILE).read_bytes(), type=list[str])
    problems = [
        problem for dtype in DTYPES for problem in compare(directory / dtype, texts, num_drafts)
    ]
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


def compare(engine: Path, texts: Sequence[str], num_drafts: int) -> list[str]:
    """Serve an engine with and without drafts; what is wrong with its tokens."""
    plain = serve_all(engine, texts, 0)
    drafted = serve_all(engine, texts, num_drafts)
    problems = []
    for (batch, temperature), one in plain.items():
        other = drafted[batch, temperature]
        same = sum(map(_num_same, one.tokens, other.tokens))
        total = sum(map(len, one.tokens))
        print(
            f"{engine.name}, {batch} at once, temperature {temperature}: tokens/s "
            f"{one.per_second:.0f} without, {other.per_second:.0f} with drafts "
            f"({other.per_second / one.per_second:.2f} x); {one.steps}, {other.steps} steps; "
            f"{other.accepted} of {other.drafted} drafts right; {same} of {total} tokens "
            f"before one differs",
            flush=True,
        )
        if same < total and engine.name == "fp32" and temperature == 0:
            problems.append(f"{engine.name}, {batch} at once: drafts changed greedy tokens")
        if other.accepted == 0:
            problems.append(f"{engine.name}, {batch} at once: no draft was right")
    return problems


def serve_all(
    engine: Path, texts: Sequence[str], num_drafts: int
) -> dict[tuple[int, float], Served]:
    """Every batch at every temperature, each twice: the first time graphs are captured."""
    found = {}
    draft: Literal["ngram"] | None = "ngram" if num_drafts else None
    with open_engine(engine, draft=draft, draft_tokens=num_drafts or 1) as opened:
        for batch in BATCHES:
            for temperature in TEMPERATURES:
                serve(opened, texts[:batch], temperature)
                found[batch, temperature] = serve(opened, texts[:batch], temperature)
    return found


def serve(engine: LocalEngine, texts: Sequence[str], temperature: float) -> Served:
    before, began = engine.stats(), time.perf_counter()
    running = engine.generate(
        list(texts), max_tokens=MAX_TOKENS, temperature=temperature, seed=1, ignore_eos=True
    )
    tokens = tuple(one.result().completions[0].token_ids for one in running)
    seconds, after = time.perf_counter() - began, engine.stats()
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
    parser.add_argument("--model", type=Path, default=MODEL, help="checkpoint of the engines")
    parser.add_argument("--target", default="cuda:sm_90")
    parser.add_argument("--draft-tokens", type=int, default=4)
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.directory, arguments.model, arguments.target)
        return 0
    return run(arguments.directory, arguments.draft_tokens)


if __name__ == "__main__":
    sys.exit(main())
