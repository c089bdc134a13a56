"""Whether vLLM's random weights are what they should be, by the Python of its environment, a GpuJob
on stdin: logits are finite, and a step's rows choose as many experts as an even choice does.

Without graphs and compiled layers, which call no hooks; so nothing here is a speed.
"""

import math
from statistics import mean

from vllm import SamplingParams

from examples.bench.peers.failures import RunFailed
from examples.bench.peers.gpu_work import GpuJob, read_gpu_job
from examples.bench.peers.jobs import answer
from examples.bench.peers.vllm_worker import open_vllm, prompts

_ROWS, _PROMPT_LEN, _TOKENS = 16, 128, 8


def figures(job: GpuJob) -> dict[str, float]:
    """Raises RunFailed if a logit is not finite."""
    llm = open_vllm(job, eager=True)
    llm.collective_rpc("watch_routers")
    sampling = SamplingParams(
        temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False, logprobs=1
    )
    replies = llm.generate(prompts(llm, _ROWS, _PROMPT_LEN, 0), sampling, use_tqdm=False)
    found = [
        one.logprob
        for reply in replies
        for step in reply.outputs[0].logprobs
        for one in step.values()
    ]
    if not found or not all(map(math.isfinite, found)):
        raise RunFailed(f"log probabilities from {min(found)} to {max(found)}")
    (distinct,) = llm.collective_rpc("distinct_experts")
    config = llm.llm_engine.vllm_config.model_config.hf_text_config
    chosen = config.num_experts_per_tok
    experts = llm.llm_engine.vllm_config.model_config.get_num_experts()
    return {
        f"experts that {_ROWS} rows choose, mean of {len(distinct)} layers": mean(distinct),
        "fewest": min(distinct),
        "by an even choice": experts * (1 - (1 - chosen / experts) ** _ROWS),
    }


def main() -> None:
    for figure in figures(read_gpu_job()).items():
        answer(figure)


if __name__ == "__main__":
    main()
