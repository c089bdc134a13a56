"""The time between tokens with masks, beside none: in process, on a CPU or a GPU.

    python -m examples.bench.mask_itl ENGINE [--sequences 1,64] [--temperatures 0,1]
    python -m examples.bench.mask_itl --step-ms 2.6

Sequences decode together: of none, half or all of them the output has to be a JSON document, or
of all one whose texts have a largest length (`lengths`), or a `logits_processor` that changes
nothing is asked about all. Rounds go through all of these by turns,
over one opened engine, so that what else the machine does meets all of them. Prints the median of
the rounds' p50 and p99 and of their ratios to `none`, and what a step of it is made of:

    forward   calls that launch a step; a CPU engine computes in them
    draw      calls that draw from its logits, once its masks are ready
    wait      until its tokens are there
    host      what the engine loop does beside
    cpu       processor time of all threads, which other work on the machine does not change

Without an engine a device is simulated that runs ahead and takes `--step-ms` for each step: what is
added to that is the host's.
An engine without a tokenizer of its own gets one of its vocabulary's size, trained on the Python
files of the standard library in half a minute and kept in `--tokenizer`.
"""

import argparse
import asyncio
import statistics
import sysconfig
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trtc.protos.manifest import read_manifest
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.emission import Delivery
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor, PendingStep, StepBatch, UndrawnStep
from trtc.runtime.executors.echo import EchoExecutor, EchoOptions
from trtc.runtime.grammar.grammars import Grammars
from trtc.runtime.hooks.calls import HookCalls
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.requests.grammar import json_schema
from trtc.runtime.requests.principal import LOCAL
from trtc.runtime.requests.request import GenerationRequest
from trtc.runtime.requests.request_input import RequestInput
from trtc.runtime.requests.token_masks import MaskSource
from trtc.runtime.sampling.sampler import SampledTokens, SamplingBatch
from trtc.runtime.service.hooks import HookedRequest
from trtc.runtime.text.tokenizer import TOKENIZER_FILE, Tokenizer

PERSONS: dict[str, Any] = {
    "type": "array",
    "minItems": 10_000,
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer", "minimum": 0, "maximum": 150},
            "role": {"enum": ["user", "admin", "guest"]},
            "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
            "score": {"type": "number"},
        },
        "required": ["name", "age", "role", "tags", "score"],
        "additionalProperties": False,
    },
}
"""Never at its end, whatever a model of random weights writes."""
_LENGTHS = {
    "name": {"type": "string", "maxLength": 40},
    "tags": {"type": "array", "items": {"type": "string", "maxLength": 20}, "maxItems": 3},
}
PERSONS_WITH_LENGTHS = deepcopy(PERSONS)
"""Masks within a text that has a largest length take llguidance most time."""
PERSONS_WITH_LENGTHS["items"]["properties"] |= _LENGTHS
_EOS = 0
"""Of the tokenizer that is trained here."""
_PATIENCE_S = 600
_PICKED_WORDS = 64


class Itl(NamedTuple):
    """Of one run, milliseconds."""

    p50: float
    p99: float
    parts: dict[str, float]
    """Of a step, by the names above: means."""


@dataclass
class TimedExecutor:
    """An executor, and how long its calls take (implements Executor)."""

    executor: Executor
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> "_TimedStep":
        return _TimedStep(self._timed("forward", self.executor.launch, batch, sampling), self)

    def launch_forward(self, batch: StepBatch) -> "_TimedStep":
        return _TimedStep(self._timed("forward", self.executor.launch_forward, batch), self)

    def _timed(self, part: str, call: Callable[..., Any], *arguments: Any) -> Any:
        begin = time.perf_counter()
        try:
            return call(*arguments)
        finally:
            self.seconds[part] += time.perf_counter() - begin


class _TimedStep(NamedTuple):
    """A step under way (implements UndrawnStep and PendingStep)."""

    step: Any
    timed: TimedExecutor

    def draw(self, sampling: SamplingBatch) -> "_TimedStep":
        return _TimedStep(self.timed._timed("draw", self.step.draw, sampling), self.timed)

    def wait(self) -> Any:
        return self.timed._timed("wait", self.step.wait)


class SimulatedDevice(EchoExecutor):
    """Computes nothing, but takes its time for it (implements Executor)."""

    def __init__(self, options: EchoOptions, step_s: float) -> None:
        super().__init__(options)
        self._step_s = step_s
        self._busy_until = 0.0
        self._rng = np.random.default_rng(0)

    @property
    def runs_ahead(self) -> bool:
        return True

    def launch(self, batch: StepBatch, sampling: SamplingBatch) -> PendingStep:
        return self.launch_forward(batch).draw(sampling)

    def launch_forward(self, batch: StepBatch) -> UndrawnStep:
        self._busy_until = max(self._busy_until, time.perf_counter()) + self._step_s
        return _SimulatedStep(self, self._busy_until)

    def drawn(self, sampling: SamplingBatch) -> SampledTokens:
        """Any tokens that masks allow."""
        tokens = self._rng.integers(1, self.vocab_size, sampling.num_rows, np.int32)
        if sampling.masks is not None:
            words = sampling.masks.words
            each = np.arange(len(words))
            # Some words at random, another set for each row, or else the first one that there is.
            picked = self._rng.integers(0, words.shape[1], (len(words), _PICKED_WORDS))
            picked[:, -1] = (words != 0).argmax(axis=1)
            word = picked[each, (np.take_along_axis(words, picked, axis=1) != 0).argmax(axis=1)]
            bits = words[each, word].astype(np.int64)
            lowest = np.log2((bits & -bits).astype(np.float64)).astype(np.int64)
            tokens[sampling.masks.rows] = 32 * word + lowest
        return SampledTokens(tokens)


class _SimulatedStep(NamedTuple):
    """A step under way (implements UndrawnStep and PendingStep)."""

    device: SimulatedDevice
    done_at: float
    tokens: SampledTokens | None = None

    def draw(self, sampling: SamplingBatch) -> "_SimulatedStep":
        return self._replace(tokens=self.device.drawn(sampling))

    def wait(self) -> SampledTokens:
        time.sleep(max(0.0, self.done_at - time.perf_counter()))
        assert self.tokens is not None
        return self.tokens


class Bench:
    """An opened engine, and where masks come from."""

    def __init__(
        self, executor: Executor, grammars: Grammars, calls: HookCalls, shape: "Shape"
    ) -> None:
        self._executor = executor
        self._vocab_size = executor.vocab_size
        self._grammars = grammars
        self._calls = calls
        self._shape = shape

    def run(self, case: str, number: int, temperature: float) -> Itl:
        timed = TimedExecutor(self._executor)
        loop = EngineLoop(timed, None, LoopConfig(prefix_cache=False))
        at: list[list[float]] = [[] for _ in range(number)]
        ended = threading.Semaphore(0)

        def sink_of(times: list[float]) -> Callable[[Delivery], None]:
            def sink(delivery: Delivery) -> None:
                times.append(time.perf_counter())
                if isinstance(delivery, Exception):
                    print(f"failed: {delivery}", flush=True)
                if isinstance(delivery, Exception) or delivery[-1].usage is not None:
                    ended.release()

            return sink

        rng = np.random.default_rng(0)
        for index, times in enumerate(at):
            prompt = rng.integers(1, self._vocab_size, self._shape.input_len).tolist()
            request = GenerationRequest(
                request_id=str(index),
                prompt_ids=tuple(prompt),
                sampling=SamplingParams(temperature=temperature, seed=index),
                max_tokens=self._shape.output_len,
                masks=self._masks(case, index),
            )
            loop.submit(request, sink_of(times))
        begin = time.process_time()
        loop.start()
        for _ in at:
            assert ended.acquire(timeout=_PATIENCE_S)
        steps, seconds = loop.stats().steps, loop.stats().work_seconds
        cpu = time.process_time() - begin
        loop.stop()
        gaps = 1e3 * np.concatenate([np.diff(times[1:]) for times in at])
        parts = {name: 1e3 * spent / steps for name, spent in timed.seconds.items()}
        parts["host"] = 1e3 * seconds / steps - sum(parts.values())
        parts["cpu"] = 1e3 * cpu / steps
        return Itl(float(np.median(gaps)), float(np.quantile(gaps, 0.99)), parts)

    def _masks(self, case: str, index: int) -> MaskSource | None:
        if case == "hook":
            request_input = RequestInput(token_ids=(1,), request_id=str(index))
            return HookedRequest(self._calls, "model", request_input, LOCAL).masks(self._vocab_size)
        if case == "all" or (case == "half" and index % 2):
            return self._grammars.masks(json_schema(PERSONS), 1)
        if case == "lengths":
            return self._grammars.masks(json_schema(PERSONS_WITH_LENGTHS), 1)
        return None


@dataclass(frozen=True)
class Shape:
    input_len: int
    output_len: int


def tokenizer_for(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a directory, trained first if there is none."""
    if not (directory / TOKENIZER_FILE).exists():
        directory.mkdir(parents=True, exist_ok=True)
        _train(vocab_size).save(str(directory / TOKENIZER_FILE))
    return Tokenizer.load(directory)


def _train(vocab_size: int) -> Any:
    from tokenizers import Tokenizer as FastTokenizer
    from tokenizers import decoders, models, pre_tokenizers, trainers

    def texts() -> Iterator[str]:
        for file in sorted(Path(sysconfig.get_path("stdlib")).rglob("*.py")):
            if "site-packages" not in file.parts:
                yield file.read_text(errors="replace")

    fast = FastTokenizer(models.BPE())
    fast.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=1,
        special_tokens=["<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    fast.train_from_iterator(texts(), trainer)
    return fast


@contextmanager
def started_calls(name: str) -> Iterator[HookCalls]:
    """Processes of hooks, and a thread whose asyncio loop asks them, as a server's does."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="bench-hooks")
    thread.start()
    calls = HookCalls(HooksConfig(name))
    try:
        asyncio.run_coroutine_threadsafe(calls.start(), loop).result()
        yield calls
    finally:
        asyncio.run_coroutine_threadsafe(calls.close(), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def report(number: int, temperature: float, found: dict[str, list[Itl]]) -> None:
    for case, rounds in found.items():
        base = found["none"]
        ratio = statistics.median(
            one.p50 / none.p50 for one, none in zip(rounds, base, strict=True)
        )
        tail = statistics.median(one.p99 / none.p99 for one, none in zip(rounds, base, strict=True))
        parts = {
            name: statistics.median(one.parts.get(name, 0.0) for one in rounds)
            for name in ("forward", "draw", "wait", "host", "cpu")
        }
        print(
            f"{number:3d} sequences, temperature {temperature:g}, {case:5s}"
            f"  p50 {statistics.median(one.p50 for one in rounds):8.3f} ms ({ratio:.3f}x)"
            f"  p99 {statistics.median(one.p99 for one in rounds):8.3f} ms ({tail:.3f}x)   "
            + "  ".join(f"{name} {spent:.3f}" for name, spent in parts.items()),
            flush=True,
        )


class Opened(NamedTuple):
    executor: Executor
    tokenizer: Tokenizer | None = None
    eos_token_ids: tuple[int, ...] = ()


def opened(given: argparse.Namespace, stack: ExitStack) -> Opened:
    """What decodes: an engine, or what plays one."""
    most = max(map(int, given.sequences.split(",")))
    length = given.input_len + given.output_len
    if given.engine is None:
        options = EchoOptions(
            vocab_size=given.vocab_size,
            num_pages=most * -(-length // EchoOptions.page_size),
            max_batch_size=most,
            max_seq_len=length,
            max_num_tokens=given.input_len * most,
        )
        return Opened(SimulatedDevice(options, given.step_ms / 1e3))
    manifest = read_manifest(given.engine)
    session = open_session(
        given.engine,
        num_pages=most * len(manifest.kv.groups) * -(-length // manifest.kv.page_size),
        num_threads=given.threads,
        dummy_weights=manifest.dummy_weights,
        verify=False,
    )
    stack.callback(session.close)
    return Opened(session.executor, session.tokenizer, tuple(manifest.model.eos_token_ids))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("engine", type=Path, nargs="?")
    parser.add_argument("--step-ms", type=float, default=2.6, help="of the simulated device")
    parser.add_argument("--vocab-size", type=int, default=128256, help="of the simulated device")
    parser.add_argument("--sequences", default="1,64", help="at once, a comma between")
    parser.add_argument("--temperatures", default="0,1", help="a comma between")
    parser.add_argument("--cases", default="none,half,all,lengths,hook", help="a comma between")
    parser.add_argument("--input-len", type=int, default=32)
    parser.add_argument("--output-len", type=int, default=96)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="of a CPU engine")
    parser.add_argument("--tokenizer", type=Path, help="where one is, or will be kept")
    given = parser.parse_args(arguments)
    shape = Shape(given.input_len, given.output_len)
    with ExitStack() as stack:
        directory = given.tokenizer or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        executor, tokenizer, ends = opened(given, stack)
        tokenizer = tokenizer or tokenizer_for(directory, executor.vocab_size)
        grammars = Grammars(tokenizer, executor.vocab_size, ends or (_EOS,))
        stack.callback(grammars.close)
        calls = stack.enter_context(started_calls("examples.bench.hooks:All"))
        bench = Bench(executor, grammars, calls, shape)
        for number in map(int, given.sequences.split(",")):
            cases = [one for one in given.cases.split(",") if number > 1 or one != "half"]
            for temperature in map(float, given.temperatures.split(",")):
                found: dict[str, list[Itl]] = {case: [] for case in cases}
                for one in range(given.rounds + 1):  # the first to warm up
                    for case in cases:
                        itl = bench.run(case, number, temperature)
                        if one:
                            found[case].append(itl)
                report(number, temperature, found)


if __name__ == "__main__":
    main()
