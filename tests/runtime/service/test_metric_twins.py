"""Metrics under vLLM's names, as Prometheus and llm-d's endpoint picker read them."""

import asyncio
import urllib.request
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families

from tests.support.aio import asynchronous
from tests.support.servers import CONFIG, RunningServer, echo_server
from trtc.runtime.client.aio import AsyncClient
from trtc.runtime.service.metric_twins import VLLM

LLM_D_DEFAULTS = {
    "queuedRequestsSpec": "vllm:num_requests_waiting",
    "runningRequestsSpec": "vllm:num_requests_running",
    "kvUsageSpec": "vllm:kv_cache_usage_perc",
    "cacheInfoSpec": "vllm:cache_config_info",
}
"""Of the engine `vllm` in llm-d-router's factories.go, less those of adapters."""
PAGE = Path(__file__).parents[3] / "docs" / "metrics.md"


async def scraped(server: RunningServer) -> dict[str, Metric]:
    """Family -> what Prometheus' own parser makes of it."""
    url = f"http://127.0.0.1:{server.http_port}/metrics"
    text = await asyncio.to_thread(lambda: urllib.request.urlopen(url, timeout=10).read().decode())
    found = list(text_string_to_metric_families(text))
    assert len(found) == len({one.name for one in found}), "a family stands there twice"
    return {one.name: one for one in found}


def value(family: Metric, **labels: str) -> float:
    (found,) = [one.value for one in family.samples if labels.items() <= one.labels.items()]
    return float(found)


@asynchronous
async def test_twins_say_what_our_metrics_say_with_vllms_types_labels_and_buckets() -> None:
    config = replace(CONFIG, metrics_compat="vllm")
    async with (
        echo_server(names=("a", "aborted"), config=config) as server,
        AsyncClient(server.address) as client,
    ):
        for prompt in ([3, 4, 5, 6, 7], [9] * 40, [9] * 40):
            async for _ in client.generate(prompt, model="a", max_tokens=7, ignore_eos=True):
                pass
        stopped = client.generate([5], model="aborted", max_tokens=200, ignore_eos=True)
        first = await anext(stopped)
        await client.abort(first.request_id, model="aborted")
        async for _ in stopped:
            pass
        await server.idle("a")
        families = await scraped(server)
    for twin in VLLM:
        ours, theirs = families[f"trtc_{twin.ours}"], families[twin.name]
        assert theirs.type == ours.type, twin
        assert {one.labels["model_name"] for one in theirs.samples} == {"a", "aborted"}
        assert {one.labels["engine"] for one in theirs.samples} == {"0"}
        if twin.bounds:
            told = {one.labels["le"] for one in theirs.samples if "le" in one.labels}
            assert told == {*map(str, twin.bounds), "+Inf"}
        numbers = [one.value for one in theirs.samples]
        kept = [
            one.value
            for one in ours.samples
            if not twin.bounds or one.labels.get("le", "+Inf") in {*map(str, twin.bounds), "+Inf"}
        ]
        assert numbers == kept, twin
    done = families["vllm:request_success"]
    assert value(done, model_name="a", finished_reason="length") == 3
    assert value(done, model_name="aborted", finished_reason="abort") == 1
    prompts = families["vllm:request_prompt_tokens"]
    assert value(prompts, model_name="a", le="5.0") == 1
    assert value(prompts, model_name="a", le="50.0") == 3
    for part in ("queue", "prefill", "decode", "inference"):
        spent = [
            one.value
            for one in families[f"vllm:request_{part}_time_seconds"].samples
            if one.name.endswith("_count") and one.labels["model_name"] == "a"
        ]
        assert spent == [3], part
    parts = {
        name: _sum(families[f"vllm:request_{name}_seconds"])
        for name in ("prefill_time", "decode_time", "inference_time", "time_per_output_token")
    }
    assert parts["inference_time"] == pytest.approx(parts["prefill_time"] + parts["decode_time"])
    assert parts["time_per_output_token"] == pytest.approx(parts["decode_time"] / 6)
    assert value(families["vllm:prompt_tokens_cached"], model_name="a") == 32, "two pages"


def _sum(histogram: Metric) -> float:
    (found,) = [
        one.value
        for one in histogram.samples
        if one.name.endswith("_sum") and one.labels["model_name"] == "a"
    ]
    return float(found)


@asynchronous
async def test_llm_d_finds_what_it_scrapes_by_default_and_by_the_pages_configuration() -> None:
    snippet = PAGE.read_text().partition("```yaml")[2].partition("```")[0]
    (extractor,) = [
        one for one in yaml.safe_load(snippet)["plugins"] if one["type"] == "core-metrics-extractor"
    ]
    (own,) = extractor["parameters"]["engineConfigs"]
    async with echo_server(config=replace(CONFIG, metrics_compat="vllm")) as server:
        families = await scraped(server)
        pages = server.handle().num_pages
        page_tokens = server.handle().manifest.kv.page_size
    for names in (LLM_D_DEFAULTS, own):
        assert set(LLM_D_DEFAULTS) <= set(names)
        for spec in ("queuedRequestsSpec", "runningRequestsSpec", "kvUsageSpec"):
            assert families[names[spec]].type == "gauge"
            assert value(families[names[spec]], model_name="echo") == 0
        assert _blocks(families, names) == (page_tokens, pages)


def _blocks(families: dict[str, Metric], names: dict[str, Any]) -> tuple[int, int]:
    """Block size and number of blocks, as llm-d takes them from the labels of an info metric."""
    (sample,) = families[names["cacheInfoSpec"]].samples
    size = names.get("cacheBlockSizeLabelName", "block_size")
    number = names.get("cacheNumBlocksLabelName", "num_gpu_blocks")
    return int(sample.labels[size]), int(sample.labels[number])


@asynchronous
async def test_without_the_flag_there_are_no_twins() -> None:
    async with echo_server() as server:
        assert all(name.startswith("trtc_") for name in await scraped(server))
