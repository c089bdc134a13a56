"""The CUDA target on a GPU: are its kernels right, is it its CPU twin, how fast is it?

    python -m examples.bench.gpu make DIR     anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu run DIR      on the GPU, with trtc[cuda]

`make` builds engines of the bundled pyllama (or of `--model`, such as one with routed experts)
beside their CPU twins, and engines of the shapes of Llama-3.1-8B and gpt-oss-20b without weights.
`run` checks every kernel against the operators' references, then the twins' engines, then times the
shapes with random weights (steps, an offline load, cold starts, a load through gRPC), prints the
table and writes DIR/results.json. Exit status 1: something was wrong. `--only` runs a part of it,
`--engines` some of the schemes.

The part `tp`, which is not run unless it is asked for, needs 2 GPUs or 4: the model on two ranks
against its twin (with `--ep` too, if it has routed experts), shapes on 2 and on 4, and a rank that
is killed.
"""

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from examples.bench.gpu_layers import describe, errors_by_call
from examples.bench.gpu_operators import check_operators
from examples.bench.gpu_ranks import (
    RANKED,
    RANKED_AS,
    RANKED_TWINS,
    Ranks,
    kill_a_rank,
    run_ranks,
)
from examples.bench.gpu_serving import in_process, run_serving
from examples.bench.gpu_shapes import SHAPES
from examples.bench.gpu_steps import copy_bytes_per_s, opened, pages_for_workload, time_engine
from examples.bench.peers.gpu_work import MAX_SEQUENCES, MAX_STEP_TOKENS
from trtc.runtime.device.driver_api import DriverApi
from trtc.runtime.engine.probe import greedy, sequence_logits
from trtc.runtime.engine.session import open_session
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.cuda.opening import device_name
from trtc.runtime.executors.ranks.executor import ShardedExecutor

PYLLAMA = Path(__file__).parents[1] / "models" / "pyllama"
TWIN_PROMPTS, TWIN_PROMPT, TWIN_LENGTH = 16, 32, 96
"""Prompts of held-out text, their tokens, and tokens with the twin's greedy continuation."""
_SHOWN, _LAYER_TOLERANCE = 2, 2.0**-5
"""Sequences whose errors are told by layer, and what a call's relative error should stay below."""


@dataclass(frozen=True)
class Variation:
    """One engine of each model."""

    name: str
    dtype: str
    kv_dtype: str | None = None
    shape: str = "8b"
    """Of gpu_shapes.SHAPES, for an engine without weights."""
    offline: bool = False
    """Whether it is given its shape's offline load."""

    @property
    def engine(self) -> str:
        """The directory of the engine without weights."""
        return f"{self.shape}-{self.name}"


Named = TypeVar("Named", Variation, Ranks)

TWINS = (
    Variation("fp32", "fp32"),
    Variation("bf16", "bf16"),
    Variation("fp8", "fp8"),
    Variation("fp8-kv8", "fp8", "fp8"),
    Variation("bf16-kv-int8", "bf16", "int8"),
    Variation("bf16-kv-int4", "bf16", "int4"),
    Variation("int4", "int4"),
    Variation("iq4", "iq4"),
    Variation("int6_g128", "int6_g128"),
    Variation("int4_awq", "int4_awq"),
    Variation("w4a8_awq", "w4a8_awq"),
    Variation("int8_sq", "int8_sq"),
    Variation("fp8_dynamic", "fp8_dynamic"),
    Variation("int8_dynamic", "int8_dynamic"),
    Variation("int8_hadamard", "int8_hadamard"),
)
UNWEIGHTED = (
    Variation("fp8", "fp8", offline=True),
    Variation("fp8-kv8", "fp8", "fp8", offline=True),
    Variation("fp8-kv-int8", "fp8", "int8"),
    Variation("fp8-kv-int4", "fp8", "int4"),
    Variation("bf16", "bf16"),
    Variation("int4", "int4"),
    Variation("iq4", "iq4"),
    Variation("iq4_g16", "iq4_g16"),
    Variation("mxfp4_weights", "mxfp4_weights"),
    Variation("nvfp4_weights", "nvfp4_weights"),
    Variation("int6_g128", "int6_g128"),
    Variation("int4_awq", "int4_awq"),
    Variation("fp8_dynamic", "fp8_dynamic", offline=True),
    Variation("fp8_blocks", "fp8_blocks"),
    Variation("int8_sq", "int8_sq"),
    Variation("int8_dynamic", "int8_dynamic"),
    Variation("int8_hadamard", "int8_hadamard"),
    Variation("mxfp4", "mxfp4", shape="gpt-oss-20b", offline=True),
    Variation("delta", "fp8", shape="qwen3.5-9b"),
    Variation("delta-experts", "fp8", shape="qwen3.5-35b-a3b"),
    Variation("nvfp4-experts", "nvfp4_weights", shape="qwen3.5-35b-a3b"),
    Variation("latent", "fp8", shape="deepseek-v2-lite"),
    Variation("delta-channels", "fp8", shape="kimi-linear-48b-a3b"),
    Variation("windows", "fp8", shape="gemma-3-12b"),
    Variation("windows-bf16", "bf16", shape="gemma-3-12b"),
)
"""Engines of shapes, whose weights are random."""
SERVED = ("fp8", "fp8-kv8")
"""Which of the shapes are asked through gRPC too."""


def make(
    directory: Path,
    sm: int,
    only: Sequence[str],
    model: Path = PYLLAMA,
    names: Sequence[str] = (),
) -> None:
    """Build the engines, all or those of `names`; kernels are the same bytes wherever this runs."""
    directory.mkdir(parents=True, exist_ok=True)
    for one in _named(TWINS, names) if "twins" in only else ():
        _make_twin(directory, model, one, sm)
    for one in _named(UNWEIGHTED, names) if "steps" in only else ():
        shape = SHAPES[one.shape]
        _build(
            _config(directory / f"config-{one.shape}", shape.config),
            directory / one.engine,
            one,
            f"cuda:sm_{sm}",
            dummy_weights=True,
            max_batch_size=MAX_SEQUENCES,
            max_seq_len=shape.workload.longest,
            max_num_tokens=MAX_STEP_TOKENS,
        )
    if "tp" in only:
        _make_ranks(directory, model, sm, names)


def _named(all_of_them: Sequence[Named], names: Sequence[str]) -> list[Named]:
    return [one for one in all_of_them if not names or one.name in names]


def _config(model: Path, config: Mapping[str, Any]) -> Path:
    """A model that is a shape alone."""
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    return model


def _make_ranks(directory: Path, model: Path, sm: int, names: Sequence[str]) -> None:
    """Some of the twins' GPU engines on two ranks, and shapes on several."""
    for one in _named(TWINS, names):
        for prefix, ep in _rank_prefixes(model) if one.name in RANKED_TWINS else ():
            _build(model, directory / f"{prefix}-{one.name}", one, f"cuda:sm_{sm}", tp=2, ep=ep)
    for ranks in _named(RANKED, names):
        shape = SHAPES[ranks.shape]
        _build(
            _config(directory / f"config-{ranks.shape}", shape.config),
            directory / ranks.name,
            Variation(ranks.dtype, ranks.dtype),
            f"cuda:sm_{sm}",
            tp=ranks.tp,
            ep=ranks.ep,
            dummy_weights=True,
            max_batch_size=MAX_SEQUENCES,
            max_seq_len=shape.workload.longest,
            max_num_tokens=MAX_STEP_TOKENS,
        )


def _rank_prefixes(model: Path) -> list[tuple[str, bool]]:
    """Of the engines on two ranks, and whether each rank has whole experts."""
    from trtc.builder.request import BuildRequest
    from trtc.builder.source import open_source

    spec = open_source(BuildRequest(str(model), Path(), dummy_weights=True)).spec
    return [(name, ep) for name, ep in RANKED_AS.items() if spec.mixtures or not ep]


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
    if not options.get("dummy_weights"):
        options["eval_tokens"] = 0  # these engines are compared by `run`
    build(
        model, output, dtype=one.dtype, kv_dtype=one.kv_dtype, target=target, force=True, **options
    )
    print(f"{output.name}: {target} built in {time.monotonic() - began:.1f} s", flush=True)


def run_operators(engine: Path, *, dummy: bool) -> list[dict[str, Any]]:
    """Every kernel of an engine; prints the wrong ones and a line of the rest."""
    with opened(engine, CudaExecutor, num_pages=2048, dummy_weights=dummy) as (session, executor):
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
    with opened(directory / f"twin-{one.name}", CudaExecutor, num_pages=256) as (_, executor):
        compared = _compare_twin(directory, one, executor)
        for tokens in compared["parted"][:_SHOWN]:
            print(f"  {one.name}: errors where its token after {len(tokens)} is another")
            errors = errors_by_call(directory / f"twin-{one.name}", executor, tokens)
            for line in describe(errors, _LAYER_TOLERANCE):
                print(f"    {line}", flush=True)
        return compared


def run_rank_twin(directory: Path, engine: Path, one: Variation) -> dict[str, Any]:
    """The same of two ranks."""
    with opened(engine, ShardedExecutor, num_pages=256) as (_, executor):
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


def run_steps(directory: Path, one: Variation, copy_rate: float) -> dict[str, Any]:
    """Decode steps, prefills and TTFT of a shape."""
    engine, workload = directory / one.engine, SHAPES[one.shape].workload
    num_pages = pages_for_workload(engine, workload)
    with opened(engine, CudaExecutor, dummy_weights=True, num_pages=num_pages) as (session, _):
        return time_engine(one.name, session, workload, copy_rate)


def run_offline(directory: Path, one: Variation) -> dict[str, Any]:
    """All requests at once, through the scheduler in this process."""
    engine = directory / one.engine
    number, given, asked = SHAPES[one.shape].workload.offline
    found = in_process(engine, number, number, lengths=(given, asked), dummy_weights=True)
    print(
        f"  {one.name} offline {number} x ({given} in, {asked} out): "
        f"{found.output_tokens_per_s:,.0f} output tok/s, failures {found.failures}",
        flush=True,
    )
    return {
        "name": one.name,
        "output_tok_s": found.output_tokens_per_s,
        "failures": found.failures,
    }


def run(directory: Path, only: Sequence[str], names: Sequence[str]) -> int:
    api = DriverApi("cuda")
    results: dict[str, Any] = {
        "device": device_name(),
        "driver": api.call("cuDriverGetVersion"),
        "date": time.strftime("%Y-%m-%d"),
    }
    print(f"{results['device']}, a driver for CUDA {results['driver']}, {results['date']}")
    wanted, twins = _named(UNWEIGHTED, names), _named(TWINS, names)
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
            for finding in run_operators(directory / one.engine, dummy=True)
        )
    if "steps" in only:
        rate = results["copy_bytes_per_s"] = copy_bytes_per_s()
        print(f"  a device copy reads and writes {rate / 1e12:.2f} TB/s", flush=True)
        results["steps"] = [run_steps(directory, one, rate) for one in wanted]
    if "offline" in only:
        results["offline"] = [run_offline(directory, one) for one in wanted if one.offline]
    if "serving" in only:
        results["serving"] = [
            run_serving(directory / one.engine) for one in wanted if one.name in SERVED
        ]
    if "tp" in only:
        results |= _run_tp(directory, api.call("cuDeviceGetCount"), twins, _named(RANKED, names))
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    wrong = [one for one in results.get("operators", ()) if one["problem"] or one["worst"] > 1]
    compared = [*results.get("twins", ()), *results.get("rank_twins", ())]
    strange = [one for one in compared if one["agreement"] < 0.99]
    print(f"{len(wrong)} wrong kernels, {len(strange)} engines that are not their twin")
    return 1 if wrong or strange else 0


def _run_tp(
    directory: Path, num_gpus: int, twins: Sequence[Variation], ranked: Sequence[Ranks]
) -> dict[str, Any]:
    shapes = [one for one in ranked if (directory / one.name).exists()]
    engines = ((one, directory / f"{name}-{one.name}") for one in twins for name in RANKED_AS)
    sharded = [(one, engine) for one, engine in engines if engine.exists()]
    print(f"  {num_gpus} GPUs; shapes: {', '.join(one.name for one in shapes) or 'none were made'}")
    if num_gpus < 2:
        return {}
    rate = copy_bytes_per_s()
    return {
        "rank_twins": [run_rank_twin(directory, engine, one) for one, engine in sharded],
        "rank_killed": [kill_a_rank(engine) for _, engine in sharded[:1]],
        "rank_steps": [
            run_ranks(directory / one.name, SHAPES[one.shape].workload, rate)
            for one in shapes
            if one.tp <= num_gpus
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
        make(
            arguments.directory,
            arguments.sm,
            arguments.only,
            arguments.model,
            arguments.engines,
        )
        return 0
    return run(arguments.directory, arguments.only, arguments.engines)


if __name__ == "__main__":
    sys.exit(main())
