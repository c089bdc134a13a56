"""Cache groups on a GPU: does a model with windows or states say what its CPU twin says?

    python -m examples.bench.gpu_groups make DIR    anywhere, with trtc[build,cuda-build]
    python -m examples.bench.gpu_groups run DIR     on the GPU, with trtc[cuda]

`make` builds engines of a small random Gemma 3 (five layers of windows to a full one, rope by layer
type, head_dim 256), of an LFM2 (short convolutions with states beside attention), of a Qwen3.5
(gated delta nets, whose heads are as large as published ones), of a GLM-5 (latent attention to 256
selected tokens, half of its layers with the selection of the one before) and of an OLMo Hybrid
(delta nets with negative eigenvalues), and, on two GPUs, of a Granite 4 (Mamba-2 beside experts)
and of a Gemma 4 E (shared keys and values, embeddings for every layer), and records what their CPU
twins answer to long prompts. `run` checks every kernel against the operators' references, then
serves all prompts at once, twice, from a pool of NaN that is too small for them unless pages are
let go: a token that follows from a page of somebody else, or from one that nobody has written, is
another token. Then, on one GPU, prompts come one after the other to a pool that holds two of them,
twice, with a tier in host memory that gives back what was evicted. Exit status 1: something was
wrong.
"""

import argparse
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from examples.bench.gpu import run_operators
from examples.bench.gpu_steps import opened
from examples.bench.loops import serve
from trtc.protos.manifest import Canary
from trtc.protos.sampling import SamplingParams
from trtc.runtime.engine.loop import EngineLoop, LoopConfig
from trtc.runtime.engine.probe import Probe
from trtc.runtime.executors.base import Executor
from trtc.runtime.executors.cuda.device import Place
from trtc.runtime.executors.cuda.executor import CudaExecutor
from trtc.runtime.executors.ranks.executor import ShardedExecutor
from trtc.runtime.requests.request import GenerationRequest

VOCABULARY, WINDOW = 512, 320
COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
GEMMA_3: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": WINDOW,
}
LFM2: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"],
}
QWEN3_5: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
}
GLM_5: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": 128,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "mlp_layer_types": ["dense"] * 4,
    "indexer_types": ["full", "shared"] * 2,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 256,
}
OLMO_HYBRID: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 96,
    "linear_value_head_dim": 192,
    "rope_parameters": {"rope_theta": None},
}
GRANITE_4: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 128,
    "shared_intermediate_size": 256,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 128,
    "attention_multiplier": 0.125,
}
GEMMA_4_E: dict[str, Any] = {
    "vocab_size_per_layer_input": VOCABULARY,
    "hidden_size": 128,
    "hidden_size_per_layer_input": 32,
    "intermediate_size": 256,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "global_head_dim": 256,
    "sliding_window": WINDOW,
}
PLAIN_NORMS = ("glm5", "olmo_hybrid", "granite4", "gemma4_e")
"""Models whose norms add nothing to their weights."""
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma3": ("Gemma3TextConfig", GEMMA_3),
    "lfm2": ("Lfm2Config", LFM2),
    "qwen3_5": ("Qwen3_5TextConfig", QWEN3_5),
    "glm5": ("GlmMoeDsaConfig", GLM_5),
    "olmo_hybrid": ("OlmoHybridConfig", OLMO_HYBRID),
    "granite4": ("GraniteMoeHybridConfig", GRANITE_4),
    "gemma4_e": ("Gemma4TextConfig", GEMMA_4_E),
}


@dataclass(frozen=True)
class Small:
    """An engine of a small model."""

    name: str
    """The model's name comes before the first dash."""
    dtype: str
    tolerance: float
    """Logits by which the twin's token leads the second best, below which the GPU may draw
    another."""
    kv_dtype: str | None = None
    tp: int = 1
    """GPUs; their engine's operators are not checked, nor is a tier."""
    ep: bool = False


ENGINES = (
    Small("gemma3-fp32", "fp32", 2e-3),
    Small("gemma3-bf16", "bf16", 0.15),
    Small("gemma3-bf16-kv8", "bf16", 0.3, kv_dtype="fp8"),
    Small("lfm2-fp32", "fp32", 2e-3),
    Small("lfm2-bf16", "bf16", 0.15),
    Small("qwen3_5-fp32", "fp32", 2e-3),
    Small("qwen3_5-bf16", "bf16", 0.15),
    Small("qwen3_5-fp8", "fp8", 0.3),
    Small("glm5-fp32", "fp32", 5e-3),
    Small("glm5-bf16", "bf16", 0.3),
    Small("olmo_hybrid-fp32", "fp32", 2e-3),
    Small("olmo_hybrid-bf16", "bf16", 0.15),
    Small("granite4-fp32-tp2", "fp32", 2e-3, tp=2),
    Small("granite4-bf16-tp2-ep", "bf16", 0.15, tp=2, ep=True),
    Small("gemma4_e-fp32-tp2", "fp32", 2e-3, tp=2),
    Small("gemma4_e-bf16-tp2", "bf16", 0.15, tp=2),
)
PROMPTS = tuple(range(400, 1401, 125))
"""Tokens of each."""
MAX_TOKENS, MAX_BATCH, MAX_SEQ_LEN = 48, 8, 2048
NUM_PAGES = 900
"""Of 16 tokens. Eight sequences of 900 tokens want 1400 at once; without letting go, 2700."""
TIER_PAGES, TIER_BYTES = 220, 1 << 31
"""Of the pool that evicts most prompts, and of the tier that keeps them."""
_POISON = 0xFF


def make(directory: Path, sm: int, names: Sequence[str]) -> None:
    """Checkpoints, engines, and the twins' answers."""
    directory.mkdir(parents=True, exist_ok=True)
    random = np.random.default_rng(1)
    prompts = [random.integers(3, VOCABULARY, length).tolist() for length in PROMPTS]
    for one in _chosen(names):
        model = random_checkpoint(directory / "models", one.name.partition("-")[0])
        twin = directory / f"cpu-{one.name}"
        _build(model, twin, one, "cpu")
        _build(model, directory / f"cuda-{one.name}", one, f"cuda:sm_{sm}")
        answers = list(Probe().canaries(twin, prompts, MAX_TOKENS))
        (directory / f"cuda-{one.name}.json").write_bytes(msgspec.json.encode(answers))
        margins = np.concatenate([answer.margins for answer in answers])
        distinct = [len(set(answer.token_ids)) for answer in answers]
        print(
            f"{one.name}: {min(distinct)} to {max(distinct)} different tokens an answer, margins "
            f"{np.quantile(margins, (0.01, 0.1, 0.5)).round(4).tolist()}",
            flush=True,
        )


def _chosen(names: Sequence[str]) -> list[Small]:
    return [one for one in ENGINES if not names or one.name in names]


def random_checkpoint(directory: Path, name: str) -> Path:
    """A random model whose layers matter and whose tokens have margins."""
    import torch
    import transformers

    torch.manual_seed(0)
    kind, fields = CONFIGS[name]
    config = getattr(transformers, kind)(**COMMON, **fields)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            root = parameter.shape[-1] ** 0.5
            spread = 0.2 if parameter.dim() == 1 else 1.5 / root
            # Gemma 3 multiplies embeddings by their root: they are as large as what a layer adds.
            is_scaled = name == "gemma3" and "embed_tokens" in parameter_name
            parameter.copy_(noise * (1 / root if is_scaled else spread))
            if name in PLAIN_NORMS and "norm" in parameter_name:
                parameter.add_(1.0)
            if parameter_name.endswith("A_log"):
                parameter.sub_(3.0)  # states are remembered for some tens of tokens
    model.save_pretrained(directory / name)
    return directory / name


def _build(model: Path, output: Path, one: Small, target: str) -> None:
    from trtc.api import build

    began = time.monotonic()
    build(
        model,
        output,
        dtype=one.dtype,
        kv_dtype=one.kv_dtype,
        target=target,
        force=True,
        eval_tokens=0,
        max_batch_size=MAX_BATCH,
        max_seq_len=MAX_SEQ_LEN,
        page_size=16,
        exact_activations=target == "cpu",
        tp=1 if target == "cpu" else one.tp,
        ep=one.ep and target != "cpu",
    )
    print(f"{output.name}: {target} built in {time.monotonic() - began:.1f} s", flush=True)


def run(directory: Path, names: Sequence[str], *, operators: bool) -> int:
    problems: list[str] = []
    for one in _chosen(names):
        engine = directory / f"cuda-{one.name}"
        answers = msgspec.json.decode(
            (directory / f"{engine.name}.json").read_bytes(), type=list[Canary]
        )
        found = _of_ranks if one.tp > 1 else partial(_of_one_gpu, operators=operators)
        problems += [f"{one.name}{problem}" for problem in found(engine, answers, one.tolerance)]
    for problem in problems:
        print(f"WRONG {problem}")
    print(f"{len(problems)} problems")
    return 1 if problems else 0


def _of_ranks(engine: Path, answers: Sequence[Canary], tolerance: float) -> Iterator[str]:
    with opened(engine, ShardedExecutor, num_pages=NUM_PAGES) as (_, ranks):
        yield from (f": {one}" for one in serve_and_compare(ranks, answers, tolerance))


def _of_one_gpu(
    engine: Path, answers: Sequence[Canary], tolerance: float, *, operators: bool
) -> Iterator[str]:
    if operators:
        for finding in run_operators(engine, dummy=False):
            if finding["problem"] or finding["worst"] > 1:
                yield f": {finding['site']} is wrong"
    with opened(engine, CudaExecutor, num_pages=NUM_PAGES) as (_, executor):
        poison(executor)
        yield from (f": {one}" for one in serve_and_compare(executor, answers, tolerance))
    with opened(engine, CudaExecutor, num_pages=TIER_PAGES) as (_, executor):
        poison(executor)
        for one in serve_from_host(executor, answers, tolerance):
            yield f", from the host: {one}"


def poison(executor: CudaExecutor) -> None:
    """NaN wherever nobody has written."""
    pool = executor.program.spaces["pool"]
    executor.program.device.send(np.full(pool.num_bytes, _POISON, np.uint8), Place(pool, 0))


def serve_and_compare(executor: Executor, answers: Sequence[Canary], tolerance: float) -> list[str]:
    """Serve all prompts at once, and again; what is wrong with the answers."""
    with running(executor, LoopConfig()) as loop:
        problems = []
        for attempt in ("first", "again"):
            found = serve(loop, _requests(attempt, answers))
            problems += compare(attempt, answers, found, tolerance)
            stats = loop.stats()
            print(
                f"    pages {stats.pages_total}, prefix hits {stats.prefix_hit_tokens}, "
                f"preemptions {stats.preemptions}",
                flush=True,
            )
        if stats.prefix_hit_tokens == 0:
            problems.append("no prompt was found in the prefix cache")
    return problems


def serve_from_host(executor: Executor, answers: Sequence[Canary], tolerance: float) -> list[str]:
    """Serve the prompts one after the other, and again from pages that were kept in host memory;
    what is wrong with the answers."""
    with running(executor, LoopConfig(kv_host_bytes=TIER_BYTES)) as loop:
        problems = []
        for attempt in ("one by one", "from the host"):
            requests = _requests(attempt, answers)
            found = [tokens for one in requests for tokens in serve(loop, [one])]
            problems += compare(attempt, answers, found, tolerance)
        stats = loop.stats()
        print(
            f"    {stats.host_hit_tokens} tokens from the host, {stats.host_saved_bytes / 1e6:.1f} "
            f"MB saved, {stats.host_restored_bytes / 1e6:.1f} MB restored",
            flush=True,
        )
        if stats.host_hit_tokens == 0:
            problems.append("no page came back from the host")
    return problems


@contextmanager
def running(executor: Executor, config: LoopConfig) -> Iterator[EngineLoop]:
    loop = EngineLoop(executor, None, config)
    loop.start()
    try:
        yield loop
    finally:
        loop.stop()


def compare(
    attempt: str,
    answers: Sequence[Canary],
    found: Sequence[Sequence[int] | str],
    tolerance: float,
) -> list[str]:
    """What differs from the twin's answers where the twin leads by more than `tolerance`."""
    problems, same = [], 0
    for answer, tokens in zip(answers, found, strict=True):
        if isinstance(tokens, str):
            problems.append(f"{attempt}: {tokens}")
            continue
        agrees = np.array(tokens) == np.array(answer.token_ids)
        first = int(np.argmin(agrees)) if not agrees.all() else len(tokens)
        same += first
        if first < len(tokens) and answer.margins[first] > tolerance:
            problems.append(
                f"{attempt}: {len(answer.prompt_ids)} tokens of prompt, token {first} is another, "
                f"which the twin leads by {answer.margins[first]}"
            )
    print(f"  {attempt}: {same} of {MAX_TOKENS * len(answers)} tokens before one differs")
    return problems


def _requests(name: str, answers: Sequence[Canary]) -> list[GenerationRequest]:
    return [
        GenerationRequest(
            request_id=f"{name}{number}",
            prompt_ids=answer.prompt_ids,
            sampling=SamplingParams(temperature=0.0, seed=0),
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
        )
        for number, answer in enumerate(answers)
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("make", "run"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--sm", type=int, default=90)
    parser.add_argument("--engines", nargs="*", default=(), help="names of engines")
    parser.add_argument("--no-operators", action="store_true", help="serve alone")
    arguments = parser.parse_args()
    if arguments.what == "make":
        make(arguments.directory, arguments.sm, arguments.engines)
        return 0
    return run(arguments.directory, arguments.engines, operators=not arguments.no_operators)


if __name__ == "__main__":
    sys.exit(main())
