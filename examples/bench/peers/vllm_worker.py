"""vLLM's side of a measurement on a GPU, run by the Python of its environment, a GpuJob on stdin.

Its offline API with its own defaults, but for prefix caching, which is off, and limits that are
trtc's.
"""

import os
import time
from importlib.util import find_spec

os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")  # stdout is for the answer

from vllm import LLM, SamplingParams
from vllm.inputs import TokensPrompt

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import (
    MAX_SEQUENCES,
    MAX_STEP_TOKENS,
    GpuJob,
    measure,
    read_gpu_job,
)
from examples.bench.peers.jobs import answer
from examples.bench.peers.work import Work


def open_vllm(job: GpuJob, *, eager: bool = False) -> LLM:
    """Args: eager: without compiled layers and graphs."""
    random = job.weights == "random"
    return LLM(
        model=job.model,
        skip_tokenizer_init=True,
        generation_config="vllm",
        load_format="random" if random else "dummy",
        worker_cls="examples.bench.peers.vllm_process.RandomWeightsWorker" if random else "auto",
        enforce_eager=eager,
        kv_cache_dtype="fp8" if job.fp8_kv else "auto",
        enable_prefix_caching=False,
        max_model_len=job.workload.longest,
        max_num_batched_tokens=MAX_STEP_TOKENS,
        max_num_seqs=MAX_SEQUENCES,
        # What Qwen3.5's configuration asks for; vLLM takes that of activations for Qwen3-Next.
        mamba_ssm_cache_dtype="float32",
        # By default delta nets prefill by flashinfer, which is not installed everywhere.
        gdn_prefill_backend=None if find_spec("flashinfer") else "triton",
    )


def prompts(llm: LLM, requests: int, length: int, seed: int) -> list[TokensPrompt]:
    work = Work(llm.llm_engine.vllm_config.model_config.get_vocab_size())
    return [
        TokensPrompt(prompt_token_ids=prompt) for prompt in work.prompts(requests, length, seed)
    ]


class Engine:
    """A checkpoint, opened."""

    def __init__(self, job: GpuJob) -> None:
        self._llm = open_vllm(job)
        self._seed = 0

    def timed(self, requests: int, input_len: int, output_len: int) -> float:
        self._seed += 1
        given = prompts(self._llm, requests, input_len, self._seed)
        sampling = SamplingParams(
            temperature=0.0, max_tokens=output_len, ignore_eos=True, detokenize=False
        )
        began = time.perf_counter()
        replies = self._llm.generate(given, sampling, use_tqdm=False)
        seconds = time.perf_counter() - began
        lengths = {len(reply.outputs[0].token_ids) for reply in replies}
        if lengths != {output_len}:
            raise RunFailed(f"{lengths} tokens came instead of {output_len}")
        return seconds


def main() -> None:
    job = read_gpu_job()
    for figure in measure(Engine(job).timed, job):
        answer(figure)


if __name__ == "__main__":
    main()
