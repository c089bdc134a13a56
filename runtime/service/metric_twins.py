"""Metrics under the names of another server, for existing dashboards and autoscalers.

A twin is a row of data: our metric, its other name, and other differences. It is computed at each
scrape from our own metric, so both always agree. Only metrics that we measure have twins.
"""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry
from prometheus_client.samples import Sample

from trtc.runtime.service.metrics import MetricsCompat


class Twin(NamedTuple):
    """One metric of another server."""

    ours: str
    """Name of our metric without `trtc_`, and without `_total` of a counter."""
    name: str
    """The other name, without `_total` of a counter."""
    bounds: tuple[float, ...] = ()
    """Bounds of a histogram's buckets there, which must be a subset of ours; (): ours."""
    labels: Mapping[str, str] = MappingProxyType({})
    """Our label -> its name there, if different."""
    values: Mapping[tuple[str, str], str] = MappingProxyType({})
    """(label, value) -> the value there, if different."""


class TwinCollector(Collector):
    """Makes the twins of a registry's metrics at each scrape.

    Args:
        labels: added to every sample.
    """

    def __init__(
        self, ours: CollectorRegistry, twins: Sequence[Twin], labels: Mapping[str, str]
    ) -> None:
        self._ours = ours
        self._twins = twins
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        families = {one.name.removeprefix("trtc_"): one for one in self._ours.collect()}
        for twin in self._twins:
            family = families[twin.ours]
            metric = Metric(twin.name, family.documentation, family.type)
            metric.samples = [
                self._sample(one, family.name, twin) for one in family.samples if _has(twin, one)
            ]
            yield metric

    def _sample(self, sample: Sample, family: str, twin: Twin) -> Sample:
        labels = {
            twin.labels.get(name, name): twin.values.get((name, value), value)
            for name, value in sample.labels.items()
        }
        name = twin.name + sample.name.removeprefix(family)
        return Sample(name, {**labels, **self._labels}, sample.value)


def _has(twin: Twin, sample: Sample) -> bool:
    bound = sample.labels.get("le")
    return not twin.bounds or bound in (None, "+Inf") or float(bound) in twin.bounds


_FIRST_TOKEN_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_BETWEEN_TOKENS_S = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0,
    40.0, 80.0,
)  # fmt: skip
_REQUEST_S = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0,
    480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip

VLLM = (
    Twin("num_requests_running", "vllm:num_requests_running"),
    Twin("num_requests_waiting", "vllm:num_requests_waiting"),
    Twin("kv_cache_usage_perc", "vllm:kv_cache_usage_perc"),
    Twin(
        "kv_cache_info",
        "vllm:cache_config_info",
        labels={"page_tokens": "block_size", "pages": "num_gpu_blocks"},
    ),
    Twin("prefix_cache_queries", "vllm:prefix_cache_queries"),
    Twin("prefix_cache_hits", "vllm:prefix_cache_hits"),
    Twin("num_preemptions", "vllm:num_preemptions"),
    Twin("prompt_tokens", "vllm:prompt_tokens"),
    Twin("prompt_tokens_cached", "vllm:prompt_tokens_cached"),
    Twin("generation_tokens", "vllm:generation_tokens"),
    Twin(
        "request_success",
        "vllm:request_success",
        values={("finished_reason", "aborted"): "abort"},
    ),
    Twin("time_to_first_token_seconds", "vllm:time_to_first_token_seconds", _FIRST_TOKEN_S),
    Twin("inter_token_latency_seconds", "vllm:inter_token_latency_seconds", _BETWEEN_TOKENS_S),
    Twin("e2e_request_latency_seconds", "vllm:e2e_request_latency_seconds", _REQUEST_S),
    Twin("request_queue_time_seconds", "vllm:request_queue_time_seconds", _REQUEST_S),
    Twin("request_prefill_time_seconds", "vllm:request_prefill_time_seconds", _REQUEST_S),
    Twin("request_decode_time_seconds", "vllm:request_decode_time_seconds", _REQUEST_S),
    Twin("request_inference_time_seconds", "vllm:request_inference_time_seconds", _REQUEST_S),
    Twin(
        "request_time_per_output_token_seconds",
        "vllm:request_time_per_output_token_seconds",
        _BETWEEN_TOKENS_S,
    ),
    Twin("request_prompt_tokens", "vllm:request_prompt_tokens"),
    Twin("request_generation_tokens", "vllm:request_generation_tokens"),
    Twin("engine_sleep_state", "vllm:engine_sleep_state"),
    Twin("spec_decode_num_draft_tokens", "vllm:spec_decode_num_draft_tokens"),
    Twin("spec_decode_num_accepted_tokens", "vllm:spec_decode_num_accepted_tokens"),
)
"""Metrics of vLLM 0.33 (vllm/v1/metrics/loggers.py and buckets.py). Each model is an engine with
vLLM's number 0."""
VLLM_LABELS = {"engine": "0"}

TWINS: Mapping[MetricsCompat, tuple[Sequence[Twin], Mapping[str, str]]] = {
    "none": ((), {}),
    "vllm": (VLLM, VLLM_LABELS),
}
"""Other server -> its twins, and the labels that all of them have."""
