"""Libraries of constrained decoding on suites of JSON schemas: what they hold, and how fast.

    git clone https://github.com/json-schema-org/JSON-Schema-Test-Suite
    python -m examples.bench.grammar JSON-Schema-Test-Suite/tests/draft2020-12 TOKENIZER_DIRECTORY

    git clone https://github.com/guidance-ai/jsonschemabench
    python -m examples.bench.grammar jsonschemabench/maskbench/data TOKENIZER_DIRECTORY --every 12

Every instance of a suite is written as JSON and read token by token, with a mask before each, as
a model would write it. A schema may be refused, which is honest. An invalid instance that is taken
is not: a model may then write what its schema forbids. A valid instance that is not taken is a
document that a model cannot write; most have their properties in another order than the schema.

The first is in the suite's own form: a file is a list of schemas with their tests. The second,
JSONSchemaBench's MaskBench, has one schema a file. Each schema is tried in a process that is ended
where it takes more than `--limit` seconds of CPU time, and replaced where it dies: both are errors.
Times are of the CPU, so that a machine may have other work.

xgrammar is measured where it is installed, with its documented meaning of schemas
(`strict_mode=False`) and one thread.
"""

import argparse
import importlib.util
import json
import multiprocessing
import resource
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from trtc.runtime.text.tokenizer import Tokenizer

FORK = multiprocessing.get_context("fork")
"""A process begins with the library's tables of the vocabulary."""
MAX_BYTES = 16 << 30
"""Of address space."""


class Reader(Protocol):
    """A grammar that reads tokens."""

    def allows(self, token: int) -> bool:
        """Whether the mask of the next token has it; what takes the time of a mask."""
        ...

    def read(self, token: int) -> None: ...


Compile = Callable[[str], Callable[[], Reader]]
"""A schema's text to what makes readers of it; raises for a schema that is refused."""


class Instance(NamedTuple):
    tokens: Sequence[int]
    is_valid: bool


@dataclass
class Found:
    """Of one library, over the suite. Times in milliseconds."""

    schemas: int = 0
    refused: int = 0
    errors: int = 0
    """Schemas over a limit, or that ended their process."""
    taken: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    not_taken: dict[bool, int] = field(default_factory=lambda: {True: 0, False: 0})
    """Valid instances, and invalid ones."""
    first_mask_ms: list[float] = field(default_factory=list)
    """From a schema's text to its first mask."""
    mask_ms: list[float] = field(default_factory=list)


def llguidance(tokenizer: Tokenizer, vocab_size: int, eos: int) -> Compile:
    """As trtc uses it."""
    from llguidance import LLMatcher

    from trtc.runtime.grammar.notation import llguidance_grammar, parser_limits
    from trtc.runtime.grammar.vocabulary import trie_of

    trie = trie_of(tokenizer, vocab_size, [eos])

    class Matcher:
        def __init__(self, first: LLMatcher) -> None:
            self._matcher = first.deep_copy()

        def allows(self, token: int) -> bool:
            mask = self._matcher.compute_bitmask()
            return bool(mask[token // 8] >> token % 8 & 1)

        def read(self, token: int) -> None:
            self._matcher.consume_token(token)

    def compile_schema(schema: str) -> Callable[[], Reader]:
        grammar = llguidance_grammar("json_schema", schema)
        matcher = LLMatcher(trie, grammar, log_level=0, limits=parser_limits())
        if matcher.is_error():
            raise ValueError(matcher.get_error())
        return lambda: Matcher(matcher)

    return compile_schema


def xgrammar(tokenizer: Tokenizer, vocab_size: int, eos: int) -> Compile:
    import xgrammar as library

    tokens = [tokenizer.token_utf8(token) for token in range(vocab_size)]
    info = library.TokenizerInfo(
        tokens, library.VocabType.RAW, vocab_size=vocab_size, stop_token_ids=[eos]
    )
    compiler = library.GrammarCompiler(info, max_threads=1, cache_enabled=False)
    bits = library.allocate_token_bitmask(1, vocab_size)
    words = bits.numpy().view(np.uint32)[0]

    class Matcher:
        def __init__(self, compiled: Any) -> None:
            self._matcher = library.GrammarMatcher(compiled)

        def allows(self, token: int) -> bool:
            bits.fill_(-1)  # it writes nothing where everything is allowed
            self._matcher.fill_next_token_bitmask(bits)
            return bool(words[token // 32] >> np.uint32(token % 32) & np.uint32(1))

        def read(self, token: int) -> None:
            self._matcher.accept_token(token)

    def compile_schema(schema: str) -> Callable[[], Reader]:
        compiled = compiler.compile_json_schema(schema, any_whitespace=True, strict_mode=False)
        return lambda: Matcher(compiled)

    return compile_schema


LIBRARIES = {"llguidance": llguidance, "xgrammar": xgrammar}


Case = tuple[str, list[Instance]]
"""A schema's text, and its instances."""


def cases(suite: Path, tokenizer: Tokenizer, every: int = 1) -> Iterator[Case]:
    """Schemas with their instances: those that a grammar could hold, which are objects."""
    for path in sorted(suite.glob("*.json"))[::every]:
        content = json.loads(path.read_text())
        for group in content if isinstance(content, list) else [content]:
            if isinstance(group["schema"], dict):
                yield (
                    json.dumps(group["schema"]),
                    [
                        Instance(_written(one["data"], tokenizer), one["valid"])
                        for one in group["tests"]
                    ],
                )


def _written(data: Any, tokenizer: Tokenizer) -> Sequence[int]:
    return tokenizer.encode(json.dumps(data, ensure_ascii=False), add_special_tokens=False)


def check(compile_schema: Compile, schema: str, instances: list[Instance], eos: int) -> Found:
    found = Found(schemas=1)
    begun = time.thread_time()
    try:
        reader = compile_schema(schema)
        reader().allows(eos)
    except Exception:  # noqa: BLE001 (each library has its own)
        found.refused = 1
        return found
    found.first_mask_ms.append(1e3 * (time.thread_time() - begun))
    for tokens, is_valid in instances:
        is_taken = _reads(reader(), [*tokens, eos], found.mask_ms)
        (found.taken if is_taken else found.not_taken)[is_valid] += 1
    return found


def check_all(
    compile_schema: Compile, listed: Sequence[Case], eos: int, limit_s: float
) -> Iterator[Found]:
    """What is found of each schema, in processes that share nothing but what is loaded."""
    begin = 0
    while begin < len(listed):
        mine, theirs = FORK.Pipe(duplex=False)
        child = FORK.Process(
            target=_send_all,
            args=(theirs, compile_schema, listed[begin:], eos, limit_s),
            daemon=True,
        )
        child.start()
        theirs.close()
        try:
            while begin < len(listed):
                yield mine.recv()
                begin += 1
        except EOFError:
            yield Found(schemas=1, errors=1)
            begin += 1
        child.join()
        mine.close()


def _send_all(
    pipe: Any, compile_schema: Compile, listed: Sequence[Case], eos: int, limit_s: float
) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MAX_BYTES, MAX_BYTES))
    for schema, instances in listed:
        signal.setitimer(signal.ITIMER_PROF, limit_s)  # SIGPROF ends the process
        pipe.send(check(compile_schema, schema, instances, eos))


def _reads(reader: Reader, tokens: Sequence[int], mask_ms: list[float]) -> bool:
    for token in tokens:
        begun = time.thread_time()
        is_allowed = reader.allows(token)
        mask_ms.append(1e3 * (time.thread_time() - begun))
        if not is_allowed:
            return False
        reader.read(token)
    return True


def _sum(parts: Sequence[Found]) -> Found:
    whole = Found()
    for part in parts:
        whole.schemas += part.schemas
        whole.refused += part.refused
        whole.errors += part.errors
        for valid in (True, False):
            whole.taken[valid] += part.taken[valid]
            whole.not_taken[valid] += part.not_taken[valid]
        whole.first_mask_ms += part.first_mask_ms
        whole.mask_ms += part.mask_ms
    return whole


def _times(values: Sequence[float]) -> str:
    return f"{np.percentile(values, 50):.3f} / {np.percentile(values, 99):.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument(
        "suite", type=Path, help="a draft's folder of the Test Suite, or MaskBench's data"
    )
    parser.add_argument("tokenizer", type=Path, help="a folder with tokenizer.json")
    parser.add_argument("--eos", type=int, default=0, help="the token that ends a sequence")
    parser.add_argument("--every", type=int, default=1, help="take every Nth file of the suite")
    parser.add_argument("--limit", type=float, default=20.0, help="seconds of CPU time a schema")
    asked = parser.parse_args()
    tokenizer = Tokenizer.load(asked.tokenizer)
    listed = list(cases(asked.suite, tokenizer, asked.every))
    print(
        "| library | schemas | refused | errors | valid: taken, not | invalid: taken, not |", end=""
    )
    print(" first mask p50 / p99, ms | mask p50 / p99, ms |")
    print("|---|---|---|---|---|---|---|---|")
    for name, library in LIBRARIES.items():
        if importlib.util.find_spec(name) is None:
            continue
        compile_schema = library(tokenizer, tokenizer.vocab_size, asked.eos)
        found = _sum(list(check_all(compile_schema, listed, asked.eos, asked.limit)))
        print(
            f"| {name} | {found.schemas} | {found.refused} | {found.errors} "
            f"| {found.taken[True]}, {found.not_taken[True]} "
            f"| {found.taken[False]}, {found.not_taken[False]} "
            f"| {_times(found.first_mask_ms)} | {_times(found.mask_ms)} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
