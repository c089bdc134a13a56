"""The CUDA target on a GPU: are its kernels right, is it its CPU twin, how fast is it?

    python -m examples.bench.gpu make DIR     anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu run DIR      on the GPU, with trtc[cuda]

`make` builds engines of the bundled pyllama (or of `--model`, such as one with routed experts)
beside their CPU twins, and engines of the shape of Llama-3.1-8B without weights. `run` checks every
kernel against the operators' references, then the twins' engines, then times the 8B shape with
random weights (steps, an offline load, cold starts, a load through gRPC), prints the table and
writes DIR/results.json. Exit status 1: something was wrong. `--only` runs a part of it.

The part `tp`, which is not run unless it is asked for, needs 2 GPUs or 4: pyllama on two ranks
against its twin, the shape of Llama-3.1-70B on 2 and on 4, and a rank that is killed.
"""

import argparse
import asyncio
import gc
import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from examples.bench.gpu_layers import describe, errors_by_call
from examples.bench.gpu_operators import check_operators
from examples.bench.gpu_ranks import LLAMA_70B, kill_a_rank, opened_ranks, run_ranks
from examples.bench.gpu_serving import run_serving
from examples.bench.gpu_steps import time_decode, time_prefill
from trtc.runtime.bench.load import Shape, local_target, run_load
from trtc.runtime.bench.measure import Load
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.probe import greedy, sequence_logits
from trtc.runtime.server.app import ServerConfig
from trtc.runtime.server.opening import open_handle
from trtc.runtime.session import Session, open_session

PYLLAMA = Path(__file__).parents[1] / "models" / "pyllama"
TWIN_PROMPTS, TWIN_PROMPT, TWIN_LENGTH = 16, 32, 96
"""Prompts of held-out text, their tokens, and tokens with the twin's greedy continuation."""
LLAMA_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
_SHOWN, _LAYER_TOLERANCE = 2, 2.0**-5
"""Sequences whose errors are told by layer, and what a call's relative error should stay below."""
COPY_BYTES_PER_S = 4.24e12
"""Device copy of an H200, read and write: what a decode step's floor is reckoned by."""
PREFILL_FLOOR = 101_000
"""Tokens a second that the layers' fp8 GEMMs alone allow on an H200 (14.0 GFLOP a token)."""


@dataclass(frozen=True)
class Variation:
    """One engine of each model."""

    name: str
    dtype: str
    kv_dtype: str | None = None


TWINS = (
    Variation("fp32", "fp32"),
    Variation("bf16", "bf16"),
    Variation("fp8", "fp8"),
    Variation("fp8-kv8", "fp8", "fp8"),
    Variation("int4_awq", "int4_awq"),
    Variation("w4a8_awq", "w4a8_awq"),
    Variation("int8_sq", "int8_sq"),
)
SHAPES = (
    Variation("fp8", "fp8"),
    Variation("fp8-kv8", "fp8", "fp8"),
    Variation("bf16", "bf16"),
    Variation("int4_awq", "int4_awq"),
)
RANK_TWINS = ("fp32", "bf16", "fp8")
RANK_SHAPES = (2, 4)
DECODE_BATCHES = (1, 16, 64, 128, 256)
CONTEXT = 1024
VLLM_DECODE_MS = {
    "fp8": (3.32, 3.86, 6.00, 8.65, 14.60),
    "fp8-kv8": (3.42, 3.77, 5.66, 7.99, 13.20),
    "bf16": (4.92, 5.59, 7.68, 10.65, 18.03),
}
"""vLLM 0.25.0 on the same kind of chip, measured on 2026-11-20 (docs/performance.md)."""
VLLM_PREFILL = {(64, 1024): 81_100, (32, 4096): 74_900}
VLLM_TTFT_4096_MS = 57.0
VLLM_OFFLINE = {"fp8": 14_440, "fp8-kv8": 15_100}


def make(directory: Path, sm: int, only: Sequence[str], model: Path = PYLLAMA) -> None:
    """Build every engine; kernels are the same bytes wherever this runs."""
    directory.mkdir(parents=True, exist_ok=True)
    config = _config(directory / "llama-8b", LLAMA_8B)
    for one in TWINS if "twins" in only else ():
        _make_twin(directory, model, one, sm)
    for one in SHAPES if "steps" in only else ():
        _build(
            config,
            directory / f"8b-{one.name}",
            one,
            f"cuda:sm_{sm}",
            dummy_weights=True,
            max_batch_size=512,
            max_seq_len=8192,
            max_num_tokens=8192,
        )
    if "tp" in only:
        _make_ranks(directory, sm)


def _config(model: Path, config: Mapping[str, Any]) -> Path:
    """A model that is a shape alone."""
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    return model


def _make_ranks(directory: Path, sm: int) -> None:
    """The twins' GPU engines on two ranks, and the 70B shape."""
    for one in TWINS:
        if one.name in RANK_TWINS:
            _build(PYLLAMA, directory / f"tp2-{one.name}", one, f"cuda:sm_{sm}", tp=2)
    config = _config(directory / "llama-70b", LLAMA_70B)
    for ranks in RANK_SHAPES:
        _build(
            config,
            directory / f"70b-fp8-tp{ranks}",
            Variation("fp8", "fp8"),
            f"cuda:sm_{sm}",
            tp=ranks,
            dummy_weights=True,
            max_batch_size=128,
            max_seq_len=8192,
            max_num_tokens=8192,
        )


def _make_twin(directory: Path, model: Path, one: Variation, sm: int) -> None:
    """A GPU engine, and what its CPU twin says of some held-out text."""
    from trtc.quant.evaluation import heldout_set

    cpu = directory / f"cpu-{one.name}"
    _build(model, cpu, one, "cpu", exact_activations=True)
    _build(model, directory / f"twin-{one.name}", one, f"cuda:sm_{sm}")
    texts = heldout_set(model, 4096, 512)
    session = open_session(cpu)
    tokens, margins = [], []
    for text in list(texts.sequences)[:TWIN_PROMPTS]:
        prompt = [int(token) for token in text[:TWIN_PROMPT]]
        continued = [*prompt, *greedy(session.executor, prompt, TWIN_LENGTH - TWIN_PROMPT)]
        tokens.append(np.array(continued, np.int32))
        best = np.sort(_continuation_logits(session.executor, tokens[-1]), axis=1)[:, -2:]
        margins.append(best[:, 1] - best[:, 0])
    session.close()
    np.savez(directory / f"twin-{one.name}.npz", tokens=np.stack(tokens), margins=np.stack(margins))


def _continuation_logits(executor: Executor, tokens: Any) -> Any:
    """Logits that decided each token after the prompt, given those before it."""
    return np.concatenate(list(sequence_logits(executor, tokens)))[TWIN_PROMPT - 1 : -1]


def _build(model: Path, output: Path, one: Variation, target: str, **options: Any) -> None:
    from trtc.api import build

    began = time.monotonic()
    build(
        model, output, dtype=one.dtype, kv_dtype=one.kv_dtype, target=target, force=True, **options
    )
    print(f"{output.name}: {target} built in {time.monotonic() - began:.1f} s", flush=True)


@contextmanager
def opened(engine: Path, **options: Any) -> Iterator[tuple[Session, CudaExecutor]]:
    began = time.perf_counter()
    session = open_session(engine, **options)
    assert isinstance(session.executor, CudaExecutor)
    print(f"{engine.name}: opened in {time.perf_counter() - began:.2f} s", flush=True)
    try:
        yield session, session.executor
    finally:
        session.close()
        gc.collect()


def run_operators(engine: Path, *, dummy: bool) -> list[dict[str, Any]]:
    """Every kernel of an engine; prints the wrong ones and a line of the rest."""
    with opened(engine, num_pages=2048, dummy_weights=dummy) as (session, executor):
        findings = list(check_operators(engine, session.manifest, executor))
    for one in findings:
        if not one.good:
            print(
                f"  WRONG {one.operator} {one.site} variant {one.variant} tokens {one.tokens}: "
                f"{one.worst:.2f} of the tolerance {one.problem}"
            )
    wrong = sum(not one.good for one in findings)
    print(f"  operators of {engine.name}: {len(findings)} checks, {wrong} wrong", flush=True)
    return [vars(one) | {"engine": engine.name} for one in findings]


def run_twin(directory: Path, one: Variation) -> dict[str, Any]:
    """Agreement with the greedy tokens of the CPU engine of the same scheme, given its tokens."""
    with opened(directory / f"twin-{one.name}", num_pages=256) as (_, executor):
        compared = _compare_twin(directory, one, executor)
        for tokens in compared["parted"][:_SHOWN]:
            print(f"  {one.name}: errors where its token after {len(tokens)} is another")
            errors = errors_by_call(directory / f"twin-{one.name}", executor, tokens)
            for line in describe(errors, _LAYER_TOLERANCE):
                print(f"    {line}", flush=True)
        return compared


def run_rank_twin(directory: Path, one: Variation) -> dict[str, Any]:
    """The same of two ranks."""
    with opened_ranks(directory / f"tp2-{one.name}", num_pages=256) as (_, executor):
        return _compare_twin(directory, one, executor)


def _compare_twin(directory: Path, one: Variation, executor: Executor) -> dict[str, Any]:
    expected = np.load(directory / f"twin-{one.name}.npz")
    found = [_continuation_logits(executor, tokens).argmax(axis=1) for tokens in expected["tokens"]]
    same = np.stack(found) == expected["tokens"][:, TWIN_PROMPT:]
    margin = float(expected["margins"][~same].max(initial=0.0))
    print(
        f"  {one.name}: {same.size} greedy tokens, the same {same.mean():.2%}; "
        f"largest margin of one that differs {margin:.3f}",
        flush=True,
    )
    parted = [
        [int(token) for token in tokens[: TWIN_PROMPT + int(np.argmin(agrees))]]
        for tokens, agrees in zip(expected["tokens"], same, strict=True)
        if not agrees.all()
    ]
    return {
        "name": one.name,
        "agreement": float(same.mean()),
        "margin": margin,
        "parted": parted,
    }


def run_steps(directory: Path, one: Variation) -> dict[str, Any]:
    """Decode steps, prefills and TTFT of the 8B shape."""
    engine = directory / f"8b-{one.name}"
    result: dict[str, Any] = {"name": one.name, "decode_ms": {}, "prefill_tok_s": {}}
    with opened(engine, dummy_weights=True, num_pages=18000) as (session, executor):
        weights = session.manifest.ledger.weights
        token_bytes = executor.kv.page_bytes // executor.kv.page_size
        for at, batch in enumerate(DECODE_BATCHES):
            timing = time_decode(executor, batch, CONTEXT)
            floor = (weights + batch * CONTEXT * token_bytes) / COPY_BYTES_PER_S * 1e3
            peer = VLLM_DECODE_MS.get(one.name, (None,) * 5)[at]
            result["decode_ms"][batch] = {**vars(timing), "floor": floor, "vllm": peer}
            beside = f"   vLLM {peer:.2f} ({peer / timing.milliseconds:.2f}x)" if peer else ""
            print(
                f"  {one.name} decode {batch:3}: {timing.milliseconds:6.2f} ms"
                f" [{timing.fastest:.2f}-{timing.slowest:.2f}]   floor {floor:.2f}"
                f" ({floor / timing.milliseconds:.0%}){beside}",
                flush=True,
            )
        for sequences, length in ((64, 1024), (32, 4096)):
            timing = time_prefill(executor, sequences, length)
            rate = sequences * length / timing.milliseconds * 1e3
            result["prefill_tok_s"][f"{sequences}x{length}"] = rate
            print(
                f"  {one.name} prefill {sequences} x {length}: {rate:,.0f} tok/s"
                f" ({rate / PREFILL_FLOOR:.0%} of the fp8 GEMMs' bound)",
                flush=True,
            )
        timing = time_prefill(executor, 1, 4096)
        result["ttft_4096_ms"] = vars(timing)
        print(f"  {one.name} TTFT of 4096 tokens: {timing.milliseconds:.1f} ms", flush=True)
    return result


def run_offline(directory: Path, one: Variation, num_requests: int) -> dict[str, Any]:
    """512 in, 256 out, all at once, through the scheduler in this process."""
    config = ServerConfig(engines=(), dummy_weights=True)

    async def measure() -> Any:
        engine = directory / f"8b-{one.name}"
        async with local_target(engine, config, open_handle) as target:
            load = Load(num_requests, concurrency=num_requests)
            # The first pass captures the graphs of every bucket that the load goes through.
            await run_load(target, load, Shape(512, 256, seed=1))
            return await run_load(target, load, Shape(512, 256, seed=2))

    measurement = asyncio.run(measure())
    rate = measurement.completed * 256 / measurement.seconds
    print(
        f"  {one.name} offline {num_requests} x (512 in, 256 out): {rate:,.0f} output tok/s, "
        f"failures {measurement.failures}",
        flush=True,
    )
    return {"name": one.name, "output_tok_s": rate, "failures": measurement.failures}


def run(directory: Path, only: Sequence[str], names: Sequence[str]) -> int:
    import torch

    results: dict[str, Any] = {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{results['device']}, torch {results['torch']}, {results['date']}")
    wanted = [one for one in SHAPES if not names or one.name in names]
    twins = [one for one in TWINS if not names or one.name in names]
    if "twins" in only:
        results["operators"] = [
            finding
            for one in twins
            for finding in run_operators(directory / f"twin-{one.name}", dummy=False)
        ]
        results["twins"] = [run_twin(directory, one) for one in twins]
    if "operators" in only:
        results.setdefault("operators", []).extend(
            finding
            for one in wanted
            for finding in run_operators(directory / f"8b-{one.name}", dummy=True)
        )
    if "steps" in only:
        results["steps"] = [run_steps(directory, one) for one in wanted]
    if "offline" in only:
        results["offline"] = [
            run_offline(directory, one, 512) for one in wanted if one.name in VLLM_OFFLINE
        ]
    if "serving" in only:
        results["serving"] = [
            run_serving(directory / f"8b-{one.name}") for one in wanted if one.name in VLLM_OFFLINE
        ]
    if "tp" in only:
        results |= _run_tp(directory, torch.cuda.device_count(), twins)
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    wrong = [one for one in results.get("operators", ()) if one["problem"] or one["worst"] > 1]
    compared = [*results.get("twins", ()), *results.get("rank_twins", ())]
    strange = [one for one in compared if one["agreement"] < 0.99]
    print(f"{len(wrong)} wrong kernels, {len(strange)} engines that are not their twin")
    return 1 if wrong or strange else 0


def _run_tp(directory: Path, num_gpus: int, twins: Sequence[Variation]) -> dict[str, Any]:
    shapes = {ranks: directory / f"70b-fp8-tp{ranks}" for ranks in RANK_SHAPES}
    missing = [engine.name for engine in shapes.values() if not engine.exists()]
    ranked = [one for one in twins if (directory / f"tp2-{one.name}").exists()]
    print(f"  {num_gpus} GPUs; engines that were not made: {', '.join(missing) or 'none'}")
    if num_gpus < min(RANK_SHAPES):
        return {}
    return {
        "rank_twins": [run_rank_twin(directory, one) for one in ranked],
        "rank_killed": [kill_a_rank(directory / f"tp2-{one.name}") for one in ranked[:1]],
        "rank_steps": [
            run_ranks(engine, COPY_BYTES_PER_S)
            for ranks, engine in shapes.items()
            if ranks <= num_gpus and engine.exists()
        ],
    }


PARTS = ("twins", "operators", "steps", "offline", "serving")
ALL_PARTS = (*PARTS, "tp")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--only", nargs="+", choices=ALL_PARTS, default=PARTS)
    parser.add_argument("--engines", nargs="*", default=(), help="names of schemes")
    parser.add_argument("--model", type=Path, default=PYLLAMA, help="checkpoint of the twins")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.directory, arguments.sm, arguments.only, arguments.model)
        return 0
    return run(arguments.directory, arguments.only, arguments.engines)


if __name__ == "__main__":
    sys.exit(main())
