"""The metrics of a server: counters and histograms of requests, and readings of the loops' state.
`exposition` converts them for Prometheus.

Names follow vLLM's with the prefix `trtc_`, so that dashboards can be ported by one replacement.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from trtc.protos.errors import QueueFullError, TrtcError
from trtc.runtime.engine.loop import LoopStats
from trtc.runtime.requests.request import Output, Usage
from trtc.runtime.service.instruments import Counter, Family, Gauge, Histogram

MetricsCompat = Literal["none", "vllm"]

SLEEP_STATES = ("awake", "weights_offloaded", "discard_all")
"""vLLM's name of each sleep level."""
FIRST_TOKEN_BUCKETS_S = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
BETWEEN_TOKENS_BUCKETS_S = (
    0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75,
    1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
WHOLE_REQUEST_BUCKETS_S = (
    0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0,
    60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
QUEUE_BUCKETS_S = (0.001, 0.005, *WHOLE_REQUEST_BUCKETS_S)
TOKENS_BUCKETS = tuple(float(mantissa * 10**power) for power in range(6) for mantissa in (1, 2, 5))
"""Tokens of a request: 1, 2, 5, 10, ..., 500,000."""


class LoopReading(NamedTuple):
    """A metric that a scrape reads from a loop's statistics."""

    name: str
    help: str
    value: Callable[[LoopStats], float]
    is_counter: bool = False


LOOP_READINGS = (
    LoopReading("num_requests_running", "Sequences that hold pages.", lambda r: r.running),
    LoopReading(
        "num_requests_waiting",
        "Sequences in the queue, preempted ones included.",
        lambda r: r.waiting,
    ),
    LoopReading(
        "kv_cache_usage_perc",
        "Share of KV pages that running requests hold, 0 to 1.",
        lambda r: r.pages_used / max(r.pages_total, 1),
    ),
    LoopReading("kv_pages", "KV pages in the pool.", lambda r: r.pages_total),
    LoopReading("kv_pages_used", "KV pages that running requests hold.", lambda r: r.pages_used),
    LoopReading("kv_pages_cached", "KV pages kept for their prefix.", lambda r: r.pages_cached),
    LoopReading(
        "prefix_cache_queries",
        "Prompt tokens looked up in the prefix cache.",
        lambda r: r.prefix_query_tokens,
        is_counter=True,
    ),
    LoopReading(
        "prefix_cache_hits",
        "Prompt tokens found in the prefix cache.",
        lambda r: r.prefix_hit_tokens,
        is_counter=True,
    ),
    LoopReading(
        "kv_host_pages",
        "KV pages that the host tier has room for; 0: there is no host tier.",
        lambda r: r.host_pages_total,
    ),
    LoopReading("kv_host_pages_used", "KV pages in the host tier.", lambda r: r.host_pages_used),
    LoopReading(
        "kv_host_hits",
        "Prompt tokens found in the prefix cache because pages were restored from the host tier.",
        lambda r: r.host_hit_tokens,
        is_counter=True,
    ),
    LoopReading(
        "kv_host_saved_bytes",
        "Bytes of evicted KV pages copied to the host tier.",
        lambda r: r.host_saved_bytes,
        is_counter=True,
    ),
    LoopReading(
        "kv_host_restored_bytes",
        "Bytes of KV pages restored from the host tier.",
        lambda r: r.host_restored_bytes,
        is_counter=True,
    ),
    LoopReading(
        "kv_events_lost",
        "KV events that were not sent one by one, because too many waited: the whole state was "
        "sent instead.",
        lambda r: r.kv_events_lost,
        is_counter=True,
    ),
    LoopReading(
        "num_preemptions",
        "Sequences put back into the queue for lack of pages.",
        lambda r: r.preemptions,
        is_counter=True,
    ),
    LoopReading(
        "spec_decode_num_draft_tokens",
        "Draft tokens that steps verified.",
        lambda r: r.draft_tokens,
        is_counter=True,
    ),
    LoopReading(
        "spec_decode_num_accepted_tokens",
        "Draft tokens that were accepted.",
        lambda r: r.accepted_draft_tokens,
        is_counter=True,
    ),
    LoopReading("engine_steps", "Steps that the engine ran.", lambda r: r.steps, is_counter=True),
    LoopReading(
        "engine_prefill_tokens",
        "Prompt tokens that the engine computed, recomputation included.",
        lambda r: r.prompt_tokens,
        is_counter=True,
    ),
    LoopReading(
        "engine_step_seconds",
        "Time that the engine spent in steps.",
        lambda r: r.step_seconds,
        is_counter=True,
    ),
)


class ServerMetrics:
    """All metrics of a server."""

    def __init__(self, compat: MetricsCompat = "none") -> None:
        """
        Args:
            compat: server under whose names metrics are exposed in addition to our own.
        """
        self.compat = compat
        self.read_loops: Callable[[], Mapping[str, LoopStats]] = dict
        by_model = ("model_name",)
        self.prompt_tokens = Counter(
            "trtc_prompt_tokens", "Prompt tokens of finished requests.", by_model
        )
        self.prompt_tokens_cached = Counter(
            "trtc_prompt_tokens_cached",
            "Prompt tokens of finished requests that were found in the prefix cache.",
            by_model,
        )
        self.generation_tokens = Counter(
            "trtc_generation_tokens", "Completion tokens delivered.", by_model
        )
        self.first_token = Histogram(
            "trtc_time_to_first_token_seconds",
            "From the arrival of a request to its first token.",
            by_model,
            bounds=FIRST_TOKEN_BUCKETS_S,
        )
        self.between_tokens = Histogram(
            "trtc_inter_token_latency_seconds",
            "Between two deliveries of one request, for each token.",
            by_model,
            bounds=BETWEEN_TOKENS_BUCKETS_S,
        )
        self.whole_request = Histogram(
            "trtc_e2e_request_latency_seconds",
            "From the arrival of a request to its last token.",
            by_model,
            bounds=WHOLE_REQUEST_BUCKETS_S,
        )
        self.queue = Histogram(
            "trtc_request_queue_time_seconds",
            "From the submission of a request to its engine to the first step that computed it.",
            by_model,
            bounds=QUEUE_BUCKETS_S,
        )
        self.prefill = Histogram(
            "trtc_request_prefill_time_seconds",
            "From the first step that computed a request to its first token.",
            by_model,
            bounds=WHOLE_REQUEST_BUCKETS_S,
        )
        self.decode = Histogram(
            "trtc_request_decode_time_seconds",
            "From the first token of a request to its last.",
            by_model,
            bounds=WHOLE_REQUEST_BUCKETS_S,
        )
        self.inference = Histogram(
            "trtc_request_inference_time_seconds",
            "From the first step that computed a request to its last token.",
            by_model,
            bounds=WHOLE_REQUEST_BUCKETS_S,
        )
        self.per_token = Histogram(
            "trtc_request_time_per_output_token_seconds",
            "Decode time of a request per token after the first of a sequence, if there are any.",
            by_model,
            bounds=BETWEEN_TOKENS_BUCKETS_S,
        )
        self.request_prompt_tokens = Histogram(
            "trtc_request_prompt_tokens",
            "Prompt tokens of a finished request.",
            by_model,
            bounds=TOKENS_BUCKETS,
        )
        self.request_generation_tokens = Histogram(
            "trtc_request_generation_tokens",
            "Completion tokens of a finished request, of all its sequences.",
            by_model,
            bounds=TOKENS_BUCKETS,
        )
        self.success = Counter(
            "trtc_request_success",
            "Sequences that ended, by finish reason.",
            label_names=("model_name", "finished_reason"),
        )
        self.failure = Counter(
            "trtc_request_failure",
            "Requests that ended with an error, by its class in trtc.protos.errors.",
            label_names=("model_name", "error"),
        )
        self.refused = Counter(
            "trtc_request_refused",
            "Requests refused for want of a place, by the limit that was reached: queue and "
            "streams were full, or the client or its host had its share of them; or a tenant had "
            "used its own streams, requests or tokens.",
            label_names=("model_name", "limit"),
        )
        self.strangers = Counter(
            "trtc_calls_unauthenticated",
            "Calls refused because their API key or client certificate was missing or unknown.",
        )
        self.audit_lost = Counter(
            "trtc_audit_lost",
            "Lines of the audit log that were not written: its queue was full, or the server ended "
            "while the disk refused them.",
        )
        self.ready = Gauge("trtc_engine_ready", "1 when the engine serves, else 0.", by_model)
        self.startup = Gauge(
            "trtc_startup_seconds",
            "How long each phase of the start took.",
            label_names=("phase",),
        )
        self.engine_info = Gauge(
            "trtc_engine_info",
            "Always 1; the labels identify the engine.",
            label_names=("model_name", "family", "scheme", "target", "digest", "trtc_version"),
        )
        self.model_loads = Counter(
            "trtc_model_loads",
            "Models that were loaded while the server ran, or failed to be, by outcome.",
            label_names=("model_name", "outcome"),
        )
        self.model_unloads = Counter(
            "trtc_model_unloads",
            "Models that were unloaded while the server ran.",
            by_model,
        )
        self.sleep_state = Gauge(
            "trtc_engine_sleep_state",
            "1 in the state that a model is in: awake, weights_offloaded (level 1) or discard_all "
            "(level 2).",
            label_names=("model_name", "sleep_state"),
        )
        self.model_load_seconds = Gauge(
            "trtc_model_load_seconds",
            "How long the last load of a model took, its canaries included.",
            by_model,
        )
        self.cache_info = Gauge(
            "trtc_kv_cache_info",
            "Always 1; the labels have the tokens of a KV page, and the number of pages.",
            label_names=("model_name", "page_tokens", "pages"),
        )

    @property
    def families(self) -> list[Family[Any]]:
        """All metrics that are not read from loops, in the order of declaration."""
        return [one for one in vars(self).values() if isinstance(one, Family)]

    def watch_loops(self, read: Callable[[], Mapping[str, LoopStats]]) -> None:
        """Make every scrape call `read`, in the thread of the scrape."""
        self.read_loops = read

    def clock(self, model: str, arrived_at: float) -> "RequestClock":
        return RequestClock(self, model, arrived_at)


class RequestClock:
    """Times one request from the deliveries of its stream; times are time.monotonic()."""

    def __init__(self, metrics: ServerMetrics, model: str, arrived_at: float) -> None:
        self._metrics = metrics
        self._model = model
        self._arrived_at = arrived_at
        self._admitted_at = arrived_at
        self._num_ended = 0
        """Sequences that have ended."""
        self._first_at: float | None = None
        self._last_at = 0.0
        self._first_token = metrics.first_token.labels(model)
        self._between_tokens = metrics.between_tokens.labels(model)
        self._generation_tokens = metrics.generation_tokens.labels(model)

    def admit(self, at: float) -> None:
        """The engine has accepted the request."""
        self._admitted_at = at

    def deliver(self, outputs: Sequence[Output], at: float) -> int:
        """Record a delivery; returns the number of new tokens."""
        tokens = 0
        for output in outputs:  # runs for every token: a generator would double the time
            tokens += len(output.token_ids)
        if tokens:
            if self._first_at is None:
                self._first_at = at
                self._first_token.observe(at - self._arrived_at)
            else:
                self._between_tokens.observe(at - self._last_at)
            self._last_at = at
            self._generation_tokens.inc(tokens)
        for output in outputs:
            if output.finish_reason is not None:
                self._num_ended += 1
                reason = output.finish_reason.value
                self._metrics.success.labels(self._model, reason).inc()
            if output.usage is not None:
                self._finish(output.usage, at)
        return tokens

    def _finish(self, usage: Usage, at: float) -> None:
        metrics, model = self._metrics, self._model
        metrics.prompt_tokens.labels(model).inc(usage.prompt_tokens)
        metrics.prompt_tokens_cached.labels(model).inc(usage.cached_prompt_tokens)
        metrics.request_prompt_tokens.labels(model).observe(usage.prompt_tokens)
        metrics.request_generation_tokens.labels(model).observe(usage.completion_tokens)
        metrics.whole_request.labels(model).observe(at - self._arrived_at)
        if usage.queue_s is not None:
            metrics.queue.labels(model).observe(usage.queue_s)
        if self._first_at is not None:
            prefill_s = max(0.0, self._first_at - self._admitted_at - (usage.queue_s or 0.0))
            decode_s = at - self._first_at
            metrics.prefill.labels(model).observe(prefill_s)
            metrics.decode.labels(model).observe(decode_s)
            metrics.inference.labels(model).observe(prefill_s + decode_s)
            others = usage.completion_tokens / max(1, self._num_ended) - 1
            if others > 0:
                metrics.per_token.labels(model).observe(decode_s / others)

    def refuse(self, error: TrtcError) -> None:
        """The request was not admitted."""
        self.fail(error)
        if isinstance(error, QueueFullError):
            self._metrics.refused.labels(self._model, error.limit).inc()

    def fail(self, error: TrtcError) -> None:
        self._metrics.failure.labels(self._model, type(error).__name__).inc()
