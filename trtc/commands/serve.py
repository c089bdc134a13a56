"""`trtc serve`: engines over gRPC and HTTP."""

import asyncio
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

from trtc.protos.errors import RequestError
from trtc.protos.step import MAX_DRAFT_TOKENS
from trtc.runtime.engine.config import EngineConfig
from trtc.runtime.engine.drafting import DraftConfig
from trtc.runtime.engine.opening import open_handle
from trtc.runtime.frontends.base import is_loopback
from trtc.runtime.frontends.grpc.frontend import GrpcConfig
from trtc.runtime.frontends.http.port import HttpConfig
from trtc.runtime.frontends.zmq.frontend import ZmqConfig
from trtc.runtime.hooks.config import HooksConfig
from trtc.runtime.host.line_log import LineLogConfig
from trtc.runtime.requests.request_defaults import GenerationConfig
from trtc.runtime.requests.validation import MAX_PRIORITY
from trtc.runtime.server.app import (
    RepositoryConfig,
    Server,
    ServerConfig,
    engine_sources,
    pin_digests,
)
from trtc.runtime.server.log_lines import CallFormatter
from trtc.runtime.service.access import OPEN, AccessConfig
from trtc.runtime.service.audit import AuditConfig
from trtc.runtime.service.limits import ServiceLimits
from trtc.runtime.service.metrics import MetricsCompat
from trtc.runtime.service.telemetry import telemetry_config
from trtc.runtime.wire.tls import ServerTls

if TYPE_CHECKING:
    from trtc.runtime.frontends.zmq.messages import EventFormat

_DEFAULTS = ServerConfig(engines=(), frontends=())
_GRPC = GrpcConfig()
_HTTP = HttpConfig()
_LIMITS = ServiceLimits()
_DRAFTS = DraftConfig()
_HOOKS = HooksConfig("")
_ZMQ = ZmqConfig()
_POLL_S = 5.0
_ORIGIN = re.compile(r"https?://(\[[0-9a-f:.]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
_SEVERAL = ("one", "another")
"""Stand for models that come and go."""


@click.command()
@click.argument("engines", nargs=-1, metavar="[NAME=]ENGINE...")
@click.option(
    "--models",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Serve engines of a directory: DIR/NAME, or DIR/NAME/VERSION, of which the highest. With "
    "--poll or --explicit.",
)
@click.option(
    "--poll",
    type=click.FloatRange(0.1, 86400),
    is_flag=False,
    flag_value=_POLL_S,
    metavar="[SECONDS]",
    help=f"Follow DIR: look so often, by default every {_POLL_S:g} seconds, what has come, changed "
    "or gone.",
)
@click.option(
    "--explicit", is_flag=True, help="Load and unload models of DIR by order, as KServe's clients."
)
@click.option(
    "--load",
    multiple=True,
    metavar="NAME",
    help="With --explicit: a model to load at the start.",
)
@click.option("--host", default=_GRPC.host, show_default=True, help="Address to listen on.")
@click.option(
    "--grpc-port",
    type=click.IntRange(0, 65535),
    default=_GRPC.port,
    show_default=True,
    help="Port for gRPC; 0 for any free one.",
)
@click.option(
    "--http-port",
    type=click.IntRange(0, 65535),
    default=_HTTP.port,
    show_default=True,
    help="Port for the OpenAI API, the page, /metrics, /healthz and /readyz; 0 for any free one.",
)
@click.option("--no-http", is_flag=True, help="Open no HTTP port.")
@click.option(
    "--cors-origin",
    multiple=True,
    metavar="ORIGIN",
    help="Pages of the web that may ask over HTTP and read the answers, such as "
    "https://chat.example.com; repeatable. *: all of them.",
)
@click.option("--no-page", is_flag=True, help="Have no page for people at / of the HTTP port.")
@click.option("--threads", type=click.IntRange(1), help="CPU threads, an engine.")
@click.option("--kv-bytes", type=click.IntRange(1), help="Bytes of KV pool, an engine.")
@click.option(
    "--kv-host-bytes",
    type=click.IntRange(0),
    default=_DEFAULTS.engine.kv_host_bytes,
    show_default=True,
    help="Bytes of the host's memory, an engine, for cached prefixes that the KV pool has no room "
    "for: they are copied back when a prompt begins with them. 0: they are computed again.",
)
@click.option(
    "--step-target",
    type=click.FloatRange(0),
    default=_DEFAULTS.engine.step_target_s,
    show_default=True,
    help="Seconds that a step should take at most while others wait for their next tokens: prompts "
    "are cut to fit. Longer: more tokens a second; 0: never cut.",
)
@click.option(
    "--max-queue",
    type=click.IntRange(1),
    default=_DEFAULTS.engine.max_queue,
    show_default=True,
    help="Requests that may wait, an engine; a client gets a share.",
)
@click.option(
    "--max-streams",
    type=click.IntRange(1),
    default=_LIMITS.max_streams,
    show_default=True,
    help="Generate calls open at once; a client gets a share.",
)
@click.option(
    "--max-connection-streams",
    type=click.IntRange(1),
    default=_LIMITS.max_connection_streams,
    show_default=True,
    help="Calls open at once on one connection; clients keep further ones.",
)
@click.option(
    "--max-connections",
    type=click.IntRange(1),
    default=_LIMITS.max_connections,
    show_default=True,
    help="Connections to each port.",
)
@click.option(
    "--max-request-bytes",
    type=click.IntRange(1024, 1 << 30),
    default=_LIMITS.max_request_bytes,
    show_default=True,
    help="Bytes of a request, its prompt included.",
)
@click.option(
    "--max-prompt-bytes",
    type=click.IntRange(1),
    default=_LIMITS.max_prompt_bytes,
    show_default=True,
    help="Bytes of a text prompt.",
)
@click.option(
    "--max-priority",
    type=click.IntRange(-MAX_PRIORITY, MAX_PRIORITY),
    default=_LIMITS.max_priority,
    show_default=True,
    help="Highest priority that clients may ask for.",
)
@click.option(
    "--share-prefixes",
    is_flag=True,
    help="Let anonymous clients share cached prompt prefixes: all of them trust each other.",
)
@click.option(
    "--draft",
    type=click.Choice(["ngram"]),
    help="Speculative decoding. ngram (prompt lookup): proposes the tokens that followed the same "
    "tokens earlier in the sequence. Outputs keep their distribution; answers that quote take "
    "fewer steps.",
)
@click.option(
    "--draft-tokens",
    type=click.IntRange(1, MAX_DRAFT_TOKENS),
    help=f"Draft tokens of a sequence in a step, at most. Default: {_DRAFTS.num_tokens}.",
)
@click.option("--no-prefix-cache", is_flag=True, help="Compute every prompt from its start.")
@click.option(
    "--dummy-weights", is_flag=True, help="Fill engines built without weights with random ones."
)
@click.option(
    "--generation-config",
    type=click.Choice(["model", "trtc"]),
    default="model",
    show_default=True,
    help="Sampling defaults of requests: of the model's generation_config.json, or trtc's own.",
)
@click.option(
    "--drain-timeout",
    type=click.FloatRange(0),
    default=_DEFAULTS.drain_timeout_s,
    show_default=True,
    help="Seconds that running requests get after SIGTERM.",
)
@click.option(
    "--digest",
    "digests",
    multiple=True,
    metavar="[NAME=]SHA256",
    help="Digest of the only manifest that may be served, as `trtc inspect` shows it; NAME=SHA256 "
    "when there are several engines.",
)
@click.option(
    "--require-signature", is_flag=True, help="Serve only engines that a key of --trust has signed."
)
@click.option(
    "--trust",
    type=click.Path(path_type=Path),
    metavar="KEYS",
    help="PEM file of a public key, or a directory of such files.",
)
@click.option(
    "--tls-cert",
    type=click.Path(path_type=Path),
    help="PEM certificate chain, of all ports. It is read again when it changes.",
)
@click.option("--tls-key", type=click.Path(path_type=Path), help="PEM key of --tls-cert.")
@click.option(
    "--tls-client-ca", type=click.Path(path_type=Path), help="PEM roots; clients must be signed."
)
@click.option(
    "--api-keys",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Let in only clients with a key of this file, which `trtc keys` makes. It is read again "
    "when it changes.",
)
@click.option(
    "--allow-anonymous",
    is_flag=True,
    help="With a --host that other machines reach: let in clients without key or certificate.",
)
@click.option(
    "--audit-log",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Append a JSON line for each request, without its content.",
)
@click.option(
    "--audit-content",
    is_flag=True,
    help="Record prompts and completions too.",
)
@click.option(
    "--audit-max-bytes",
    type=click.IntRange(1024),
    default=LineLogConfig.max_bytes,
    show_default=True,
    help="Bytes of FILE before it is rotated to FILE.1.",
)
@click.option(
    "--audit-keep",
    type=click.IntRange(0, 10_000),
    default=LineLogConfig.num_kept,
    show_default=True,
    help="Rotated files that are kept.",
)
@click.option(
    "--kv-events",
    metavar="ENDPOINT",
    help="Publish KV events for routers over ZeroMQ, token ids included, in vLLM's shape: "
    "tcp://ADDRESS:PORT or ipc://PATH.",
)
@click.option(
    "--kv-events-replay",
    metavar="ENDPOINT",
    help="Where subscribers of ZeroMQ ask for what they missed.",
)
@click.option(
    "--kv-events-topic",
    default=_ZMQ.topic,
    show_default=True,
    help="Topic of an engine's events.",
)
@click.option(
    "--kv-events-format",
    type=click.Choice(["map", "array"]),
    default=_ZMQ.format,
    show_default=True,
    help="How an event is written: map, as vLLM does since 0.28, or array, as before.",
)
@click.option(
    "--kv-events-grpc",
    is_flag=True,
    help="Serve KV events over gRPC too, by SMG's SubscribeKvEvents. With --api-keys a key needs "
    "the scope events.",
)
@click.option(
    "--otlp-endpoint",
    metavar="URL",
    help="OpenTelemetry collector that is sent traces and metrics of requests, never their "
    "content. Default: as OTEL_EXPORTER_OTLP_ENDPOINT says.",
)
@click.option(
    "--metrics-compat",
    type=click.Choice(["none", "vllm"]),
    default=_DEFAULTS.metrics_compat,
    show_default=True,
    help="Expose metrics under the names of another server too, for dashboards and routers.",
)
@click.option(
    "--hooks",
    metavar="MODULE:CLASS",
    help="Class whose methods on_request, on_prompt, logits_processor and on_output are called in "
    "processes of their own: see docs/hooks.md.",
)
@click.option(
    "--hook-timeout",
    type=click.FloatRange(0.01),
    help=f"Seconds that a call of a hook may take. Default: {_HOOKS.timeout_s:g}.",
)
@click.option(
    "--hook-processes",
    type=click.IntRange(1, 64),
    help=f"Processes that call hooks, beside a spare one. Default: {_HOOKS.num_processes}.",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="info",
    show_default=True,
)
def command(
    engines: tuple[str, ...],
    models: Path | None,
    poll: float | None,
    explicit: bool,
    load: tuple[str, ...],
    host: str,
    grpc_port: int,
    http_port: int,
    no_http: bool,
    cors_origin: tuple[str, ...],
    no_page: bool,
    threads: int | None,
    kv_bytes: int | None,
    kv_host_bytes: int,
    step_target: float,
    max_queue: int,
    max_streams: int,
    max_connection_streams: int,
    max_connections: int,
    max_request_bytes: int,
    max_prompt_bytes: int,
    max_priority: int,
    share_prefixes: bool,
    draft: Literal["ngram"] | None,
    draft_tokens: int | None,
    no_prefix_cache: bool,
    dummy_weights: bool,
    generation_config: GenerationConfig,
    drain_timeout: float,
    digests: tuple[str, ...],
    require_signature: bool,
    trust: Path | None,
    tls_cert: Path | None,
    tls_key: Path | None,
    tls_client_ca: Path | None,
    api_keys: Path | None,
    allow_anonymous: bool,
    audit_log: Path | None,
    audit_content: bool,
    audit_max_bytes: int,
    audit_keep: int,
    kv_events: str | None,
    kv_events_replay: str | None,
    kv_events_topic: str,
    kv_events_format: "EventFormat",
    kv_events_grpc: bool,
    otlp_endpoint: str | None,
    metrics_compat: MetricsCompat,
    hooks: str | None,
    hook_timeout: float | None,
    hook_processes: int | None,
    log_level: str,
) -> None:
    """Serve engines over gRPC and HTTP until SIGTERM or Ctrl-C, which let running requests end."""
    _log_to_stderr(log_level)
    tls = _tls(tls_cert, tls_key, tls_client_ca)
    access = AccessConfig(api_keys, needs_certificate=tls_client_ca is not None)
    repository = _repository(models, poll, load, explicit=explicit)
    _check_engines(engines, repository, digests)
    sources = pin_digests(engine_sources(engines), digests)
    _check_origins(cors_origin, no_http=no_http)
    zmq = _zmq(kv_events, kv_events_replay, kv_events_topic, kv_events_format)
    if zmq is not None:
        zmq.check([one.name for one in sources] or _SEVERAL)
    if not allow_anonymous:
        _check_reach(host, access)
        _check_reach_of_events(zmq)
    config = ServerConfig(
        engines=sources,
        frontends=(
            GrpcConfig(host, grpc_port, tls, kv_events_grpc),
            *(
                ()
                if no_http
                else (HttpConfig(host, http_port, tls, cors_origin, has_page=not no_page),)
            ),
            *(() if zmq is None else (zmq,)),
        ),
        limits=ServiceLimits(
            max_streams=max_streams,
            max_connection_streams=max_connection_streams,
            max_connections=max_connections,
            max_request_bytes=max_request_bytes,
            max_prompt_bytes=max_prompt_bytes,
            max_priority=max_priority,
            share_prefixes=share_prefixes,
        ),
        engine=EngineConfig(
            max_queue=max_queue,
            prefix_cache=not no_prefix_cache,
            step_target_s=step_target,
            drafts=_drafts(draft, draft_tokens),
            num_threads=threads,
            kv_bytes=kv_bytes,
            kv_host_bytes=kv_host_bytes,
            kv_events=kv_events is not None or kv_events_grpc,
            dummy_weights=dummy_weights,
            trust=_trust(trust, required=require_signature),
            generation_config=generation_config,
        ),
        drain_timeout_s=drain_timeout,
        access=access,
        repository=repository,
        audit=_audit(audit_log, audit_max_bytes, audit_keep, has_content=audit_content),
        hooks=_hooks(hooks, hook_timeout, hook_processes),
        metrics_compat=metrics_compat,
        telemetry=telemetry_config(otlp_endpoint),
    )
    asyncio.run(_serve(config))


def _repository(
    models: Path | None, poll_s: float | None, load: tuple[str, ...], *, explicit: bool
) -> RepositoryConfig | None:
    given = {"--poll": poll_s is not None, "--explicit": explicit, "--load": bool(load)}
    if models is None:
        for option in (option for option, is_given in given.items() if is_given):
            raise RequestError("has no effect alone", field=option, remedy="Give --models DIR too")
        return None
    if explicit == (poll_s is not None):
        raise RequestError(
            "needs one of --poll and --explicit",
            field="--models",
            remedy="--poll follows the directory; --explicit takes orders of clients",
        )
    if load and not explicit:
        raise RequestError(
            "has no effect with --poll, which loads all", field="--load", remedy="Leave it out"
        )
    return RepositoryConfig(models, poll_s, load)


def _check_engines(
    engines: tuple[str, ...], repository: RepositoryConfig | None, digests: tuple[str, ...]
) -> None:
    if bool(engines) == (repository is not None):
        raise RequestError(
            "both engines and a directory of them are given"
            if engines
            else "no engine is given, and no directory of engines",
            field="ENGINE",
            remedy="Give engines, or --models DIR",
        )
    if digests and repository is not None:
        raise RequestError(
            "does not go with --models, whose engines change",
            field="--digest",
            remedy="Give --require-signature and --trust",
        )


async def _serve(config: ServerConfig) -> None:
    await Server(config, opener=open_handle).run()


def _drafts(method: Literal["ngram"] | None, num_tokens: int | None) -> DraftConfig | None:
    if method is not None:
        return DraftConfig(method, _DRAFTS.num_tokens if num_tokens is None else num_tokens)
    if num_tokens is not None:
        raise RequestError(
            "has no effect alone", field="--draft-tokens", remedy="Give --draft ngram as well"
        )
    return None


def _trust(keys: Path | None, *, required: bool) -> Path | None:
    if required and keys is None:
        raise RequestError(
            "needs keys to compare with",
            field="--require-signature",
            remedy="Give --trust KEYS: a PEM public key, or a directory of them",
        )
    if keys is not None and not required:
        raise RequestError(
            "has no effect alone", field="--trust", remedy="Give --require-signature as well"
        )
    return keys


def _audit(
    path: Path | None, max_bytes: int, num_kept: int, *, has_content: bool
) -> AuditConfig | None:
    if path is not None:
        return AuditConfig(LineLogConfig(path, max_bytes, num_kept), has_content)
    if has_content:
        raise RequestError(
            "has no effect alone", field="--audit-content", remedy="Give --audit-log FILE as well"
        )
    return None


def _hooks(
    name: str | None, timeout_s: float | None, num_processes: int | None
) -> HooksConfig | None:
    if name is not None:
        if not all(name.partition(":")):
            raise RequestError(f"is {name[:200]!r}", field="--hooks", remedy="Give module:Class")
        return HooksConfig(
            name,
            _HOOKS.timeout_s if timeout_s is None else timeout_s,
            _HOOKS.num_processes if num_processes is None else num_processes,
        )
    for option, given in (("--hook-timeout", timeout_s), ("--hook-processes", num_processes)):
        if given is not None:
            raise RequestError(
                "has no effect alone", field=option, remedy="Give --hooks MODULE:CLASS as well"
            )
    return None


def _check_origins(origins: tuple[str, ...], *, no_http: bool) -> None:
    if origins and no_http:
        raise RequestError("has no effect with --no-http", field="--cors-origin")
    for origin in origins:
        if origin != "*" and not _ORIGIN.fullmatch(origin):
            raise RequestError(
                f"{origin[:80]!r} is not an origin",
                field="--cors-origin",
                remedy="Give one as browsers send it, such as https://chat.example.com, or *",
            )


def _check_reach(host: str, access: AccessConfig) -> None:
    if access == OPEN and not is_loopback(host):
        raise RequestError(
            f"{host} is reached from other machines, and anybody could use the server",
            field="--host",
            remedy="Give --api-keys or --tls-client-ca, or --allow-anonymous to let anybody in",
        )


def _zmq(
    endpoint: str | None, replay: str | None, topic: str, how: "EventFormat"
) -> ZmqConfig | None:
    if endpoint is not None:
        return ZmqConfig(endpoint, replay or "", topic, how)
    if replay is not None:
        raise RequestError(
            "has no effect alone",
            field="--kv-events-replay",
            remedy="Give --kv-events tcp://ADDRESS:PORT as well",
        )
    return None


def _check_reach_of_events(zmq: ZmqConfig | None) -> None:
    """Refuse to publish events to other machines without --allow-anonymous: ZeroMQ has no keys."""
    if zmq is not None and not zmq.is_local:
        raise RequestError(
            "is reached from other machines, and sends anybody the token ids of all prompts",
            field="--kv-events",
            remedy="Listen on tcp://127.0.0.1:PORT, or give --allow-anonymous and let only routers "
            "reach the port",
        )


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> ServerTls | None:
    if cert is None and key is None and client_ca is None:
        return None
    if cert is None or key is None:
        raise RequestError(
            "is missing",
            field="--tls-cert" if cert is None else "--tls-key",
            remedy="TLS needs --tls-cert and --tls-key",
        )
    return ServerTls(cert, key, client_ca)


def _log_to_stderr(level: str) -> None:
    """One line an event, in UTC: `2026-01-31T12:00:00Z INFO trtc.server phase=open ...`."""
    formatter = CallFormatter(
        "%(asctime)sZ %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%dT%H:%M:%S"
    )
    formatter.converter = time.gmtime
    handler = logging.StreamHandler()
    handler.setFormatter(formatter)
    logging.basicConfig(level=level.upper(), handlers=[handler])
